"""The adapters a server begins with: those loaded through the API before, and those it is started with.

A name that was loaded through the API stays what it was made, and is served while its folder or repository is
one that adapters may be loaded from: what was closed since is closed to what was loaded before, too. Where it
cannot be served, an adapter that is given now under the same name is served in its place, and the registry
keeps what the API loaded. All other names are what the adapters and folders given now say, a branch of a
repository by what it is now; the registry only saves reading them again, and forgets those that are given no
more.
While other servers run on the registry, all its names are theirs as well and are treated as those of the
API: served from folders that are open here, kept where they cannot be, and not moved to another folder by
what is given here. Given from the same folder, they are what its files are now, and the others follow.
Nothing that is wrong with an adapter of a folder or of the API keeps the others from being served; a note
says what was left out, which is tried again (`left_out`). One that is given by itself (`--adapter`) must be
served, or the start fails; unless one that the API loaded has its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Final

from loraplex.adapters.base_name import name_adapters, other_base, other_base_warning
from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.peft_reader import read_adapters
from loraplex.adapters.registry import AdapterRegistry, NameState, Origin, RegistryEntry
from loraplex.adapters.rollout import NO_OTHERS, Rollout, VersionRef, moved_on
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterError,
    CapacityError,
    InvalidRequestError,
    LoraplexError,
    PathNotAllowedError,
    StorageError,
    UserError,
)
from loraplex.core.hub import HubRepo
from loraplex.server.adapter_service import AdapterService, LeftOut, ToServe
from loraplex.server.canary_startup import restore_canaries
from loraplex.server.served_adapter import ServedAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """`notes` has one line for everything that was skipped or changed, or is worth a warning.

    `num_skipped` counts adapters only, not folders that hold none.
    """

    num_served: int
    num_skipped: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenAdapter:
    """An adapter the server is started with: its folder, or a repository of the hub."""

    name: str
    source: Path | HubRepo


class _RequestedBy(Enum):
    """Where it comes from that an adapter is to be served."""

    API = auto()
    """A call to an earlier server, which the registry remembers."""
    OPTION = auto()
    """`--adapter` of this server."""
    FOLDER = auto()
    """A folder of `--adapters`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A name to serve. `spec` is None where the files must be read (again), an error where they cannot be.

    `repo` is what must be fetched first, `source` the repository and commit that `path` was fetched from.
    `registered` is what the registry has under this name, which need not be this adapter. `is_kept`: it stays
    that, as the API loaded it or other servers serve it.
    """

    name: str
    path: Path
    requested_by: _RequestedBy
    spec: AdapterSpec | UserError | None
    registered: RegistryEntry | None
    is_kept: bool
    repo: HubRepo | None = None
    source: HubRepo | None = None

    @property
    def is_checked(self) -> bool:
        """Tell whether it may only be read from folders that are open for loading."""
        return self.requested_by is _RequestedBy.API and self.source is None

    @property
    def origin(self) -> Origin | None:
        """How to register it; None if the registry is to keep another adapter."""
        entry = self.registered
        if entry is None or not self.is_kept:
            return Origin.FOLDER
        is_same = self.requested_by is _RequestedBy.API or entry.spec.path == self.path
        return entry.origin if is_same or _is_of_repo(entry, self.source) else None

    @property
    def where(self) -> str:
        return str(self.source or self.repo or self.path)

    @property
    def rollout(self) -> Rollout:
        """The other versions of what is registered; none if that is not what is served."""
        return NO_OTHERS if self.registered is None or self.origin is None else self.registered.rollout

    def served_as(self, spec: AdapterSpec) -> ServedAdapter:
        """The name with the version to serve. That which it stood for may be rolled back to."""
        previous, entry = self.rollout.previous, self.registered
        if entry is not None and self.origin is not None:
            old = VersionRef(version=entry.spec.version, path=entry.spec.path, source=entry.source)
            previous = moved_on(previous, old, spec.version)
        return ServedAdapter(name=self.name, spec=spec, source=self.source, previous=previous)

    def change_note(self, spec: AdapterSpec) -> str | None:
        """Return what a user should know if `spec` is not what the name stood for before."""
        if self.registered is None or self.registered.spec.version == spec.version:
            return None
        if self.origin is None:
            return None  # said where it took the place of what the API loaded
        if self.registered.spec.path != spec.path:
            return f"adapter {self.name!r}: serving {spec.path} instead of {self.registered.spec.path}"
        return f"adapter {self.name!r}: its files have changed; serving the new version"


_NUM_AT_ONCE: Final = 4
"""Adapters that are given to the engine at a time: servers of a fleet are asked over the network."""

_Served = tuple[_Candidate, AdapterSpec]


async def start_adapters(
    service: AdapterService, folders: Sequence[Path], given: Sequence[GivenAdapter] = ()
) -> StartReport:
    """Serve what the API was told to, the adapters that are given, and what the folders have.

    Raises AdapterError if one of `given` cannot be served or a folder itself cannot be read, StorageError if
    the registry cannot.
    """
    registry = service.registry
    # States first: what changes between the two reads is looked at again by whoever follows changes.
    states = await asyncio.to_thread(registry.states)
    entries = {entry.name: entry for entry in await asyncio.to_thread(registry.all)}
    is_shared = bool(await asyncio.to_thread(lambda: registry.other_servers))
    choice = await asyncio.to_thread(_choose, service, entries, given, folders, is_shared=is_shared)
    skipped, notes = [*choice.skipped], [*choice.notes]
    served, failed, left_out = await _serve(service, choice.first)
    instead = [choice.fallback[name] for name in failed if name in choice.fallback]
    served_instead, also_failed, also_left_out = await _serve(service, instead)
    for name, error in failed.items():
        if name not in choice.fallback:
            again = "; it is tried again from time to time" if name in left_out else ""
            skipped.append(f"adapter {name!r} is not served: {error}{again}")
    for name, candidate in choice.fallback.items():
        is_served = name in failed and name not in also_failed
        note = _note_on_fallback(candidate, failed.get(name), also_failed.get(name))
        (notes if is_served else skipped).append(note)

    all_served = [*served, *served_instead]
    service.left_out = {
        name: left for name, left in (also_left_out | left_out).items() if service.get(name) is None
    }
    for candidate, spec in all_served:
        if change := candidate.change_note(spec):
            notes.append(change)
    canaries = {each.name: each.rollout.canary for each, _ in all_served if each.rollout.canary is not None}
    missing = await restore_canaries(service, canaries)
    notes += [each.note for each in missing.values()]
    notes += await asyncio.to_thread(_other_base_notes, service)
    names = {candidate.name for candidate in choice.first}
    gone = [name for name, entry in entries.items() if entry.origin is Origin.FOLDER and name not in names]
    rollouts = {adapter.name: adapter.rollout for adapter in service.served()}
    kept = {name: each for name, each in missing.items() if each.kept is not None}
    rollouts |= {name: replace(rollouts[name], canary=each.kept) for name, each in kept.items()}
    notes += await asyncio.to_thread(_register, registry, all_served, rollouts, gone, states)
    service.registered.began_with(states)
    specs = {candidate.name: spec for candidate, spec in all_served}
    for name, each in kept.items():
        state = states.get(name)
        if state is not None and state.has(specs[name], rollouts[name]):  # else it could not be registered
            service.registered.lags(name, each.reason)
    return StartReport(num_served=len(all_served), num_skipped=len(skipped), notes=(*skipped, *notes))


def _register(
    registry: AdapterRegistry,
    served: Sequence[_Served],
    rollouts: Mapping[str, Rollout],
    gone: Sequence[str],
    states: dict[str, NameState],
) -> list[str]:
    """Bring the registry up to what is served, and `states` up to what it has then; returns notes.

    A name that another server changed meanwhile is left as it is in both, and followed later.
    """
    to_register: dict[Origin, list[tuple[str, AdapterSpec]]] = {origin: [] for origin in Origin}
    for candidate, spec in served:
        entry = candidate.registered
        is_registered = entry is not None and (entry.spec, entry.rollout) == (spec, rollouts[candidate.name])
        if candidate.origin is not None and not is_registered:
            to_register[candidate.origin].append((candidate.name, spec))
    sources = {candidate.name: candidate.source for candidate, _ in served}
    try:
        for name in registry.remove_unless_shared(gone):
            states.pop(name, None)
        for origin, adapters in to_register.items():
            states |= registry.put_unless_changed(
                adapters, seen=states, origin=origin, sources=sources, rollouts=rollouts
            )
    except StorageError as error:
        return [f"the adapters are served, but could not be registered: {error}"]
    return []


async def _serve(
    service: AdapterService, candidates: Sequence[_Candidate]
) -> tuple[list[_Served], dict[str, LoraplexError], dict[str, LeftOut]]:
    """Fetch and read what is missing, and serve it; returns what is served, why the others are not, and those
    of these that may be served later: all but what is not open to this server.

    AdapterError if one that is given by itself is among those, at once if its files are the reason.
    """
    fetched = await asyncio.to_thread(_fetch_missing, service, candidates)
    specs = await asyncio.to_thread(_read_missing, service, fetched)
    served: list[_Served] = []
    failed: dict[str, LoraplexError] = {}
    left_out: dict[str, LeftOut] = {}
    for asked, candidate, spec in zip(candidates, fetched, specs, strict=True):
        if isinstance(spec, UserError):
            _raise_if_given(candidate, spec)
            failed[candidate.name] = spec
            if asked.spec is not spec:
                find = _FindAgain(service, asked)
                left_out[candidate.name] = LeftOut(find=find, reason=str(spec), is_refused=False)
    readable = [
        (candidate, spec)
        for candidate, spec in zip(fetched, specs, strict=True)
        if not isinstance(spec, UserError)
    ]
    adapters = [candidate.served_as(spec) for candidate, spec in readable]
    gate = asyncio.Semaphore(_NUM_AT_ONCE)  # in order: where memory ends, the last ones are refused

    async def refusal(adapter: ServedAdapter) -> UserError | CapacityError | None:
        async with gate:
            try:
                await service.adopt(adapter)
            except (UserError, CapacityError) as error:
                return error
        return None

    errors = await asyncio.gather(*map(refusal, adapters))
    for (candidate, spec), error in zip(readable, errors, strict=True):
        if error is None:
            served.append((candidate, spec))
            continue
        _raise_if_given(candidate, error)
        failed[candidate.name] = error
        find = _FindAgain(service, replace(candidate, spec=spec))
        left_out[candidate.name] = LeftOut(find=find, reason=str(error), is_refused=True)
    return served, failed, left_out


class _FindAgain:
    """Finds a candidate that was left out. Files are read only if they are others than those that were read,
    or could not be: to read those of a large adapter again and again in vain would take a disk's time."""

    def __init__(self, service: AdapterService, candidate: _Candidate) -> None:
        self._service = service
        self._candidate = candidate
        self._failed: tuple[UserError, _Stamp] | None = None  # at the last time, and what was there then

    def __call__(self) -> ToServe:
        candidate = self._candidate
        if isinstance(candidate.spec, AdapterSpec) and not files_unchanged(candidate.spec):
            candidate = replace(candidate, spec=None)
        stamp = None if candidate.repo is not None else _stamp(candidate.path)
        if candidate.spec is None and self._failed is not None and stamp == self._failed[1]:
            raise self._failed[0]
        [fetched] = _fetch_missing(self._service, [candidate])
        [spec] = _read_missing(self._service, [fetched])
        if isinstance(spec, UserError):
            self._failed = None if stamp is None else (spec, stamp)
            raise spec
        self._candidate = replace(fetched, spec=spec, repo=None)
        return ToServe(adapter=fetched.served_as(spec), canary=fetched.rollout.canary, origin=fetched.origin)


_Stamp = tuple[tuple[str, int, int, int], ...]


def _stamp(folder: Path) -> _Stamp | None:
    """Return what changes whenever files of a folder do; None if that cannot be told."""
    try:
        found = [(path.name, path.stat()) for path in (folder, *sorted(folder.iterdir()))]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)


def _raise_if_given(candidate: _Candidate, error: LoraplexError) -> None:
    if candidate.requested_by is _RequestedBy.OPTION:
        raise AdapterError(
            f"--adapter {candidate.name}={candidate.where} cannot be served: {error}; mend that, or start "
            "without this option"
        ) from error


def _other_base_notes(service: AdapterService) -> list[str]:
    """One note for each other base model that is named: adapters of one project tend to name the same."""
    by_base: dict[str, list[str]] = {}
    for adapter in service.served():
        if other := other_base(adapter.spec.path, service.files.known_as):
            by_base.setdefault(other, []).append(adapter.name)
    return [
        f"{name_adapters(names)}: {other_base_warning(other, service.base_model)}"
        for other, names in by_base.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """The adapters to serve, sorted by name, a note on each that is not, and notes on other things.

    `fallback` has those given now by name, to be served where the API's of that name cannot be.
    """

    first: list[_Candidate]
    fallback: dict[str, _Candidate]
    skipped: list[str]
    notes: list[str]


def _choose(
    service: AdapterService,
    entries: dict[str, RegistryEntry],
    given: Sequence[GivenAdapter],
    folders: Sequence[Path],
    *,
    is_shared: bool,
) -> _Choice:
    """Give each name to one adapter: the API's first, then one given by itself, then that of each folder.

    `is_shared`: other servers serve what is registered, so that all of it stays as the API's does.
    """
    skipped: list[str] = []
    notes: list[str] = []
    kept = {name for name, entry in entries.items() if is_shared or entry.origin is Origin.API}
    started_with = [_given(each, entries.get(each.name), is_kept=each.name in kept) for each in given]
    for folder in folders:
        discovery = discover_adapters(folder)
        notes += discovery.notes
        started_with += [
            _candidate(name, path.resolve(), _RequestedBy.FOLDER, entries.get(name), is_kept=name in kept)
            for name, path in discovery.adapters
        ]
    first_given: dict[str, _Candidate] = {}
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
            _raise_if_given(taken, error)
            skipped.append(f"skipped {taken.where}: {error}")
    # What is given now may be read wherever it is, so it is no second choice to the same adapter.
    same = [name for name, each in remembered.items() if _is_same(each, first_given.get(name))]
    for name in same:
        del remembered[name]
    first = first_given | remembered
    fallback = {name: each for name, each in first_given.items() if name in remembered}
    return _Choice(
        first=[first[name] for name in sorted(first)], fallback=fallback, skipped=skipped, notes=notes
    )


def _is_same(remembered: _Candidate, given: _Candidate | None) -> bool:
    entry = remembered.registered
    assert entry is not None, "that is where it is remembered"
    if given is None:
        return False
    is_branch = entry.origin is Origin.FOLDER and _is_of_repo(entry, given.repo)  # not the API's commit
    return is_branch or given.where == remembered.where


def _is_of_repo(entry: RegistryEntry, repo: HubRepo | None) -> bool:
    return repo is not None and entry.source is not None and entry.source.repo_id == repo.repo_id


def _note_on_fallback(
    candidate: _Candidate, api_error: LoraplexError | None, own_error: LoraplexError | None
) -> str:
    """Return the note on a given adapter whose name one that is kept has. `api_error`: why that one is not
    served, if it is not."""
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


def _remembered(service: AdapterService, entry: RegistryEntry) -> _Candidate:
    """An adapter of the API, with an error in place of its spec where it may not be served."""
    candidate = _candidate(entry.name, entry.spec.path, _RequestedBy.API, entry, is_kept=True)
    if entry.source is not None:
        return _remembered_of_hub(service, candidate, entry.source)
    try:
        service.files.allowed.check(entry.spec.path)
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
        service.files.hub.allowed.check(source)
    except PathNotAllowedError:
        closed = PathNotAllowedError(
            f"{source.repo_id} is no repository that adapters may be fetched from; start the server with "
            f"--allow-adapter-repo {source.repo_id} to serve it again, or unload it"
        )
        return replace(candidate, spec=closed)
    return replace(candidate, repo=source) if candidate.spec is None else candidate


def _given(given: GivenAdapter, entry: RegistryEntry | None, *, is_kept: bool) -> _Candidate:
    if isinstance(given.source, Path):
        return _candidate(given.name, given.source.resolve(), _RequestedBy.OPTION, entry, is_kept=is_kept)
    # Where it will be is known when it is here.
    unknown = Path(given.source.repo_id)
    return _Candidate(
        name=given.name,
        path=unknown,
        requested_by=_RequestedBy.OPTION,
        spec=None,
        registered=entry,
        is_kept=is_kept,
        repo=given.source,
    )


def _candidate(
    name: str, path: Path, requested_by: _RequestedBy, entry: RegistryEntry | None, *, is_kept: bool
) -> _Candidate:
    """Only the registered spec of the same folder, with files that have not changed, is as good as new."""
    spec = (
        entry.spec if entry is not None and entry.spec.path == path and files_unchanged(entry.spec) else None
    )
    return _Candidate(
        name=name, path=path, requested_by=requested_by, spec=spec, registered=entry, is_kept=is_kept
    )


def _fetch_missing(service: AdapterService, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """All that is to be fetched, fetched at once; an error takes the place of what could not be had."""
    fetched = iter(service.files.hub.fetch_many([each.repo for each in candidates if each.repo is not None]))
    return [each if each.repo is None else _fetched(each, each.repo, next(fetched)) for each in candidates]


def _fetched(candidate: _Candidate, repo: HubRepo, result: Path | AdapterError) -> _Candidate:
    if isinstance(result, AdapterError):
        return replace(candidate, spec=result)
    found = _candidate(
        candidate.name, result, candidate.requested_by, candidate.registered, is_kept=candidate.is_kept
    )
    return replace(found, source=repo.at(result.name))


def _read_missing(service: AdapterService, candidates: Sequence[_Candidate]) -> list[AdapterSpec | UserError]:
    """The spec of each candidate. Folders that were named through the API must still be allowed ones."""
    unread = [each for each in candidates if each.spec is None]
    from_api = [each.path for each in unread if each.is_checked]
    given = [each.path for each in unread if not each.is_checked]
    read_given = iter(read_adapters(given, service.files.shape))
    read_from_api = iter(read_adapters(from_api, service.files.shape, open_file=service.files.allowed.open))
    return [
        each.spec if each.spec is not None else next(read_from_api if each.is_checked else read_given)
        for each in candidates
    ]
