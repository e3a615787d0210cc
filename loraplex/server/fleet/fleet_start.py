"""The start of a fleet: all replicas side by side, and adapters for those that can be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any

from loraplex.core.errors import LoraplexError
from loraplex.server.fleet.backend_http import BackendAwayError, BackendError
from loraplex.server.fleet.members import Members
from loraplex.server.protocol_ipc import StartProgress


class FleetStart:
    """Starts all replicas, from when it is made. Progress is that of the first one: all do the same side by
    side."""

    def __init__(
        self,
        members: Members,
        on_progress: Callable[[StartProgress], None] | None,
        add_adapters: Awaitable[object] | None,
    ) -> None:
        adding = None if add_adapters is None else asyncio.ensure_future(add_adapters)
        self._members = members
        self._usable = _Usable()
        self._starts = [
            asyncio.create_task(
                replica.start(
                    on_progress if number == 0 else None,
                    None if adding is None else Deferred(partial(self._usable.wait_for, number, adding)),
                )
            )
            for number, replica in enumerate(members)
        ]

    async def cancel(self) -> None:
        """End all starts that are under way."""
        for start in self._starts:
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)

    async def wait_for_all(self) -> None:
        """Wait until all have started. Raises what the first one raises that does not."""
        await asyncio.gather(*self._starts)

    async def wait_for_some(self, rest_s: float) -> dict[int, LoraplexError]:
        """Wait for those that start, and for the others no longer than `rest_s` from when the first one can
        be used; return what is wrong with these, by number. Raises what is wrong with each if none starts."""
        late = await self._give_up_late(rest_s)
        results = await asyncio.gather(*self._starts, return_exceptions=True)
        errors: dict[int, LoraplexError] = {}
        for number, result in enumerate(results):
            if isinstance(result, LoraplexError):
                errors[number] = result
            elif isinstance(result, asyncio.CancelledError) and number in late:
                errors[number] = BackendAwayError(late[number])
            elif result is not None:
                raise result
        if len(errors) == len(results):
            raise _none_started(list(errors.values()))
        return errors

    async def _give_up_late(self, rest_s: float) -> dict[int, str]:
        """Cancel the starts of those that are not usable some time after the first one is; return why. No
        adapter would be added before, as that waits for all that start."""
        starts, usable = self._starts, self._usable
        first = asyncio.create_task(usable.first.wait())
        pending: set[asyncio.Task[Any]] = set(starts)
        try:
            # One that needs no adapters is usable when it has started.
            while pending and not first.done() and not any(map(_has_started, starts)):
                done, _ = await asyncio.wait([*pending, first], return_when=asyncio.FIRST_COMPLETED)
                pending -= done
        finally:
            first.cancel()
        if waited_for := [start for number, start in enumerate(starts) if number not in usable.numbers]:
            await asyncio.wait(waited_for, timeout=rest_s)
        late: dict[int, str] = {}
        for number, start in enumerate(starts):
            if not start.done() and number not in usable.numbers:
                message = self._members[number].status.message
                late[number] = (
                    f"{message}, and has not answered for {rest_s:g} s; see its log, or correct the address"
                )
                start.cancel()
        return late


class Deferred:
    """A coroutine that is made when it is awaited: a start that fails before that leaves none behind."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._function = function

    def __await__(self) -> Generator[Any, None, None]:
        return self._function().__await__()


class _Usable:
    """The replicas that have begun to take adapters, by number. `first`: one of them has."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.first = asyncio.Event()

    async def wait_for(self, number: int, adding: asyncio.Future[object]) -> None:
        """Wait for the adapters on behalf of a replica, which takes them from now on."""
        self.numbers.add(number)
        self.first.set()
        await _finished(adding)


def _has_started(start: asyncio.Task[None]) -> bool:
    return start.done() and not start.cancelled() and start.exception() is None


def _none_started(errors: Sequence[LoraplexError]) -> LoraplexError:
    """Return one error for servers of which none can be used: what is wrong with each, first with those that
    have said so themselves."""
    telling = sorted(errors, key=lambda error: isinstance(error, BackendAwayError))
    reasons = list(dict.fromkeys(map(str, telling)))
    if len(reasons) == 1:
        return telling[0]
    each = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, start=1))
    return BackendError(f"none of the {len(errors)} servers can be used: {each}")


async def _finished(task: asyncio.Future[object]) -> None:
    """Wait for a task that others wait for as well: who stops waiting does not end it."""
    await asyncio.wait([task])
    task.result()
