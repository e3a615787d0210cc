"""The adapters that a server begins with: those loaded through the API before, and those it is started with.

A name that was loaded through the API keeps its adapter, and is served as long as its folder or repository is
open for loading; closing a location also closes it to adapters loaded earlier. If it cannot be served, an
adapter given now under the same name is served instead, and the registry keeps the API's entry. All other
names come from the adapters and folders given now (a branch of a repository at its present commit); for these
the registry only saves reading the files again, and entries that are no longer given are removed.

While other servers use the registry, all its names are theirs too and are treated like the API's: served from
folders that are open here, kept if they cannot be served, and not moved to another folder by what is given
here. If they are given from the same folder, the files as they are now count, and the other servers follow.

A broken adapter in a folder or from the API never keeps the others from being served: a note says what was
left out, and it is tried again (`left_out`). An adapter given with `--adapter` must be served or the start
fails, unless its name belongs to an adapter that the API loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loraplex.adapters.base_name import name_adapters, other_base, other_base_warning
from loraplex.adapters.registry import AdapterRegistry, NameState, Origin
from loraplex.adapters.rollout import Rollout
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import CapacityError, LoraplexError, StorageError, UserError
from loraplex.server.adapter_choice import Candidate, GivenAdapter, choose, note_on_fallback, raise_if_given
from loraplex.server.adapter_service import AdapterService, LeftOut
from loraplex.server.canary_startup import restore_canaries
from loraplex.server.candidate_files import FindAgain, fetch_missing, read_missing
from loraplex.server.served_adapter import ServedAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """The result of serving the first adapters.

    `notes` has one line for everything that was skipped or changed, or deserves a warning. `num_skipped`
    counts adapters only, not folders without any.
    """

    num_served: int
    num_skipped: int
    notes: tuple[str, ...]


_NUM_AT_ONCE: Final = 4
"""Number of adapters added to the engine concurrently: in a fleet this is a network call."""

_Served = tuple[Candidate, AdapterSpec]


async def start_adapters(
    service: AdapterService, folders: Sequence[Path], given: Sequence[GivenAdapter] = ()
) -> StartReport:
    """Serve the adapters that the API loaded, those in `given`, and those in `folders`.

    Raises AdapterError if one of `given` cannot be served or a folder itself cannot be read, StorageError if
    the registry cannot be read.
    """
    registry = service.registry
    # States are read first: the registry follower picks up whatever changes between the two reads.
    states = await asyncio.to_thread(registry.states)
    entries = {entry.name: entry for entry in await asyncio.to_thread(registry.all)}
    is_shared = bool(await asyncio.to_thread(lambda: registry.other_servers))
    choice = await asyncio.to_thread(choose, service, entries, given, folders, is_shared=is_shared)
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
        note = note_on_fallback(candidate, failed.get(name), also_failed.get(name))
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
    """Write what is served to the registry, and update `states` to what the registry then has; return notes.

    A name that another server changed meanwhile is left alone in both, and followed later.
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
    service: AdapterService, candidates: Sequence[Candidate]
) -> tuple[list[_Served], dict[str, LoraplexError], dict[str, LeftOut]]:
    """Fetch and read what is missing, and serve it. Return what is served, the errors of the others, and
    those of the others that may be served later (all except what is not open to this server).

    Raises AdapterError if one given with `--adapter` fails, at once if its files are the reason.
    """
    fetched = await asyncio.to_thread(fetch_missing, service, candidates)
    specs = await asyncio.to_thread(read_missing, service, fetched)
    served: list[_Served] = []
    failed: dict[str, LoraplexError] = {}
    left_out: dict[str, LeftOut] = {}
    for asked, candidate, spec in zip(candidates, fetched, specs, strict=True):
        if isinstance(spec, UserError):
            raise_if_given(candidate, spec)
            failed[candidate.name] = spec
            if asked.spec is not spec:
                find = FindAgain(service, asked)
                left_out[candidate.name] = LeftOut(find=find, reason=str(spec), is_refused=False)
    readable = [
        (candidate, spec)
        for candidate, spec in zip(fetched, specs, strict=True)
        if not isinstance(spec, UserError)
    ]
    adapters = [candidate.served_as(spec) for candidate, spec in readable]
    gate = asyncio.Semaphore(_NUM_AT_ONCE)  # FIFO: when memory runs out, the last are refused

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
        raise_if_given(candidate, error)
        failed[candidate.name] = error
        find = FindAgain(service, replace(candidate, spec=spec))
        left_out[candidate.name] = LeftOut(find=find, reason=str(error), is_refused=True)
    return served, failed, left_out


def _other_base_notes(service: AdapterService) -> list[str]:
    """Return one note for each other base model named: adapters of one project tend to name the same one."""
    by_base: dict[str, list[str]] = {}
    for adapter in service.served():
        if other := other_base(adapter.spec.path, service.files.known_as):
            by_base.setdefault(other, []).append(adapter.name)
    return [
        f"{name_adapters(names)}: {other_base_warning(other, service.base_model)}"
        for other, names in by_base.items()
    ]
