"""The adapters a server begins with: those loaded through the API before, and those it is started with.

A name that was loaded through the API stays what it was made, and is served while its folder or repository is
one that adapters may be loaded from: what was closed since is closed to what was loaded before, too. All
other names are what the adapters and folders given now say, a branch of a repository by what it is now; the
registry only saves reading them again, and forgets those that are given no more. This server holds in the
registry all that it serves, whoever else holds it: what others unload is still here at the next start.
Nothing that is wrong with one adapter keeps the others from being served; a note says what was left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapters.base_name import name_adapters, other_base, other_base_warning
from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.peft_reader import read_adapters
from loraplex.adapters.registry import Origin, RegistryEntry
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import AdapterError, CapacityError, PathNotAllowedError, StorageError, UserError
from loraplex.core.hub import HubRepo
from loraplex.server.adapter_service import AdapterService


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """`notes` has one line for everything that was skipped or changed, or is worth a warning."""

    num_served: int
    num_skipped: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenAdapter:
    """An adapter the server is started with: its folder, or a repository of the hub."""

    name: str
    source: Path | HubRepo


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A name to serve. `spec` is None where the files must be read (again), an error where they cannot be.

    `repo` is what must be fetched first, `source` the repository and commit that `path` was fetched from.
    """

    name: str
    path: Path
    origin: Origin
    spec: AdapterSpec | UserError | None
    registered: RegistryEntry | None
    repo: HubRepo | None = None
    source: HubRepo | None = None

    @property
    def is_checked(self) -> bool:
        """Whether it may only be read from folders that are open for loading."""
        return self.origin is Origin.API and self.source is None

    @property
    def where(self) -> str:
        return str(self.source or self.repo or self.path)

    def change_note(self, spec: AdapterSpec) -> str | None:
        """What a user should know if `spec` is not what the name stood for before."""
        if self.registered is None or self.registered.spec.version == spec.version:
            return None
        if self.registered.spec.path != spec.path:
            return f"adapter {self.name!r}: serving {spec.path} instead of {self.registered.spec.path}"
        return f"adapter {self.name!r}: its files have changed; serving the new version"


async def start_adapters(
    service: AdapterService, folders: Sequence[Path], given: Sequence[GivenAdapter] = ()
) -> StartReport:
    """Serve what the API was told to, the adapters that are given, and what the folders have.

    Raises AdapterError if a folder itself cannot be read, StorageError if the registry cannot.
    """
    notes: list[str] = []
    entries = {entry.name: entry for entry in await asyncio.to_thread(service.registry.all)}
    candidates = await asyncio.to_thread(_candidates, service, entries, given, folders, notes)
    candidates = await asyncio.to_thread(_fetch_missing, service, candidates)
    specs = await asyncio.to_thread(_read_missing, service, candidates)

    to_register: dict[Origin, list[tuple[str, AdapterSpec]]] = {origin: [] for origin in Origin}
    num_served = 0
    for candidate, spec in zip(candidates, specs, strict=True):
        if isinstance(spec, UserError):
            notes.append(f"adapter {candidate.name!r} is not served: {spec}")
            continue
        try:
            await service.adopt(candidate.name, spec)
        except (UserError, CapacityError) as error:
            notes.append(f"adapter {candidate.name!r} is not served: {error}")
            continue
        num_served += 1
        is_registered = candidate.registered is not None and candidate.registered.spec == spec
        if not (is_registered and service.registry.holds(candidate.name)):
            to_register[candidate.origin].append((candidate.name, spec))
        if note := candidate.change_note(spec):
            notes.append(note)
    notes += await asyncio.to_thread(_other_base_notes, service)
    names = {candidate.name for candidate in candidates}
    sources = {candidate.name: candidate.source for candidate in candidates}
    gone = [entry.name for entry in entries.values() if _is_of_folder(entry) and entry.name not in names]
    try:
        await asyncio.to_thread(service.registry.remove_many, gone)
        for origin, adapters in to_register.items():
            blocked = await asyncio.to_thread(
                service.registry.put_many, adapters, origin=origin, sources=sources
            )
            for name, pid in blocked.items():
                reason = service.registry.explain_blocked(name, pid)
                notes.append(f"adapter {name!r} is served, but not registered: {reason}")
    except StorageError as error:
        notes.append(f"the adapters are served, but could not be registered: {error}")
    return StartReport(num_served=num_served, num_skipped=len(candidates) - num_served, notes=tuple(notes))


def _other_base_notes(service: AdapterService) -> list[str]:
    """One note for each other base model that is named: adapters of one project tend to name the same."""
    by_base: dict[str, list[str]] = {}
    for adapter in service.served():
        if other := other_base(adapter.spec.path, service.known_as):
            by_base.setdefault(other, []).append(adapter.name)
    return [
        f"{name_adapters(names)}: {other_base_warning(other, service.base_model)}"
        for other, names in by_base.items()
    ]


def _candidates(
    service: AdapterService,
    entries: dict[str, RegistryEntry],
    given: Sequence[GivenAdapter],
    folders: Sequence[Path],
    notes: list[str],
) -> list[_Candidate]:
    """The names to serve, sorted: those of the API first, then those given one by one, then each folder's."""
    found: dict[str, _Candidate] = {}
    for name, entry in entries.items():
        if not _is_of_folder(entry):
            found[name] = _remembered(service, entry)
    started_with = [_given(each, entries.get(each.name)) for each in given]
    for folder in folders:
        discovery = discover_adapters(folder)
        notes += discovery.notes
        started_with += [
            _candidate(name, path.resolve(), Origin.FOLDER, entries.get(name))
            for name, path in discovery.adapters
        ]
    for candidate in started_with:
        known = found.setdefault(candidate.name, candidate)
        if known is not candidate and (note := _taken_note(known, candidate)):
            notes.append(note)
    if service.base_model in found:
        notes.append(f"adapter {service.base_model!r} is not served: the base model has that name")
        del found[service.base_model]
    return [found[name] for name in sorted(found)]


def _taken_note(known: _Candidate, other: _Candidate) -> str | None:
    """Why `other` is not served, if it is not the very same adapter."""
    if known.origin is Origin.API:
        return (
            f"skipped {other.where}: the name {other.name!r} was loaded from {known.where} through "
            "the API; unload it to serve this one at the next start"
        )
    if known.where == other.where:
        return None
    return f"skipped {other.where}: the name {other.name!r} is taken by {known.where}"


def _is_of_folder(entry: RegistryEntry) -> bool:
    return entry.origin is Origin.FOLDER


def _remembered(service: AdapterService, entry: RegistryEntry) -> _Candidate:
    """An adapter of the API. It keeps its name even where it may not be served, as the registry keeps it."""
    candidate = _candidate(entry.name, entry.spec.path, Origin.API, entry)
    if entry.source is not None:
        return _remembered_of_hub(service, candidate, entry.source)
    try:
        service.allowed.check(entry.spec.path)
    except PathNotAllowedError:
        closed = PathNotAllowedError(
            f"{entry.spec.path} is outside the folders that adapters may be loaded from; start the server "
            f"with --allow-adapter-dir {entry.spec.path.parent} to serve it again, or unload it"
        )
        return replace(candidate, spec=closed)
    return candidate


def _remembered_of_hub(service: AdapterService, candidate: _Candidate, source: HubRepo) -> _Candidate:
    """The commit that was loaded then; it is fetched again only where the cache has lost it."""
    candidate = replace(candidate, source=source)
    try:
        service.hub.allowed.check(source)
    except PathNotAllowedError:
        closed = PathNotAllowedError(
            f"{source.repo_id} is no repository that adapters may be fetched from; start the server with "
            f"--allow-adapter-repo {source.repo_id} to serve it again, or unload it"
        )
        return replace(candidate, spec=closed)
    return replace(candidate, repo=source) if candidate.spec is None else candidate


def _given(given: GivenAdapter, entry: RegistryEntry | None) -> _Candidate:
    if isinstance(given.source, Path):
        return _candidate(given.name, given.source.resolve(), Origin.FOLDER, entry)
    # Where it will be is known when it is here.
    unknown = Path(given.source.repo_id)
    return _Candidate(
        name=given.name,
        path=unknown,
        origin=Origin.FOLDER,
        spec=None,
        registered=entry,
        repo=given.source,
    )


def _candidate(name: str, path: Path, origin: Origin, entry: RegistryEntry | None) -> _Candidate:
    """Only the registered spec of the same folder, with files that have not changed, is as good as new."""
    spec = (
        entry.spec if entry is not None and entry.spec.path == path and files_unchanged(entry.spec) else None
    )
    return _Candidate(name=name, path=path, origin=origin, spec=spec, registered=entry)


def _fetch_missing(service: AdapterService, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """All that is to be fetched, fetched at once; an error takes the place of what could not be had."""
    fetched = iter(service.hub.fetch_many([each.repo for each in candidates if each.repo is not None]))
    return [each if each.repo is None else _fetched(each, each.repo, next(fetched)) for each in candidates]


def _fetched(candidate: _Candidate, repo: HubRepo, result: Path | AdapterError) -> _Candidate:
    if isinstance(result, AdapterError):
        return replace(candidate, spec=result)
    found = _candidate(candidate.name, result, candidate.origin, candidate.registered)
    return replace(found, source=repo.at(result.name))


def _read_missing(service: AdapterService, candidates: Sequence[_Candidate]) -> list[AdapterSpec | UserError]:
    """The spec of each candidate. Folders that were named through the API must still be allowed ones."""
    unread = [each for each in candidates if each.spec is None]
    from_api = [each.path for each in unread if each.is_checked]
    given = [each.path for each in unread if not each.is_checked]
    read_given = iter(read_adapters(given, service.shape))
    read_from_api = iter(read_adapters(from_api, service.shape, open_file=service.allowed.open))
    return [
        each.spec if each.spec is not None else next(read_from_api if each.is_checked else read_given)
        for each in candidates
    ]
