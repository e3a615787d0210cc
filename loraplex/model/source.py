"""Where a model comes from: a local folder, or a Hugging Face id (downloaded once, then from its cache)."""

from __future__ import annotations

from pathlib import Path

from loraplex.core.errors import ModelError
from loraplex.core.shape import ModelShape
from loraplex.model.config import load_config

_CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]
_OTHER_FORMATS = ["consolidated*", "original/*"]  # the same weights again, as their makers keep them


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """The checkpoint folder of `model`; hub files are fetched with a progress bar if not cached."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{model} is a file; give the checkpoint's folder")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(f"there is no folder {model}, and it is no Hugging Face id (owner/name) either")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, allow_patterns=_CONFIG_FILES))
        if weights:
            load_config(folder)  # what cannot be served is refused before gigabytes are fetched
            snapshot_download(
                model, allow_patterns=_CONFIG_FILES + _WEIGHT_FILES, ignore_patterns=_OTHER_FORMATS
            )
        return folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model} is neither a folder here nor to be had from the Hugging Face hub: {reason}. "
            "Check the spelling and the network, or give a local checkpoint folder."
        ) from error


def load_shape(model: str) -> ModelShape:
    """The shape of a model given by folder or hub id; no weights are read or fetched."""
    return load_config(resolve_model(model, weights=False)).shape
