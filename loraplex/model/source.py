"""Finding a model's checkpoint: a local folder, or a Hugging Face id (downloaded once, then cached)."""

from __future__ import annotations

from pathlib import Path

from loraplex.core.errors import HubError, ModelError
from loraplex.core.hub import fetch_snapshot, parse_hub_repo
from loraplex.core.shape import ModelShape
from loraplex.model.config import load_config

_CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]
_OTHER_FORMATS = ["consolidated*", "original/*"]  # the same weights again, in their authors' own format


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """Return the checkpoint folder of `model`; hub files are fetched with a progress bar if not cached."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{model} is a file; give the checkpoint's folder")
    repo = parse_hub_repo(model)
    if repo is None or repo.revision is not None:
        raise ModelError(f"there is no folder {model}, and it is no Hugging Face id (owner/name) either")
    try:
        folder = fetch_snapshot(repo, _CONFIG_FILES)
        if weights:
            load_config(folder)  # refuse unsupported models before gigabytes are fetched
            # The same commit, whatever is pushed meanwhile.
            fetch_snapshot(
                repo.at(folder.name), _CONFIG_FILES + _WEIGHT_FILES, ignore_patterns=_OTHER_FORMATS
            )
        return folder
    except HubError as error:
        raise ModelError(str(error)) from error


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model given by folder or hub id; no weights are read or fetched."""
    return load_config(resolve_model(model, weights=False)).shape
