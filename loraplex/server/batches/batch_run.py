"""Runs one batch: checks its input, has its lines answered, and lists the results.

Whatever ends the process, another run goes on where the results on disk end: a line is done when its result
is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp

from loraplex.core.errors import StorageError
from loraplex.server.batches.input_lines import InputError, InputLine, by_adapter, read_input, request_body
from loraplex.server.batches.line_call import LineCall
from loraplex.server.batches.line_gate import LineGate
from loraplex.server.batches.objects import (
    BatchErrors,
    BatchObject,
    BatchStatus,
    FileObject,
    RequestCounts,
    StoredBatch,
)
from loraplex.server.batches.results import (
    BatchResults,
    LineError,
    LineResponse,
    LineResult,
    new_result_id,
)
from loraplex.server.batches.store import OwnedFiles
from loraplex.server.decoders import decode_json
from loraplex.server.responses import ErrorBody
from loraplex.server.tenants.access import Access

logger = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_DISK_RETRY_S: Final = 5.0
_MAX_PAUSE_S: Final = 60.0
_MAX_CRASHES: Final = 5
"""Deaths of the engine during one line, after which that is its result."""
_TRY_AGAIN: Final = frozenset({429, 503})
_UNFINISHED: Final = {
    BatchStatus.EXPIRED: LineError(
        code="batch_expired", message="the batch expired before this request was answered"
    ),
    BatchStatus.CANCELLED: LineError(
        code="batch_cancelled", message="the batch was cancelled before this request was answered"
    ),
}


class BatchRun:
    """One run of a batch that this process has claimed. `access`: returns the rights of the batch's tenant,
    None if it has none here (any more)."""

    def __init__(
        self,
        stored: StoredBatch,
        owned: OwnedFiles,
        *,
        app: ASGIApp,
        gate: LineGate,
        access: Callable[[], Access | None],
        num_adapters: int,
        max_line_bytes: int,
    ) -> None:
        self._stored = stored
        self._owned = owned
        self._app = app
        self._gate = gate
        self._access = access
        self._num_adapters = num_adapters
        self._max_line_bytes = max_line_bytes
        self._wake = asyncio.Event()
        self._lines: list[InputLine] = []
        self._again: deque[InputLine] = deque()
        self._num_crashes: dict[str, int] = {}
        self._unwritten: list[LineResult] = []
        self._are_counts_saved = True
        self._resume = asyncio.Event()
        self._resume.set()
        self._trouble = ""
        self._end: BatchStatus | None = None
        self._opened: BatchResults | None = None

    @property
    def _batch(self) -> BatchObject:
        return self._stored.batch

    def look_again(self) -> None:
        """Notice soon that the batch is to be cancelled."""
        self._wake.set()

    async def run(self) -> bool:
        """Run until the batch has ended, or its tenant has no rights here any more; return whether it has
        ended. Raises StorageError if the disk fails before the first line; it can be run again."""
        self._end = await asyncio.to_thread(self._why_end)
        try:
            if self._end is None or self._batch.in_progress_at is not None:
                self._lines = await asyncio.to_thread(self._read_input)
        except InputError as error:
            errors = BatchErrors(data=error.errors)
            await self._insist(
                lambda: self._save(status=BatchStatus.FAILED, failed_at=self._now(), errors=errors)
            )
            return True
        self._opened = await asyncio.to_thread(self._open)
        with contextlib.closing(self._opened):
            if self._end is None:
                begun_at = self._batch.in_progress_at or self._now()
                await asyncio.to_thread(self._save, status=BatchStatus.IN_PROGRESS, in_progress_at=begun_at)
            if not await self._answer_all():
                return False
            await self._insist(self._finish)
            return True

    async def _answer_all(self) -> bool:
        """Have the lines answered; return False if that must be left to another run."""
        if self._end is not None:
            return True
        answering = asyncio.create_task(self._answer_lines())
        try:
            while not answering.done() and self._end is None:
                await self._tick(answering)
                if self._access() is None:
                    return False
                self._end = await asyncio.to_thread(self._why_end)
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            with contextlib.suppress(StorageError):  # what is not on disk is answered again by the next run
                await asyncio.to_thread(self._write)
        if not answering.cancelled():
            answering.result()
        return True

    async def _tick(self, answering: asyncio.Task[None]) -> None:
        """Wait for a while, and write what has been answered."""
        waking = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait([answering, waking], timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
        self._wake.clear()
        await self._insist(self._write)

    # ---- lines

    async def _answer_lines(self) -> None:
        done = self._results.done
        order = by_adapter((line for line in self._lines if line.custom_id not in done), self._num_adapters)
        tasks: set[asyncio.Task[None]] = set()
        file = os.open(self._input_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while True:
                await self._resume.wait()
                line = self._again.popleft() if self._again else next(order, None)
                if line is not None:
                    call = await asyncio.to_thread(self._call, file, line)
                    if call is None:
                        return
                    await self._gate.enter(call)
                    task = asyncio.create_task(self._answer(line, call))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                elif tasks:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                else:
                    return
        finally:
            for task in list(tasks):
                task.cancel()
            if tasks:
                await asyncio.wait(list(tasks))
            os.close(file)

    def _call(self, file: int, line: InputLine) -> LineCall | None:
        """Return the request of a line; None without rights to send it."""
        access = self._access()
        if access is None:
            return None
        url, content = request_body(os.pread(file, line.num_bytes, line.offset))
        return LineCall(url=url, content=content, access=access)

    async def _answer(self, line: InputLine, call: LineCall) -> None:
        """Send a line, and keep its result, or put it back."""
        try:
            await call.run(self._app)
        except Exception:
            logger.exception("line %d of %s failed", line.number, self._batch.id)
        finally:
            self._gate.leave(call)
        if self._is_to_try_again(line, call):
            self._again.append(line)
            self._pause(_seconds(call.headers.get("retry-after")))
            return
        result = LineResult(id=new_result_id(), custom_id=line.custom_id)
        if call.body:
            result.response = LineResponse(
                status_code=call.status, request_id=call.request_id, body=msgspec.Raw(call.body)
            )
        else:
            result.error = LineError(code="server_error", message="the server's log has the details")
        self._unwritten.append(result)

    def _is_to_try_again(self, line: InputLine, call: LineCall) -> bool:
        """Return whether the server may answer a line later: it is busy, starts, stops or has crashed."""
        if call.status not in _TRY_AGAIN:
            return False
        if call.status == 503 and decode_json(call.body, ErrorBody).error.code == "engine_down":
            num_crashes = self._num_crashes.get(line.custom_id, 0) + 1
            self._num_crashes[line.custom_id] = num_crashes
            return num_crashes < _MAX_CRASHES
        return True

    def _pause(self, seconds: float) -> None:
        """Send no line for a while."""
        if self._resume.is_set():
            self._resume.clear()
            asyncio.get_running_loop().call_later(min(seconds, _MAX_PAUSE_S), self._resume.set)

    # ---- the disk

    @property
    def _input_path(self) -> Path:
        return self._owned.content_path(self._batch.input_file_id)

    @property
    def _results(self) -> BatchResults:
        assert self._opened is not None, "opened before anything is answered"
        return self._opened

    def _open(self) -> BatchResults:
        stored, path_of = self._stored, self._owned.content_path
        return BatchResults(path_of(stored.result_id), path_of(stored.failure_id))

    def _read_input(self) -> list[InputLine]:
        try:
            return read_input(
                self._input_path,
                self._batch.endpoint,
                max_lines=self._owned.store.limits.max_lines,
                max_line_bytes=self._max_line_bytes,
            )
        except FileNotFoundError:
            raise InputError.of("input_deleted", "the input file was deleted before it was read") from None
        except OSError as error:
            raise StorageError(
                f"the input of batch {self._batch.id} cannot be read: {error.strerror}"
            ) from error

    def _write(self) -> None:
        """Write the answers that have come, and how far the batch is."""
        answers = self._unwritten[:]  # more may come meanwhile
        if answers:
            self._results.append(answers)
            self._are_counts_saved = False  # even if the disk fails before they are
            del self._unwritten[: len(answers)]
        if not self._are_counts_saved:
            self._save()

    def _finish(self) -> None:
        """List the results and end the batch. May be repeated."""
        self._write()
        end = self._end or BatchStatus.COMPLETED
        done = self._results.done
        left = [line.custom_id for line in self._lines if line.custom_id not in done]
        assert not left or end in _UNFINISHED, "a batch is complete when all of its lines are done"
        self._results.append(
            [LineResult(id=new_result_id(), custom_id=name, error=_UNFINISHED[end]) for name in left]
        )
        if end is BatchStatus.COMPLETED:
            self._save(status=BatchStatus.FINALIZING, finalizing_at=self._batch.finalizing_at or self._now())
        changes: dict[str, Any] = {"status": end, f"{end}_at": self._now()}
        if end is BatchStatus.CANCELLED:
            changes["cancelling_at"] = self._owned.cancelling_at(self._batch.id)
        for field, file_id, file, kind in (
            ("output_file_id", self._stored.result_id, self._results.answers, "output"),
            ("error_file_id", self._stored.failure_id, self._results.failures, "errors"),
        ):
            if file.num_bytes:
                self._owned.add(
                    FileObject(
                        id=file_id,
                        bytes=file.num_bytes,
                        created_at=self._now(),
                        filename=f"{self._batch.id}_{kind}.jsonl",
                        purpose="batch_output",
                    )
                )
                changes[field] = file_id
            else:
                self._owned.content_path(file_id).unlink(missing_ok=True)
        self._save(**changes)

    def _save(self, **changes: Any) -> None:
        """Write the batch with changes and its counts as they are now."""
        if self._opened is not None:
            changes["request_counts"] = RequestCounts(
                total=len(self._lines),
                completed=len(self._opened.answers.done),
                failed=len(self._opened.failures.done),
            )
        batch = msgspec.structs.replace(self._batch, **changes)
        stored = msgspec.structs.replace(self._stored, batch=batch)
        self._owned.save(stored)
        self._stored = stored
        self._are_counts_saved = True

    def _why_end(self) -> BatchStatus | None:
        """Return why the batch ends with lines left; None if it goes on."""
        if self._owned.cancelling_at(self._batch.id) is not None:
            return BatchStatus.CANCELLED
        return BatchStatus.EXPIRED if self._now() >= self._batch.expires_at else None

    async def _insist(self, write: Callable[[], None]) -> None:
        """Write to the disk, until that succeeds. No line is sent meanwhile."""
        while True:
            try:
                await asyncio.to_thread(write)
            except StorageError as error:
                if str(error) != self._trouble:
                    logger.warning("batch %s waits for the disk: %s", self._batch.id, error)
                self._trouble = str(error)
                self._owned.wait_for_disk(self._batch.id, error)
                self._pause(_DISK_RETRY_S)
                await asyncio.sleep(_DISK_RETRY_S)
            else:
                self._trouble = ""
                return

    def _now(self) -> int:
        return int(self._owned.store.wall_clock_s())


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a header, at least one."""
    try:
        seconds = float(retry_after or 1)
    except ValueError:
        return 1.0
    return max(seconds, 1.0) if math.isfinite(seconds) else 1.0
