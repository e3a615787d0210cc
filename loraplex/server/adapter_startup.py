"""The adapters a server begins with: those of the registry, and those of the folders it was given.

Nothing that is wrong with one adapter keeps the others from being served; a note says what was left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.peft_reader import read_adapters
from loraplex.adapters.registry import RegistryEntry
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import AdapterError, CapacityError, StorageError, UserError
from loraplex.server.adapter_service import AdapterService


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """`notes` has one line for everything that was skipped or changed."""

    num_served: int
    num_skipped: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A name to serve. `spec` is None where the files must be read (again)."""

    name: str
    path: Path
    spec: AdapterSpec | None
    registered: RegistryEntry | None


async def start_adapters(service: AdapterService, folders: Sequence[Path]) -> StartReport:
    """Serve everything the registry and the folders have.

    Raises AdapterError if a folder itself cannot be read, StorageError if the registry cannot.
    """
    notes: list[str] = []
    entries = {entry.name: entry for entry in await asyncio.to_thread(service.registry.all)}
    candidates = await asyncio.to_thread(_candidates, service, entries, folders, notes)
    specs = await asyncio.to_thread(_read_missing, service, candidates)

    to_register: list[tuple[str, AdapterSpec]] = []
    num_served = 0
    for candidate, spec in zip(candidates, specs, strict=True):
        if isinstance(spec, AdapterError):
            notes.append(f"adapter {candidate.name!r} is not served: {spec}")
            continue
        try:
            await service.adopt(candidate.name, spec)
        except (UserError, CapacityError) as error:
            notes.append(f"adapter {candidate.name!r} is not served: {error}")
            continue
        num_served += 1
        if candidate.registered is None or candidate.registered.spec != spec:
            to_register.append((candidate.name, spec))
        if candidate.registered is not None and candidate.registered.spec.version != spec.version:
            notes.append(f"adapter {candidate.name!r}: its files have changed; serving the new version")
    try:
        await asyncio.to_thread(service.registry.put_many, to_register)
    except StorageError as error:
        notes.append(f"the adapters are served, but could not be registered: {error}")
    return StartReport(num_served=num_served, num_skipped=len(candidates) - num_served, notes=tuple(notes))


def _candidates(
    service: AdapterService, entries: dict[str, RegistryEntry], folders: Sequence[Path], notes: list[str]
) -> list[_Candidate]:
    """Registry entries first: a name that was loaded by hand stays what it was made, while it exists."""
    found: dict[str, _Candidate] = {}
    for name, entry in entries.items():
        spec = entry.spec if files_unchanged(entry.spec) else None
        found[name] = _Candidate(name=name, path=entry.spec.path, spec=spec, registered=entry)
    for folder in folders:
        discovery = discover_adapters(folder)
        notes += discovery.notes
        for name, path in discovery.adapters:
            known = found.get(name)
            if known is None or not known.path.exists():
                entry_of_name = known.registered if known else None
                found[name] = _Candidate(name=name, path=path.resolve(), spec=None, registered=entry_of_name)
            elif known.path.resolve() != path.resolve():
                notes.append(f"skipped {path}: the name {name!r} is taken by {known.path}")
    if service.base_model in found:
        notes.append(f"adapter {service.base_model!r} is not served: the base model has that name")
        del found[service.base_model]
    return [found[name] for name in sorted(found)]


def _read_missing(
    service: AdapterService, candidates: Sequence[_Candidate]
) -> list[AdapterSpec | AdapterError]:
    unread = [candidate.path for candidate in candidates if candidate.spec is None]
    read = iter(read_adapters(unread, service.shape))
    return [next(read) if candidate.spec is None else candidate.spec for candidate in candidates]
