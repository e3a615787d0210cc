"""The replicas of a fleet by number: which are present, which take requests, and their common status.

A replica keeps its number. One that has left is closed; another may come back under its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from loraplex.core.errors import EngineClosedError, EngineDeadError, InvalidRequestError
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.server.engine_life import ON_ITS_WAY
from loraplex.server.engine_status import EngineState, EngineStatus, ReplicaStatus
from loraplex.server.fleet.fleet_stats import LastingCounters, sum_of
from loraplex.server.replica import Replica
from loraplex.server.sent_to import sent_to

_GONE: Final = (EngineState.FAILED, EngineState.CLOSED)


def is_gone(replica: Replica) -> bool:
    """Return whether a replica has failed or left."""
    return replica.status.state in _GONE


class Members:
    """The replicas, and which of them are drained. `are_servers`: they are servers that others start and
    restart."""

    def __init__(self, replicas: list[Replica], *, are_servers: bool = False) -> None:
        self._replicas = replicas
        self.are_servers = are_servers
        self._drained: set[int] = set()
        self._leaving: set[int] = set()
        self._replaced: set[int] = set()
        self.lost: dict[int, str] = {}
        """Replicas that did not start, with the fleet or to replace one that left, with the reasons; they are
        tried again."""
        self._num_restarts: Counter[int] = Counter()  # of earlier replicas with the same number
        self.num_sent: Counter[int] = Counter()
        """Number of requests ever sent to each replica."""
        self.num_replayed: Counter[int] = Counter()
        """Number of these that another replica had before."""
        self.num_hits: Counter[int] = Counter()
        """Number of these that found their adapter in memory or being loaded."""
        self.num_loads: Counter[int] = Counter()
        """Number of adapter loads by each replica, as far as reported."""
        self.num_fetches: Counter[int] = Counter()
        """Number of adapters that each replica has copied from others."""
        self._counters = LastingCounters()
        self._tenants: Sequence[TenantPolicy] = ()

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def put(self, number: int, replica: Replica) -> None:
        """Put a replica under a number that is free, or the next one; it takes requests from now on."""
        if number < len(self._replicas):
            is_restart = number in self._replaced and not self.are_servers
            self._num_restarts[number] += self._replicas[number].status.num_restarts + is_restart
            self._replicas[number] = replica
            self.lost.pop(number, None)
        else:
            assert number == len(self._replicas)
            self._replicas.append(replica)
        replica.set_tenants(self._tenants)
        self._drained.discard(number)

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Tell all replicas, and those that join later, the rights of tenants."""
        self._tenants = policies
        for replica in self._replicas:
            replica.set_tenants(policies)

    @property
    def present(self) -> list[int]:
        """The numbers of the replicas that have not left."""
        return [n for n, each in enumerate(self._replicas) if each.status.state is not EngineState.CLOSED]

    @property
    def meant(self) -> list[int]:
        """The numbers of the replicas that should be there: present, or lost and tried again."""
        return sorted({*self.present, *self.lost})

    @property
    def is_gone(self) -> bool:
        """Return whether every replica has failed or left."""
        return all(map(is_gone, self._replicas))

    def alive(self) -> list[Replica]:
        """Return the replicas that are present or starting; all if there are none. One that was given up gets
        its adapters when it joins again."""
        return [each for each in self._replicas if not is_gone(each)] or list(self._replicas)

    def sent(self, number: int) -> None:
        """Count a request sent to a replica, also for the request's line in the log."""
        self.num_sent[number] += 1
        if (replicas := sent_to.get()) is not None:
            replicas.append(number)

    def saw(self, number: int, stats: EngineStats) -> None:
        """Record what a replica reports."""
        added = self._counters.saw(number, stats)
        self.num_loads[number] += added.adapter_loads
        self.num_fetches[number] += added.adapter_fetches

    def sum_of(self, each: Sequence[EngineStats]) -> EngineStats:
        """Combine the figures of replicas into those of one engine. Counters include everything ever
        reported, also by replicas that have left or restarted, so that they never decrease."""
        return self._counters.lasting(sum_of(each))

    def know(self, version: str) -> None:
        """Count the loads of a version from now on."""
        self._counters.know(version)

    def forget(self, version: str) -> None:
        """Stop counting a version that is removed from all replicas."""
        self._counters.forget(version)

    # ---- who takes requests

    def accepting(self, version: str | None = None) -> list[bool]:
        """Return for each replica whether it takes requests for a version now. If none is ready, those that
        are starting do: the first that comes back serves what waits. Replicas that refuse the version count
        only if there is no other: they are then asked once more, and report why not.

        Raises EngineDeadError if there are none of either kind.
        """
        closed = self._drained | self._leaving
        ready = self._ready()
        on_its_way = [
            each.status.state in ON_ITS_WAY and n not in closed for n, each in enumerate(self._replicas)
        ]
        willing = [version not in each.refused for each in self._replicas]
        for accepts in (ready, on_its_way):
            if any(taking := [each and wills for each, wills in zip(accepts, willing, strict=True)]):
                return taking
        for accepts in (ready, on_its_way):
            if any(accepts):
                return accepts
        status = self.status
        raise (EngineClosedError if status.state is EngineState.CLOSED else EngineDeadError)(status.message)

    @property
    def serving(self) -> list[int]:
        """The numbers of the replicas that are ready and take requests; may be empty."""
        return [number for number, is_ready in enumerate(self._ready()) if is_ready]

    def _ready(self) -> list[bool]:
        closed = self._drained | self._leaving
        return [each.healthy and n not in closed for n, each in enumerate(self._replicas)]

    def is_drained(self, number: int) -> bool:
        return number in self._drained

    def drain(self, number: int) -> None:
        """Send a replica no more requests.

        Raises InvalidRequestError for a replica that is not there, and for the last one that is not drained.
        """
        self.check_there(number)
        self._check_not_last([number])
        self._drained.add(number)

    def undrain(self, number: int) -> None:
        """Send a replica requests again. Raises InvalidRequestError for a replica that is not there."""
        self.check_there(number)
        self._drained.discard(number)

    @contextmanager
    def leaving(self, numbers: list[int]) -> Iterator[list[int]]:
        """Send these replicas no more requests during the block; they are closed at its end, or stay if it
        fails. Raises InvalidRequestError if no other replica takes requests."""
        for number in numbers:
            self._check_number(number)
        if numbers:
            self._check_not_last(numbers)
        self._leaving.update(numbers)
        try:
            yield numbers
        finally:
            self._leaving.difference_update(numbers)

    def _check_not_last(self, numbers: list[int]) -> None:
        """Raise InvalidRequestError if no replica would take requests without these, and any of them does now
        or will when it is back."""
        takers = {number for number in self._open() if not is_gone(self._replicas[number])}
        if takers and takers.issubset(numbers):
            last = ", ".join(map(str, numbers))
            raise InvalidRequestError(
                f"replica {last} is the last one that takes requests; let another one take them again first "
                "(loraplex fleet drain N --undo), or wait until one is back",
                param="replica",
            )

    def _open(self) -> list[int]:
        """Return the numbers of the replicas that have not left and are neither drained nor leaving."""
        return [number for number in self.present if number not in self._drained | self._leaving]

    def check_there(self, number: int) -> None:
        """Raise InvalidRequestError for a replica that is not there, or is leaving."""
        self._check_number(number)
        if number in self._leaving or number not in self.present:
            raise InvalidRequestError(
                f"replica {number} is leaving or has left; `fleet scale` brings replicas back",
                param="replica",
            )

    def _check_number(self, number: int) -> None:
        if not 0 <= number < len(self._replicas):
            numbers = ", ".join(map(str, self.present))  # not all numbers: some may have left
            raise InvalidRequestError(
                f"there is no replica {number}; there are {numbers or 'none'}", param="replica"
            )

    # ---- their status

    @property
    def status(self) -> EngineStatus:
        """The status of the fleet: ready while any replica that takes requests is; otherwise the status of
        the replica nearest to that."""
        num_meant = len(self.meant)
        shown_numbers = self._open() or self.present or range(len(self._replicas))
        each = [self._replicas[number].status for number in shown_numbers]
        ready = [status for status in each if status.state is EngineState.READY]
        on_its_way = [status for status in each if status.state in ON_ITS_WAY]
        shown = (ready or on_its_way or each)[0]
        message = shown.message
        if ready and len(ready) < num_meant:
            message = f"{len(ready)} of {num_meant} replicas are ready"
        elif not ready and (drained := [n for n in sorted(self._drained) if self._replicas[n].healthy]):
            number = drained[0]
            message += f"; replica {number} is drained: `loraplex fleet drain {number} --undo` brings it back"
        return EngineStatus(
            state=shown.state,
            message=message,
            num_restarts=sum(map(self._restarts, range(len(self._replicas)))),
            pid=None,
            phase=shown.phase,
            fraction=shown.fraction,
        )

    def _restarts(self, number: int) -> int:
        return self._num_restarts[number] + self._replicas[number].status.num_restarts

    @contextmanager
    def replacing(self, number: int) -> Iterator[None]:
        """Show a leaving replica as restarting during the block."""
        self._replaced.add(number)
        try:
            yield
        finally:
            self._replaced.discard(number)

    def statuses(self, num_in_flight: Callable[[int], int]) -> list[ReplicaStatus]:
        """Return the status of each replica that has not left for good."""
        return [
            ReplicaStatus(
                number=number,
                status=self._status(number),
                num_in_flight=num_in_flight(number),
                num_sent=self.num_sent[number],
                num_replayed=self.num_replayed[number],
                num_hits=self.num_hits[number],
                num_loads=self.num_loads[number],
                num_fetches=self.num_fetches[number],
                num_refused=len(self._replicas[number].refused),
                drained=number in self._drained | self._leaving,
            )
            for number in sorted(self._replaced.union(self.meant))
        ]

    def state(self, number: int) -> EngineState:
        """Return the state of a replica as it is shown. A server that others start is never shown as failed:
        it is unreachable or unusable until they have fixed it."""
        state = self._replicas[number].status.state
        if state is EngineState.FAILED or (state is EngineState.CLOSED and number in self.lost):
            return EngineState.UNREACHABLE if self.are_servers else EngineState.FAILED
        return state

    def _why_lost(self, number: int) -> str:
        reason = self.lost[number]
        if self.are_servers:
            return f"{reason}; it is asked again from time to time"
        return f"it did not start: {reason}; it is tried again from time to time"

    def _status(self, number: int) -> EngineStatus:
        """Return the status of a replica; for one that is being replaced, with a message about the replica
        instead of the server, and for one that refuses adapters, with the reason."""
        replica = self._replicas[number]
        status = replace(replica.status, num_restarts=self._restarts(number))
        if is_gone(replica) and number in self.lost and number not in self._replaced:
            return replace(status, state=self.state(number), message=self._why_lost(number))
        if status.state is EngineState.FAILED:
            return replace(status, state=self.state(number))
        if status.state is EngineState.CLOSED:
            state, message = EngineState.RESTARTING, "it is being replaced by a new one"
            if self.are_servers:
                state, message = EngineState.STARTING, "it answers, and is given its adapters"
            return replace(status, state=state, message=message)
        if status.state is EngineState.READY and (refused := replica.refused):
            reason = next(iter(refused.values()))
            what = "an adapter" if len(refused) == 1 else f"{len(refused):,} adapters"
            return replace(status, message=f"it refuses {what}: {reason}")
        return status
