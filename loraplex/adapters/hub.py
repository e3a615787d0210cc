"""Adapters from the Hugging Face hub: located, checked against the allowed repositories, and fetched."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from loraplex.adapters.checkpoint_files import PICKLE_FILE
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import (
    AdapterError,
    AdapterFetchError,
    AdapterFormatError,
    HubError,
    PathNotAllowedError,
)
from loraplex.core.hub import HubRepo, fetch_snapshot, list_files, parse_hub_repo

_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


class AllowedRepos:
    """Patterns of repositories that the operator opened for requests, like `my-org/*`; without any, all are
    refused."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """Raise AdapterError for a pattern that no repository could match."""
        self._patterns = tuple(patterns)
        for pattern in self._patterns:
            if pattern != "*" and pattern.count("/") != 1:
                raise AdapterError(
                    f"--allow-adapter-repo {pattern} matches no repository; write owner/name, or owner/* for "
                    "all of an owner's"
                )

    def check(self, repo: HubRepo) -> None:
        """Raise PathNotAllowedError unless a pattern matches `owner/name`. All revisions are allowed then."""
        if any(fnmatchcase(repo.repo_id, pattern) for pattern in self._patterns):
            return
        state = "is not open for it" if self._patterns else "is off"
        raise PathNotAllowedError(
            f"fetching {repo.repo_id} from the Hugging Face hub {state}; start the server with "
            f"--allow-adapter-repo {repo.repo_id} to open that repository"
        )


def locate_adapter(source: str | Path) -> Path | HubRepo:
    """Return the folder or repository that a source means. An existing path wins; a Path is never a
    repository."""
    path = Path(os.path.expanduser(source))
    if os.path.exists(path) or isinstance(source, Path):
        return path
    repo = parse_hub_repo(source)
    if repo is None:
        raise AdapterError(neither(f"there is no folder {source}"))
    return repo


def neither(no_folder: str) -> str:
    """Return the message for a source that is neither a folder, as `no_folder` says, nor a repository."""
    return (
        f"{no_folder}, and it is no repository of the Hugging Face hub (owner/name or owner/name@revision) "
        "either"
    )


def resolve_adapter(source: str | Path) -> Path:
    """Return an adapter's folder, given by folder or repository. Downloads in this thread. Raises
    AdapterError."""
    located = locate_adapter(source)
    return fetch_adapter(located) if isinstance(located, HubRepo) else located


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
