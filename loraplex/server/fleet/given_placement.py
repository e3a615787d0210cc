"""A placement that is handed to a running fleet: which replicas serve which adapters, by name.

It is checked whole before anything changes, and handed over in one step. From then on the fleet carries it
out by itself, adapter by adapter (`fleet.plan_change`), and keeps it through its replicas' restarts, its
own (`kept_placement`) and through new versions of the adapters, until it is released.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from loraplex.core.errors import InvalidRequestError, LoraplexError
from loraplex.core.words import plural
from loraplex.fleet.plan import Entry
from loraplex.server.adapter_service import AdapterService
from loraplex.server.engine_status import EngineState, Fleet
from loraplex.server.fleet.kept_placement import KeptPlacement, PlacementFile
from loraplex.server.requests import GivenAdapter, PlacementRequest
from loraplex.server.responses import AppliedPlan, NamedAdapters, PlacedAdapterInfo, Placement
from loraplex.server.served_adapter import ServedAdapter

logger = logging.getLogger(__name__)

_MAX_NAMED: Final = 5
"""Number of adapters that a message names."""
_MAX_NAMES_COMPARED: Final = 1000


class GivenPlacement:
    """The placement that a fleet was given; none at first. `file`: where it is kept; None for nowhere."""

    def __init__(
        self,
        fleet: Fleet,
        adapters: AdapterService,
        file: PlacementFile | None = None,
        *,
        wall_clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._file = file
        self._wall_clock_s = wall_clock_s
        self._turn = asyncio.Lock()
        self._kept: KeptPlacement | None = None
        self._trouble: str | None = None  # why what is kept is not in force
        self._entries: dict[str, Entry] = {}  # by name; also of names that are not served at present
        self._by_version: dict[str, Entry] = {}
        adapters.on_changed = self._follow

    def take_up(self) -> None:
        """Give the fleet what an earlier server of this base model was given, if the fleet still has the
        replicas of it. Logs what does not fit, and never raises: a fleet serves without a plan too. Called
        once, when the fleet has started."""
        try:
            self._kept = None if self._file is None else self._file.read()
            if self._kept is None:
                return
            given = self._kept.given
            self._check_placed()
            self._check_replicas(given.replicas)
            if not any(self._adapters.get(each.lora_name) for each in given.adapters):
                raise InvalidRequestError(
                    "none of its adapters is served; load them, or make the plan again "
                    "(`loraplex plan make --from URL`)"
                )
            self._entries = {each.lora_name: _entry(each, given.replicas) for each in given.adapters}
        except LoraplexError as error:
            self._trouble = str(error)
            logger.warning(
                "the fleet places its adapters by its policy and not by %s, which it was given before: %s",
                "its plan" if self._kept is None else _named(self._kept.given),
                error,
            )
            return
        self._hand_over()
        changed = [*self._other_ranks(given.adapters), *self._not_served(given.adapters)]
        but = f", but {_some(changed)}; make the plan again (`loraplex plan make --from URL`)"
        logger.log(
            logging.WARNING if changed else logging.INFO,
            "%s, which the fleet was given before, is in force again%s",
            _named(given),
            but if changed else "",
        )

    async def give(self, asked: PlacementRequest) -> None:
        """Have the fleet serve adapters by these replicas. Raises InvalidRequestError if any of it does not
        fit the fleet as it is, or StorageError if it cannot be kept, and changes nothing then."""
        async with self._turn:
            self._check_placed()
            self._check_replicas(asked.replicas)
            self._check_adapters(asked.adapters)
            entries = {each.lora_name: _entry(each, asked.replicas) for each in asked.adapters}
            if asked.dry_run:
                return
            kept = KeptPlacement(
                base_model="" if self._file is None else self._file.base_model,
                since_unix_s=self._wall_clock_s(),
                given=asked,
            )
            if self._kept is not None and self._trouble is None and self._kept.given == asked:
                kept = self._kept  # repeated: it is in force since then
            if self._file is not None:
                await asyncio.to_thread(self._file.write, kept)
            self._kept, self._trouble, self._entries = kept, None, entries
            self._hand_over()

    async def release(self) -> None:
        """Let the fleet's own policy place all adapters again, and forget what was given. Idempotent."""
        async with self._turn:
            if self._trouble is None:
                self._check_placed()
            if self._file is not None:
                await asyncio.to_thread(self._file.forget)
            self._kept = self._trouble = None
            self._entries = {}
            if self._fleet.has_placement:
                self._hand_over()

    def state(self) -> Placement:
        """Return where the adapters are, and whether what was given has been carried out."""
        fleet, given = self._fleet, self._by_version
        rows = []
        stands = True
        for adapter in self._adapters.served():
            placed = fleet.placed_on(adapter.version)
            wanted = given.get(adapter.version)
            waiting = fleet.waiting(adapter.version)
            if wanted is not None and not self._is_carried_out(adapter.version, wanted):
                stands = False
            rows.append(
                PlacedAdapterInfo(
                    name=adapter.name,
                    version=adapter.version,
                    rank=adapter.spec.max_rank,
                    bytes=fleet.num_bytes(adapter.version),
                    replicas=None if placed is None else list(placed.replicas),
                    given=None if wanted is None else list(wanted.replicas),
                    waiting=waiting,
                )
            )
        return Placement(
            is_given=bool(self._entries),
            stands=stands,
            replicas=[each.number for each in fleet.replicas],
            data=rows,
            plan=self.applied(),
        )

    def applied(self) -> AppliedPlan | None:
        """Return the placement in force in few words, and what of it does not hold; None if there is none."""
        kept, fleet = self._kept, self._fleet
        if kept is None:
            if self._trouble is None:
                return None
            return AppliedPlan(name=None, since_s=None, adapters=0, trouble=self._trouble)
        given = kept.given
        there = fleet.replicas
        serving = {
            each.number for each in there if each.status.state is EngineState.READY and not each.drained
        }
        served = self._adapters.served()
        not_there = [
            name
            for name, entry in self._entries.items()
            if (adapter := self._adapters.get(name)) is not None
            and not self._is_carried_out(adapter.version, entry)
        ]
        return AppliedPlan(
            name=given.plan,
            since_s=kept.since_unix_s,
            adapters=len(given.adapters),
            trouble=self._trouble,
            missing_replicas=sorted(set(given.replicas) - serving),
            new_replicas=sorted({each.number for each in there} - set(given.replicas)),
            not_in_it=_first(
                [] if self._trouble else [each.name for each in served if each.name not in self._entries]
            ),
            not_served=_first([name for name in self._entries if self._adapters.get(name) is None]),
            not_there=_first(not_there),
        )

    def _is_carried_out(self, version: str, entry: Entry) -> bool:
        placed = self._fleet.placed_on(version)
        wanted = self._by_version.get(version, entry)
        return not self._fleet.waiting(version) and placed is not None and placed.replicas == wanted.replicas

    def _follow(self, name: str) -> None:
        """Hand the placement over again when a name in it stands for another version."""
        if name in self._entries:
            self._hand_over()

    def _hand_over(self) -> None:
        served = (each for name in self._entries if (each := self._adapters.get(name)) is not None)
        self._by_version = _by_version(served, self._entries)
        self._fleet.give(self._by_version)

    # ---- checks

    def _check_placed(self) -> None:
        if not self._fleet.has_placement:
            raise InvalidRequestError(
                "every replica of this fleet serves every adapter, so that there is no placement to give; "
                "start it with --placement auto"
            )

    def _check_replicas(self, replicas: Sequence[int]) -> None:
        there = [each.number for each in self._fleet.replicas]
        if sorted(replicas) != there:
            num_there = len(there)
            raise InvalidRequestError(
                f"the placement is for {_numbers(replicas)}, and the fleet has {_numbers(there)}; plan again "
                f"for {num_there} {plural('GPU', num_there)} (`loraplex plan make --gpus {num_there}`), or "
                f"change the fleet (`loraplex fleet scale {len(replicas)}`)",
                param="replicas",
            )

    def _check_adapters(self, asked: Sequence[GivenAdapter]) -> None:
        if not asked:
            raise InvalidRequestError(
                "the placement names no adapter; to let the fleet place them all by its policy, release it "
                "(`loraplex plan release`)",
                param="adapters",
            )
        names = {each.lora_name for each in asked}
        if len(names) < len(asked):
            raise InvalidRequestError("the placement names an adapter twice", param="adapters")
        if unknown := [each.lora_name for each in asked if self._adapters.get(each.lora_name) is None]:
            self._refuse_unknown(unknown)
        changed = self._other_ranks(asked)
        if changed:
            raise InvalidRequestError(
                f"adapters have changed since the plan was made: {_some(changed)}; make the plan again "
                "(`loraplex plan make --from URL`)",
                param="adapters",
            )

    def _other_ranks(self, asked: Sequence[GivenAdapter]) -> list[str]:
        """Return in words which adapters have other ranks than were asked for."""
        return [
            f"{each.lora_name!r} has rank {adapter.spec.max_rank}, not {each.rank}"
            for each in asked
            if (adapter := self._adapters.get(each.lora_name)) is not None
            and each.rank is not None
            and adapter.spec.max_rank != each.rank
        ]

    def _not_served(self, asked: Sequence[GivenAdapter]) -> list[str]:
        """Return in words which adapters are not served."""
        return [
            f"{each.lora_name!r} is not served"
            for each in asked
            if self._adapters.get(each.lora_name) is None
        ]

    def _refuse_unknown(self, unknown: Sequence[str]) -> None:
        known = [each.name for each in islice(self._adapters.served(), _MAX_NAMES_COMPARED)]
        named = []
        for name in unknown[:_MAX_NAMED]:
            near = difflib.get_close_matches(name, known, n=1)
            named.append(f"{name!r} (did you mean {near[0]!r}?)" if near else repr(name))
        number = len(unknown)
        raise InvalidRequestError(
            f"the fleet does not serve {number} {plural('adapter', number)} of the placement: "
            f"{_some(named, number)}; load what is missing (`loraplex adapter load`), or make the plan again "
            "(`loraplex plan make --from URL`)",
            param="adapters",
        )


def _entry(asked: GivenAdapter, replicas: Sequence[int]) -> Entry:
    name, given = asked.lora_name, asked.replicas
    if not given or len(set(given)) < len(given) or not set(given) <= set(replicas):
        raise InvalidRequestError(
            f"adapter {name!r} needs replicas out of those that are listed, each of them once",
            param="adapters",
        )
    shares = asked.shares or [1.0] * len(given)
    if len(shares) != len(given):
        raise InvalidRequestError(
            f"adapter {name!r} has {len(given)} replicas and {len(shares)} shares; each needs one",
            param="adapters",
        )
    return Entry.of_weights(dict(zip(given, shares, strict=True)))


def _by_version(served: Iterable[ServedAdapter], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of all versions that names stand for; a version of several names goes where any of
    them does."""
    weights: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for adapter in served:
        entry = entries[adapter.name]
        for version in adapter.versions:
            for replica, share in zip(entry.replicas, entry.shares, strict=True):
                weights[version][replica] += share
    return {version: Entry.of_weights(each) for version, each in weights.items()}


def _named(given: PlacementRequest) -> str:
    return "its plan" if given.plan is None else f"the plan {given.plan}"


def _first(names: list[str]) -> NamedAdapters:
    return NamedAdapters(number=len(names), first=names[:_MAX_NAMED])


def _numbers(replicas: Sequence[int]) -> str:
    if not replicas:
        return "no replica"
    return f"{plural('replica', len(replicas))} {', '.join(map(str, sorted(replicas)))}"


def _some(named: Sequence[str], number: int | None = None) -> str:
    """Return the first of them as text, with how many more there are."""
    shown = named[:_MAX_NAMED]
    left = (number or len(named)) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left else "")
