"""Decide which adapter each name gets when a server starts: one that the API loaded before, or one that is
given now. See `adapter_startup` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.registry import Origin, RegistryEntry
from loraplex.adapters.remote import RemoteSource
from loraplex.adapters.rollout import NO_OTHERS, Rollout, VersionRef, moved_on
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterError,
    InvalidRequestError,
    LoraplexError,
    PathNotAllowedError,
    UserError,
)
from loraplex.server.adapter_service import AdapterService
from loraplex.server.served_adapter import ServedAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenAdapter:
    """An adapter the server is started with: its folder, or a remote source."""

    name: str
    source: Path | RemoteSource


class RequestedBy(Enum):
    """The source of the request to serve an adapter."""

    API = auto()
    """A call to an earlier server, which the registry remembers."""
    OPTION = auto()
    """`--adapter` of this server."""
    FOLDER = auto()
    """A folder of `--adapters`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A name to serve, and the adapter that may be served under it.

    `spec` is None if the files must be read (again), and an error if they cannot be read. `remote` is
    what to fetch first; `source` is the remote source with the revision that `path` was fetched from.
    `registered` is the registry's entry for this name, which may be a different adapter. `is_kept`: that
    entry stays registered, because the API loaded it or other servers serve it.
    """

    name: str
    path: Path
    requested_by: RequestedBy
    spec: AdapterSpec | UserError | None
    registered: RegistryEntry | None
    is_kept: bool
    remote: RemoteSource | None = None
    source: RemoteSource | None = None

    @property
    def is_checked(self) -> bool:
        """Return whether it may be read only from folders that are open for loading."""
        return self.requested_by is RequestedBy.API and self.source is None

    @property
    def origin(self) -> Origin | None:
        """The origin to register it with; None if the registry keeps another adapter."""
        entry = self.registered
        if entry is None or not self.is_kept:
            return Origin.FOLDER
        is_same = self.requested_by is RequestedBy.API or entry.spec.path == self.path
        return entry.origin if is_same or _is_of(entry, self.source) else None

    @property
    def where(self) -> str:
        return str(self.source or self.remote or self.path)

    @property
    def rollout(self) -> Rollout:
        """The registered canary and previous versions; empty if the registered adapter is not the one
        served."""
        return NO_OTHERS if self.registered is None or self.origin is None else self.registered.rollout

    def served_as(self, spec: AdapterSpec) -> ServedAdapter:
        """Return the name with the version to serve. The version it stood for before becomes a rollback
        target."""
        previous, entry = self.rollout.previous, self.registered
        if entry is not None and self.origin is not None:
            old = VersionRef(version=entry.spec.version, path=entry.spec.path, source=entry.source)
            previous = moved_on(previous, old, spec.version)
        return ServedAdapter(name=self.name, spec=spec, source=self.source, previous=previous)

    def change_note(self, spec: AdapterSpec) -> str | None:
        """Return a note for the user if `spec` differs from what the name stood for before, else None."""
        if self.registered is None or self.registered.spec.version == spec.version:
            return None
        if self.origin is None:
            return None  # `note_on_fallback` reports this case
        if self.registered.spec.path != spec.path:
            return f"adapter {self.name!r}: serving {spec.path} instead of {self.registered.spec.path}"
        return f"adapter {self.name!r}: its files have changed; serving the new version"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The adapters to serve, sorted by name, with notes on adapters that are skipped and on other things.

    `fallback` maps names to adapters given now, which are served if the API's adapter of that name cannot be.
    """

    first: list[Candidate]
    fallback: dict[str, Candidate]
    skipped: list[str]
    notes: list[str]


def choose(
    service: AdapterService,
    entries: dict[str, RegistryEntry],
    given: Sequence[GivenAdapter],
    folders: Sequence[Path],
    *,
    is_shared: bool,
) -> Choice:
    """Assign each name one adapter: the API's first, then one given with `--adapter`, then one from a folder.

    `is_shared`: other servers serve what is registered, so every entry is kept as the API's entries are.
    """
    skipped: list[str] = []
    notes: list[str] = []
    kept = {name for name, entry in entries.items() if is_shared or entry.origin is Origin.API}
    started_with = [_given(each, entries.get(each.name), is_kept=each.name in kept) for each in given]
    for folder in folders:
        discovery = discover_adapters(folder)
        notes += discovery.notes
        started_with += [
            candidate_of(name, path.resolve(), RequestedBy.FOLDER, entries.get(name), is_kept=name in kept)
            for name, path in discovery.adapters
        ]
    first_given: dict[str, Candidate] = {}
    for candidate in started_with:
        known = first_given.setdefault(candidate.name, candidate)
        if known.where != candidate.where:
            skipped.append(f"skipped {candidate.where}: the name {known.name!r} is taken by {known.where}")
    remembered = {name: _remembered(service, entries[name]) for name in sorted(kept)}
    for taken in (first_given.pop(service.base_model, None), remembered.pop(service.base_model, None)):
        if taken is not None:
            error = InvalidRequestError(
                f"the base model is called {taken.name!r}; rename the adapter, or name the base model "
                "with --served-model-name"
            )
            raise_if_given(taken, error)
            skipped.append(f"skipped {taken.where}: {error}")
    # An adapter given now may be read from anywhere, so it replaces the remembered entry of the same adapter.
    same = [name for name, each in remembered.items() if _is_same(each, first_given.get(name))]
    for name in same:
        del remembered[name]
    first = first_given | remembered
    fallback = {name: each for name, each in first_given.items() if name in remembered}
    return Choice(
        first=[first[name] for name in sorted(first)], fallback=fallback, skipped=skipped, notes=notes
    )


def _is_same(remembered: Candidate, given: Candidate | None) -> bool:
    entry = remembered.registered
    assert entry is not None, "that is where it is remembered"
    if given is None:
        return False
    is_branch = entry.origin is Origin.FOLDER and _is_of(entry, given.remote)  # the API pins a commit
    return is_branch or given.where == remembered.where


def _is_of(entry: RegistryEntry, remote: RemoteSource | None) -> bool:
    return remote is not None and entry.source is not None and entry.source.place == remote.place


def note_on_fallback(
    candidate: Candidate, api_error: LoraplexError | None, own_error: LoraplexError | None
) -> str:
    """Return the note on a given adapter whose name belongs to a kept one. `api_error`: why the kept one is
    not served; None if it is served."""
    name, entry = candidate.name, candidate.registered
    assert entry is not None, "what is kept is in the registry"
    api_where = entry.source or entry.spec.path
    is_api = entry.origin is Origin.API
    how = "was loaded through the API" if is_api else "another server on the state folder was started with"
    if api_error is None:
        served = f"was loaded from {api_where} through the API" if is_api else f"is {api_where}, which {how}"
        return (
            f"skipped {candidate.where}: the name {name!r} {served}; unload it to serve this one at the next "
            "start"
        )
    if own_error is None:
        return (
            f"adapter {name!r}: serving {candidate.where} instead of {api_where}, which {how} and is not "
            f"served: {api_error}"
        )
    return (
        f"adapter {name!r} is not served: neither {api_where}, which {how} ({api_error}), nor "
        f"{candidate.where} ({own_error})"
    )


def _remembered(service: AdapterService, entry: RegistryEntry) -> Candidate:
    """Return the candidate for a kept registry entry, with an error as its spec if it may not be served."""
    candidate = candidate_of(entry.name, entry.spec.path, RequestedBy.API, entry, is_kept=True)
    if entry.source is not None:
        return _remembered_remote(service, candidate, entry.source)
    try:
        service.files.allowed.check(entry.spec.path)
    except PathNotAllowedError:
        closed = PathNotAllowedError(
            f"{entry.spec.path} is outside the folders that adapters may be loaded from; start the server "
            f"with --allow-adapter-dir {entry.spec.path.parent} to serve it again, or unload it"
        )
        return replace(candidate, spec=closed)
    return candidate


def _remembered_remote(service: AdapterService, candidate: Candidate, source: RemoteSource) -> Candidate:
    """Return the candidate for the revision that was loaded then, fetched again only if the cache has lost
    it."""
    candidate = replace(candidate, source=source)
    try:
        service.files.remote.allowed.check(source)
    except PathNotAllowedError:
        closed = PathNotAllowedError(
            f"{source.place} is no repository that adapters may be fetched from; start the server with "
            f"--allow-adapter-repo {source.place} to serve it again, or unload it"
        )
        return replace(candidate, spec=closed)
    return replace(candidate, remote=source) if candidate.spec is None else candidate


def _given(given: GivenAdapter, entry: RegistryEntry | None, *, is_kept: bool) -> Candidate:
    if isinstance(given.source, Path):
        return candidate_of(given.name, given.source.resolve(), RequestedBy.OPTION, entry, is_kept=is_kept)
    # The folder is known only after the download.
    unknown = Path(given.source.place)
    return Candidate(
        name=given.name,
        path=unknown,
        requested_by=RequestedBy.OPTION,
        spec=None,
        registered=entry,
        is_kept=is_kept,
        remote=given.source,
    )


def candidate_of(
    name: str, path: Path, requested_by: RequestedBy, entry: RegistryEntry | None, *, is_kept: bool
) -> Candidate:
    """Return a candidate. It reuses the registered spec only if that has the same folder and unchanged
    files."""
    spec = (
        entry.spec if entry is not None and entry.spec.path == path and files_unchanged(entry.spec) else None
    )
    return Candidate(
        name=name, path=path, requested_by=requested_by, spec=spec, registered=entry, is_kept=is_kept
    )


def raise_if_given(candidate: Candidate, error: LoraplexError) -> None:
    if candidate.requested_by is RequestedBy.OPTION:
        raise AdapterError(
            f"--adapter {candidate.name}={candidate.where} cannot be served: {error}; mend that, or start "
            "without this option"
        ) from error
