"""Fetch and read the files of adapters that a server starts with, and read them again when they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.peft_reader import read_adapters
from loraplex.adapters.remote import RemoteSource
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import AdapterError, UserError
from loraplex.server.adapter_choice import Candidate, candidate_of
from loraplex.server.adapter_service import AdapterService, ToServe


def fetch_missing(service: AdapterService, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fetch all remote sources at once. A candidate whose download failed has the error as its spec."""
    fetched = iter(
        service.files.remote.fetch_many([each.remote for each in candidates if each.remote is not None])
    )
    return [
        each if each.remote is None else _fetched(each, each.remote, next(fetched)) for each in candidates
    ]


def _fetched(candidate: Candidate, remote: RemoteSource, result: Path | AdapterError) -> Candidate:
    if isinstance(result, AdapterError):
        return replace(candidate, spec=result)
    found = candidate_of(
        candidate.name, result, candidate.requested_by, candidate.registered, is_kept=candidate.is_kept
    )
    return replace(found, source=remote.at(result.name))


def read_missing(service: AdapterService, candidates: Sequence[Candidate]) -> list[AdapterSpec | UserError]:
    """Return the spec of each candidate. Folders named through the API must still be allowed ones."""
    unread = [each for each in candidates if each.spec is None]
    from_api = [each.path for each in unread if each.is_checked]
    given = [each.path for each in unread if not each.is_checked]
    read_given = iter(read_adapters(given, service.files.shape))
    read_from_api = iter(read_adapters(from_api, service.files.shape, open_file=service.files.allowed.open))
    return [
        each.spec if each.spec is not None else next(read_from_api if each.is_checked else read_given)
        for each in candidates
    ]


class FindAgain:
    """Looks again for a candidate that was left out. Files are read only if they changed since they were last
    read or could not be read: reading those of a large adapter repeatedly in vain would keep the disk
    busy."""

    def __init__(self, service: AdapterService, candidate: Candidate) -> None:
        self._service = service
        self._candidate = candidate
        self._failed: tuple[UserError, _Stamp] | None = None  # the last error and its stamp

    def __call__(self) -> ToServe:
        candidate = self._candidate
        if isinstance(candidate.spec, AdapterSpec) and not files_unchanged(candidate.spec):
            candidate = replace(candidate, spec=None)
        stamp = None if candidate.remote is not None else _stamp(candidate.path)
        if candidate.spec is None and self._failed is not None and stamp == self._failed[1]:
            raise self._failed[0]
        [fetched] = fetch_missing(self._service, [candidate])
        [spec] = read_missing(self._service, [fetched])
        if isinstance(spec, UserError):
            self._failed = None if stamp is None else (spec, stamp)
            raise spec
        self._candidate = replace(fetched, spec=spec, remote=None)
        return ToServe(adapter=fetched.served_as(spec), canary=fetched.rollout.canary, origin=fetched.origin)


_Stamp = tuple[tuple[str, int, int, int], ...]


def _stamp(folder: Path) -> _Stamp | None:
    """Return a value that changes whenever files of a folder do; None if it cannot be read."""
    try:
        found = [(path.name, path.stat()) for path in (folder, *sorted(folder.iterdir()))]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)
