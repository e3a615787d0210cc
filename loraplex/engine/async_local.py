"""An asynchronous engine in this process: one thread drives the core."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import EngineDeadError, LoraplexError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.interface import EngineCore
from loraplex.engine.output_stream import OutputStream
from loraplex.engine.staging import answer_once

logger = logging.getLogger(__name__)

_IDLE_S: Final = 1.0
"""Seconds that an idle engine waits before it checks that all its processes are alive."""

T = TypeVar("T")


class LocalAsyncEngine:
    """An AsyncEngine around a core in the same process. Only one thread uses the core.

    Every call belongs to the event loop it is made in, so a synchronous caller may run one loop after
    the other. `close` must be called at the end; it may be called from anywhere.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._end_reason: str | None = None
        # Waiters are registered here before their command is queued, so that the end of the thread reaches
        # all.
        self._streams: dict[str, _Stream] = {}
        self._replies: set[_Reply[Any]] = set()
        self._removals: dict[str, list[_Reply[None]]] = {}  # used by the thread only
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. Outputs that a slow consumer missed are merged."""
        request_id = request.request_id
        stream = _Stream()
        with self._changed:
            self._raise_if_ended()
            assert request_id not in self._streams, "request ids are unique"
            self._streams[request_id] = stream
            self._submit(partial(self._add_request, request, stream))
        finished = False
        try:
            while not finished:
                output = await stream.outputs.take()
                finished = output.finish_reason is not None
                yield output
        finally:
            with self._changed:
                self._streams.pop(request_id, None)
                if not finished:
                    self._submit(partial(self._core.cancel, request_id))

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """See AsyncEngine. Cancels a removal of the same version that has not completed."""
        await self._call(lambda reply: self._add_adapter(spec, reply))

    async def stage_adapter(self, version: str) -> None:
        """See AsyncEngine."""
        await answer_once(self, version)

    async def remove_adapter(self, version: str) -> None:
        """See AsyncEngine."""
        await self._call(lambda reply: self._remove_adapter(version, reply))

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """See AsyncEngine."""
        with self._changed:
            self._submit(partial(self._core.set_tenants, tuple(policies)))

    async def stats(self) -> EngineStats:
        return await self._call(self._read_stats)

    @property
    def healthy(self) -> bool:
        return self._end_reason is None

    def close(self) -> None:
        """End the thread after its current step; requests in flight raise EngineDeadError. Idempotent."""
        self._end("the engine was closed")
        self._thread.join()

    async def _call(self, command: Callable[[_Reply[T]], None]) -> T:
        """Run a command in the thread and wait for its reply."""
        reply: _Reply[T] = _Reply()
        with self._changed:
            self._raise_if_ended()
            self._replies.add(reply)
            self._submit(partial(command, reply))
        try:
            return await reply.future
        finally:
            with self._changed:
                self._replies.discard(reply)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._changed.notify()

    def _raise_if_ended(self) -> None:
        if self._end_reason is not None:
            raise EngineDeadError(self._end_reason)

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._end_reason is None:
                self._end_reason = reason
            self._changed.notify()

    # Everything below runs in the thread.

    def _run(self) -> None:
        try:
            while self._obey_commands():
                if self._core.has_work():
                    self._deliver(self._core.step())
                for version in self._core.take_removed_adapters():
                    for reply in self._removals.pop(version, ()):
                        reply.resolve(None)
        except Exception as error:
            logger.exception("the engine failed")
            self._end(f"the engine failed: {type(error).__name__}: {error}")
        self._dismiss_all()
        try:
            self._core.close()
        except Exception:
            logger.exception("the engine could not be closed")

    def _obey_commands(self) -> bool:
        """Run every queued command; wait for one if there is no work. Return False at the end."""
        begins = not self._core.has_work()
        idle = begins and not self._core.prepare()
        with self._changed:
            if idle and not self._commands and self._end_reason is None:
                self._changed.wait(_IDLE_S)
            commands = list(self._commands)
            self._commands.clear()
        if self._end_reason is not None:
            return False
        for command in commands:
            command()
        # With the first batch submitted at once, the engine had no idle time to prepare itself.
        while begins and self._core.has_work() and self._core.num_required > 0:
            self._core.prepare()
        return True

    def _deliver(self, outputs: Iterable[EngineOutput]) -> None:
        """Deliver a step's outputs with one call for each event loop, however many requests it has."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, EngineOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # otherwise cancelled during the step
                batches.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in batches.items():
            if not _call_in(loop, partial(_push_all, batch)):
                for _, output in batch:
                    self._streams.pop(output.request_id, None)
                    self._core.cancel(output.request_id)

    def _add_request(self, request: EngineRequest, stream: _Stream) -> None:
        try:
            self._core.add_request(request)
        except LoraplexError as error:
            stream.fail(error)

    def _add_adapter(self, spec: AdapterSpec, reply: _Reply[None]) -> None:
        try:
            self._core.add_adapter(spec)
        except LoraplexError as error:
            reply.fail(error)
        else:
            reply.resolve(None)

    def _remove_adapter(self, version: str, reply: _Reply[None]) -> None:
        try:
            self._core.remove_adapter(version)
        except LoraplexError as error:
            reply.fail(error)
        else:
            self._removals.setdefault(version, []).append(reply)

    def _read_stats(self, reply: _Reply[EngineStats]) -> None:
        reply.resolve(self._core.stats())

    def _dismiss_all(self) -> None:
        reason = self._end_reason
        assert reason is not None, "nobody may join the queue any more"
        with self._changed:
            waiting: list[_Stream | _Reply[Any]] = [*self._streams.values(), *self._replies]
            self._commands.clear()
        for one in waiting:
            one.fail(EngineDeadError(reason))


class _Stream:
    """The outputs of one request and the event loop of its consumer."""

    __slots__ = ("loop", "outputs")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.outputs = OutputStream()

    def fail(self, error: Exception) -> None:
        _call_in(self.loop, partial(self.outputs.fail, error))


class _Reply(Generic[T]):
    """A future that the engine's thread settles."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def resolve(self, value: T) -> None:
        self._unless_done(partial(self.future.set_result, value))

    def fail(self, error: Exception) -> None:
        self._unless_done(partial(self.future.set_exception, error))

    def _unless_done(self, settle: Callable[[], None]) -> None:
        # Checked in the loop: the caller may have been cancelled or answered meanwhile.
        _call_in(self.future.get_loop(), lambda: None if self.future.done() else settle())


def _push_all(batch: Iterable[tuple[_Stream, EngineOutput]]) -> None:
    for stream, output in batch:
        stream.outputs.push(output)


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> bool:
    """Run a callback in an event loop. Return False if the loop is closed, and so has no waiters left."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True
