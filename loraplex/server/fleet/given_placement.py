"""A placement that is handed to a running fleet: which replicas serve which adapters, by name.

It is checked whole before anything changes, and handed over in one step. From then on the fleet carries it
out by itself, adapter by adapter (`fleet.plan_change`), and keeps it through its replicas' restarts and
through new versions of the adapters, until it is released or the server ends.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from loraplex.core.errors import InvalidRequestError
from loraplex.core.words import plural
from loraplex.fleet.plan import Entry
from loraplex.server.adapter_service import AdapterService
from loraplex.server.engine_status import Fleet
from loraplex.server.requests import GivenAdapter, PlacementRequest
from loraplex.server.responses import PlacedAdapterInfo, Placement
from loraplex.server.served_adapter import ServedAdapter

_MAX_NAMED: Final = 5
"""Number of adapters that a message names."""
_MAX_NAMES_COMPARED: Final = 1000


class GivenPlacement:
    """The placement that a fleet was given; none at first."""

    def __init__(self, fleet: Fleet, adapters: AdapterService) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._entries: dict[str, Entry] = {}  # by name; also of names that are not served at present
        self._by_version: dict[str, Entry] = {}
        adapters.on_changed = self._follow

    def give(self, asked: PlacementRequest) -> None:
        """Have the fleet serve adapters by these replicas. Raises InvalidRequestError if any of it does not
        fit the fleet as it is, and changes nothing then."""
        self._check_placed()
        self._check_replicas(asked.replicas)
        self._check_adapters(asked.adapters)
        entries = {each.lora_name: _entry(each, asked.replicas) for each in asked.adapters}
        if not asked.dry_run:
            self._entries = entries
            self._hand_over()

    def release(self) -> None:
        """Let the fleet's own policy place all adapters again. Idempotent."""
        self._check_placed()
        self._entries = {}
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
            if wanted is not None and (waiting or placed is None or placed.replicas != wanted.replicas):
                stands = False
            rows.append(
                PlacedAdapterInfo(
                    name=adapter.name,
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
        )

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
        changed = [
            f"{each.lora_name!r} has rank {adapter.spec.max_rank}, not {each.rank}"
            for each in asked
            if (adapter := self._adapters.get(each.lora_name)) is not None
            and each.rank is not None
            and adapter.spec.max_rank != each.rank
        ]
        if changed:
            raise InvalidRequestError(
                f"adapters have changed since the plan was made: {_some(changed)}; make the plan again "
                "(`loraplex plan make --from URL`)",
                param="adapters",
            )

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


def _numbers(replicas: Sequence[int]) -> str:
    if not replicas:
        return "no replica"
    return f"{plural('replica', len(replicas))} {', '.join(map(str, sorted(replicas)))}"


def _some(named: Sequence[str], number: int | None = None) -> str:
    """Return the first of them as text, with how many more there are."""
    shown = named[:_MAX_NAMED]
    left = (number or len(named)) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left else "")
