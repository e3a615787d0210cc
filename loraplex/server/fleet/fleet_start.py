"""The start of a fleet: all replicas in parallel, and adapters for those that can be used."""

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
    """Starts all replicas when it is created. The progress is that of the first one: all do the same in
    parallel."""

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
        """Cancel all starts in progress."""
        for start in self._starts:
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)

    async def wait_for_all(self) -> None:
        """Wait until all have started. Raises the first error."""
        await asyncio.gather(*self._starts)

    async def wait_for_some(self, rest_s: float) -> dict[int, LoraplexError]:
        """Wait for those that start, and for the others at most `rest_s` seconds from when the first one can
        be used; return the errors of these, by number. Raises an error that names all reasons if none
        starts."""
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
        """Cancel the starts of replicas that are not usable `rest_s` seconds after the first one is; return
        the reasons. No adapter is added before that, since adding waits for all that start."""
        starts, usable = self._starts, self._usable
        first = asyncio.create_task(usable.first.wait())
        pending: set[asyncio.Task[Any]] = set(starts)
        try:
            # A replica that needs no adapters is usable once it has started.
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
    """A coroutine that is created when it is awaited, so that a start which fails earlier leaves none
    behind."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._function = function

    def __await__(self) -> Generator[Any, None, None]:
        return self._function().__await__()


class _Usable:
    """The numbers of the replicas that accept adapters. `first`: set when there is one."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.first = asyncio.Event()

    async def wait_for(self, number: int, adding: asyncio.Future[object]) -> None:
        """Record that a replica accepts adapters from now on, and wait until they are added."""
        self.numbers.add(number)
        self.first.set()
        await _finished(adding)


def _has_started(start: asyncio.Task[None]) -> bool:
    return start.done() and not start.cancelled() and start.exception() is None


def _none_started(errors: Sequence[LoraplexError]) -> LoraplexError:
    """Return one error for servers of which none can be used, with the reason of each; those that answered
    come first."""
    telling = sorted(errors, key=lambda error: isinstance(error, BackendAwayError))
    reasons = list(dict.fromkeys(map(str, telling)))
    if len(reasons) == 1:
        return telling[0]
    each = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, start=1))
    return BackendError(f"none of the {len(errors)} servers can be used: {each}")


async def _finished(task: asyncio.Future[object]) -> None:
    """Wait for a task that others wait for too: cancelling one waiter does not cancel it."""
    await asyncio.wait([task])
    task.result()
