"""Adapters that are fetched before they are read: from the Hugging Face hub, or from S3.

Each kind of source has a `place` without a revision, a `name`, and `at(revision)`; parsing its text gives the
same source again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from loraplex.adapters.hub import fetch_adapter as fetch_from_hub
from loraplex.adapters.least_rate import bytes_below, fetch_at_least_rate
from loraplex.adapters.s3 import SCHEME, S3Folder, fetch_s3, kept_in, parse_s3, why_no_s3
from loraplex.core.errors import AdapterError, PathNotAllowedError
from loraplex.core.hub import HubRepo, cache_folder, parse_hub_repo

RemoteSource = HubRepo | S3Folder

_FILE_SCHEME: Final = "file:"
_WILDCARDS: Final = frozenset("*?[]")


class AllowedSources:
    """Patterns of the remote sources that the operator opened for requests, like `my-org/*` or
    `s3://bucket/adapters/*`; without any, all are refused."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """Raise AdapterError for a pattern that no source could match."""
        self._patterns = tuple(patterns)
        for pattern in self._patterns:
            if pattern.startswith(SCHEME):
                bucket = pattern.removeprefix(SCHEME).partition("/")[0]
                if _WILDCARDS & set(bucket) or parse_s3(f"{SCHEME}{bucket}") is None:
                    raise AdapterError(
                        f"--allow-adapter-repo {pattern} names no bucket; write s3://bucket/prefix, or "
                        "s3://bucket/* for all of a bucket"
                    )
            elif pattern != "*" and pattern.count("/") != 1:
                raise AdapterError(
                    f"--allow-adapter-repo {pattern} matches no repository; write owner/name, owner/* for "
                    "all of an owner's, or s3://bucket/prefix/*"
                )

    def check(self, source: RemoteSource) -> None:
        """Raise PathNotAllowedError unless a pattern matches the place. All revisions are allowed then. `*`
        opens the hub, which is public, and no bucket, which is read with the server's own credentials."""
        is_s3 = isinstance(source, S3Folder)
        of_kind = [each for each in self._patterns if each.startswith(SCHEME) is is_s3]
        if any(fnmatchcase(source.place, pattern) for pattern in of_kind):
            return
        state = "is not open for it" if of_kind else "is off"
        where = "" if is_s3 else " from the Hugging Face hub"
        raise PathNotAllowedError(
            f"fetching {source.place}{where} {state}; start the server with "
            f"--allow-adapter-repo {source.place} to open it"
        )


def parse_remote(text: str) -> RemoteSource | None:
    """Parse a repository of the hub or a URL of S3; None if it is neither. Does not check that it exists."""
    return parse_s3(text) if text.startswith(SCHEME) else parse_hub_repo(text)


def local_path(text: str) -> str | None:
    """Return the path of a `file:` URL, or None for other texts. Raises AdapterError for a wrong URL."""
    if text[: len(_FILE_SCHEME)].lower() != _FILE_SCHEME:
        return None
    try:
        url = urlsplit(text)
    except ValueError:
        url = urlsplit(_FILE_SCHEME)
    path = unquote(url.path)
    has_more = url.netloc not in ("", "localhost") or url.query or url.fragment
    if has_more or not path.startswith("/") or "\0" in path:
        raise AdapterError(f"{text!r} is no folder on this machine; write file:///folder, or the path alone")
    return path


def locate_adapter(source: str | Path) -> Path | RemoteSource:
    """Return the folder or remote source that a text means. An existing path wins over a repository; a Path
    is always a folder."""
    if isinstance(source, str) and (path := local_path(source)) is not None:
        return Path(path)
    path_of = Path(os.path.expanduser(source))
    if isinstance(source, Path) or (not source.startswith(SCHEME) and os.path.exists(path_of)):
        return path_of
    found = parse_remote(source)
    if found is None:
        raise AdapterError(why_no_s3(source) or neither(f"there is no folder {source}"))
    return found


def neither(no_folder: str) -> str:
    """Return the message for a source that is neither a folder, as `no_folder` says, nor a remote source."""
    return (
        f"{no_folder}, and it is no repository of the Hugging Face hub (owner/name or owner/name@revision) "
        "and no s3://bucket/prefix either"
    )


def resolve_adapter(source: str | Path) -> Path:
    """Return an adapter's folder, given by folder or remote source. Downloads in this thread. Raises
    AdapterError."""
    located = locate_adapter(source)
    return located if isinstance(located, Path) else fetch_adapter(located)


def fetch_adapter(source: RemoteSource) -> Path:
    """Return the folder with an adapter's two files, complete and of one revision, which is its name.

    Raises AdapterFetchError if they could not be fetched, or come too slowly, AdapterFormatError if the
    source has no adapter.
    """
    if isinstance(source, S3Folder):
        fetch, kept = partial(fetch_s3, source), kept_in(source)
    else:
        fetch, kept = partial(fetch_from_hub, source), cache_folder(source)
    return fetch_at_least_rate((kept, source), source.place, fetch, partial(bytes_below, kept))
