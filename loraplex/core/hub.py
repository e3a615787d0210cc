"""The Hugging Face hub: parsing repository names and fetching files, with every failure explained.

Fetched files stay in the hub's own cache (`HF_HOME`), which models, adapters and other programs share.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from loraplex.core.errors import HubError
from loraplex.core.logs import adopt_library_loggers

logger = logging.getLogger(__name__)

_MAX_PART_CHARS: Final = 96
_MAX_REVISION_CHARS: Final = 200
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TOKEN: Final = "set HF_TOKEN, or log in with `hf auth login`"

# A part begins and ends with a letter, digit or underscore. Both the repository and the revision become
# paths in the cache: no '..', no leading '/'.
_PART: Final = re.compile(r"\w(?:[\w.-]*\w)?", re.ASCII)
_REVISION: Final = re.compile(r"\w[\w.+/-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRepo:
    """A model repository: `owner/name`, at a branch, tag or commit; the default branch if that is None."""

    repo_id: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.repo_id.partition("/")[2]

    @property
    def place(self) -> str:
        """The repository without a revision."""
        return self.repo_id

    def at(self, revision: str) -> HubRepo:
        return replace(self, revision=revision)

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def parse_hub_repo(text: str) -> HubRepo | None:
    """Parse `owner/name` or `owner/name@revision`; None if it is neither. Does not check that it exists."""
    repo_id, at, revision = text.partition("@")
    parts = repo_id.split("/")
    if len(parts) != 2 or not all(map(_is_part, parts)):
        return None
    if not at:
        return HubRepo(repo_id=repo_id)
    return HubRepo(repo_id=repo_id, revision=revision) if _is_revision(revision) else None


def fetch_snapshot(
    repo: HubRepo, allow_patterns: Sequence[str], *, ignore_patterns: Sequence[str] = ()
) -> Path:
    """Download the files that match and return their folder, which is named after the commit.

    Files in the cache are not fetched again, and are used if the hub cannot be reached. A file is complete or
    absent. Files that the repository lacks are simply missing. Raises HubError, with the fix in it.
    """
    from huggingface_hub import snapshot_download

    adopt_library_loggers()
    try:
        folder = snapshot_download(
            repo.repo_id,
            revision=repo.revision,
            allow_patterns=list(allow_patterns),
            ignore_patterns=list(ignore_patterns),
        )
    except Exception as error:  # errors of the HTTP client, the storage client and the disk share no base
        raise HubError(_explain(repo, error)) from error
    return Path(folder)


def cache_folder(repo: HubRepo) -> Path:
    """Return where the hub's client keeps a repository's files, whole ones and parts."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo.repo_id, repo_type="model"))


def list_files(repo: HubRepo) -> frozenset[str]:
    """Return the names of all files of a repository. Raises HubError."""
    from huggingface_hub import HfApi

    adopt_library_loggers()
    try:
        return frozenset(HfApi().list_repo_files(repo.repo_id, revision=repo.revision))
    except Exception as error:
        raise HubError(_explain(repo, error)) from error


def _is_part(text: str) -> bool:
    is_clean = "--" not in text and ".." not in text and not text.endswith(".git")
    return is_clean and len(text) <= _MAX_PART_CHARS and _PART.fullmatch(text) is not None


def _is_revision(text: str) -> bool:
    is_clean = ".." not in text and "//" not in text
    return is_clean and len(text) <= _MAX_REVISION_CHARS and _REVISION.fullmatch(text) is not None


def _explain(repo: HubRepo, error: Exception) -> str:
    """Return what went wrong, and the fix."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the file is not in the cache either; the cause says why the hub failed
    match error:
        case GatedRepoError():
            page = f"{_without_password(constants.ENDPOINT)}/{repo.repo_id}"
            return f"{repo.repo_id} is gated: ask for access at {page}, and {_TOKEN}"
        case RepositoryNotFoundError():
            return (
                f"{repo.repo_id} is no folder here, and the Hugging Face hub has no such repository, or it "
                f"is private; check the spelling, and for a private one {_TOKEN}"
            )
        case RevisionNotFoundError():
            revision = repo.revision or constants.DEFAULT_REVISION
            return f"{repo.repo_id} has no branch, tag or commit {revision!r}; name one that it has"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return (
                f"the Hugging Face hub refuses to show {repo.repo_id} (status {error.response.status_code}); "
                f"give a token that is valid and may read it: {_TOKEN}"
            )
        case HfHubHTTPError():
            return (
                f"the Hugging Face hub failed to deliver {repo} (status {error.response.status_code}); "
                "try again later, or give a local folder"
            )
    return _explain_local(repo, error)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _explain_local(repo: HubRepo, error: Exception) -> str:
    """Return what went wrong, for failures that were not a response of the hub."""
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    number = getattr(error, "errno", None)
    if number in _NO_ROOM or "no space left" in str(error).lower():
        return f"there is no room for {repo} in {cache}; free some space, or set HF_HOME to another disk"
    if isinstance(error, OSError) and error.filename is not None:  # a disk error; network errors name no file
        return (
            f"{repo} cannot be kept in {cache} ({error.strerror}); "
            "make that writable, or set HF_HOME to another folder"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"{repo} is not in {cache}, and HF_HUB_OFFLINE forbids to fetch it; "
            "unset that, or give a local folder"
        )
    # The error's text may contain URLs with passwords, so it goes to the log only.
    logger.info("%s could not be fetched: %s", repo, error)
    endpoint = _without_password(constants.ENDPOINT)
    return (
        f"there is no folder {repo} here, and it could not be fetched from {endpoint} "
        f"({type(error).__name__}); check the name and the network"
    )
