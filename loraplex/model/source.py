"""Where a model comes from: a local folder, or a Hugging Face id (downloaded once, then from its cache)."""

from __future__ import annotations

from pathlib import Path

from loraplex.core.errors import ModelError

_CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]


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

    patterns = _CONFIG_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model} is neither a folder here nor to be had from the Hugging Face hub: {reason}. "
            "Check the spelling and the network, or give a local checkpoint folder."
        ) from error
