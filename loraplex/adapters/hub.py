"""Adapters of the Hugging Face hub, fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from loraplex.adapters.checkpoint_files import PICKLE_FILE
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import (
    AdapterError,
    AdapterFetchError,
    AdapterFormatError,
    HubError,
)
from loraplex.core.hub import HubRepo, fetch_snapshot, list_files

_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


def fetch_adapter(repo: HubRepo) -> Path:
    """Return the folder with an adapter's two files, complete and of one commit, which is the folder's name.

    Raises AdapterFetchError if they could not be fetched, AdapterFormatError if the repository lacks them.
    """
    try:
        folder = fetch_snapshot(repo, _FILES)
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if not missing:
            return folder
        files = list_files(repo.at(folder.name))
    except HubError as error:
        raise AdapterFetchError(str(error)) from error
    raise _incomplete(repo, missing, files)


def _incomplete(repo: HubRepo, missing: list[str], files: frozenset[str]) -> AdapterError:
    """Return why a repository has no adapter in it; `files` lists all its files."""
    if CONFIG_FILE in missing and CONFIG_FILE not in files:
        nested = sorted(name for name in files if name.endswith(f"/{CONFIG_FILE}"))
        hint = (
            f"its adapters are in subfolders ({', '.join(nested[:3])}): download it and give one of them"
            if nested
            else "name the repository of a PEFT adapter, not that of a whole model"
        )
        return AdapterFormatError(f"{repo} has no {CONFIG_FILE}; {hint}")
    if WEIGHTS_FILE in files:
        return AdapterFetchError(f"only a part of {repo} is in the cache; try again")
    if PICKLE_FILE in files:
        return AdapterFormatError(
            f"{repo} has its weights in {PICKLE_FILE} alone, and pickles are never opened because they can "
            "run code; ask its owner for safetensors, or load it with PEFT where you trust it, save it with "
            "save_pretrained(..., safe_serialization=True), and give that folder"
        )
    return AdapterFormatError(f"{repo} has no {WEIGHTS_FILE}; its owner has to save it with save_pretrained")
