"""The adapters a server begins with: those loaded through the API before, and those of its folders.

A name that was loaded through the API stays what it was made, and is served while its folder is one that
adapters may be loaded from: what was closed since is closed to what was loaded before, too. All other names
are what the folders given now say; the registry only saves reading them again, and forgets those that no
folder has any more.
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
from loraplex.server.adapter_service import AdapterService


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """`notes` has one line for everything that was skipped or changed, or is worth a warning."""

    num_served: int
    num_skipped: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A name to serve. `spec` is None where the files must be read (again), an error where they may not."""

    name: str
    path: Path
    origin: Origin
    spec: AdapterSpec | PathNotAllowedError | None
    registered: RegistryEntry | None

    def change_note(self, spec: AdapterSpec) -> str | None:
        """What a user should know if `spec` is not what the name stood for before."""
        if self.registered is None or self.registered.spec.version == spec.version:
            return None
        if self.registered.spec.path != spec.path:
            return f"adapter {self.name!r}: serving {spec.path} instead of {self.registered.spec.path}"
        return f"adapter {self.name!r}: its files have changed; serving the new version"


async def start_adapters(service: AdapterService, folders: Sequence[Path]) -> StartReport:
    """Serve what the API was told to, and what the folders have.

    Raises AdapterError if a folder itself cannot be read, StorageError if the registry cannot.
    """
    notes: list[str] = []
    entries = {entry.name: entry for entry in await asyncio.to_thread(service.registry.all)}
    candidates = await asyncio.to_thread(_candidates, service, entries, folders, notes)
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
        if candidate.registered is None or candidate.registered.spec != spec:
            to_register[candidate.origin].append((candidate.name, spec))
        if note := candidate.change_note(spec):
            notes.append(note)
    notes += await asyncio.to_thread(_other_base_notes, service)
    names = {candidate.name for candidate in candidates}
    gone = [entry.name for entry in entries.values() if _is_of_folder(entry) and entry.name not in names]
    try:
        await asyncio.to_thread(service.registry.remove_many, gone)
        for origin, adapters in to_register.items():
            await asyncio.to_thread(service.registry.put_many, adapters, origin=origin)
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
    service: AdapterService, entries: dict[str, RegistryEntry], folders: Sequence[Path], notes: list[str]
) -> list[_Candidate]:
    """The names to serve, sorted: those of the API first, then each folder's that are still free."""
    found: dict[str, _Candidate] = {}
    for name, entry in entries.items():
        if not _is_of_folder(entry):
            found[name] = _remembered(service, entry)
    for folder in folders:
        discovery = discover_adapters(folder)
        notes += discovery.notes
        for name, path in discovery.adapters:
            known = found.get(name)
            if known is None:
                found[name] = _candidate(name, path.resolve(), Origin.FOLDER, entries.get(name))
            elif known.origin is Origin.API:
                notes.append(
                    f"skipped {path}: the name {name!r} was loaded from {known.path} through the API; "
                    "unload it to serve this one at the next start"
                )
            elif known.path != path.resolve():
                notes.append(f"skipped {path}: the name {name!r} is taken by {known.path}")
    if service.base_model in found:
        notes.append(f"adapter {service.base_model!r} is not served: the base model has that name")
        del found[service.base_model]
    return [found[name] for name in sorted(found)]


def _is_of_folder(entry: RegistryEntry) -> bool:
    return entry.origin is Origin.FOLDER


def _remembered(service: AdapterService, entry: RegistryEntry) -> _Candidate:
    """An adapter of the API. It keeps its name even where it may not be served, as the registry keeps it."""
    candidate = _candidate(entry.name, entry.spec.path, Origin.API, entry)
    try:
        service.allowed.check(entry.spec.path)
    except PathNotAllowedError:
        closed = PathNotAllowedError(
            f"{entry.spec.path} is outside the folders that adapters may be loaded from; start the server "
            f"with --allow-adapter-dir {entry.spec.path.parent} to serve it again, or unload it"
        )
        return replace(candidate, spec=closed)
    return candidate


def _candidate(name: str, path: Path, origin: Origin, entry: RegistryEntry | None) -> _Candidate:
    """Only the registered spec of the same folder, with files that have not changed, is as good as new."""
    spec = (
        entry.spec if entry is not None and entry.spec.path == path and files_unchanged(entry.spec) else None
    )
    return _Candidate(name=name, path=path, origin=origin, spec=spec, registered=entry)


def _read_missing(
    service: AdapterService, candidates: Sequence[_Candidate]
) -> list[AdapterSpec | AdapterError | PathNotAllowedError]:
    unread = [candidate.path for candidate in candidates if candidate.spec is None]
    read = iter(read_adapters(unread, service.shape))
    return [next(read) if candidate.spec is None else candidate.spec for candidate in candidates]
