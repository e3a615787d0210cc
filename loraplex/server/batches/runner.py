"""Runs the batches of a server that nobody else runs: new ones, and those that a stopped server left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from loraplex.core.errors import StorageError
from loraplex.core.tenants import NO_TENANT
from loraplex.server.batches.batch_run import BatchRun
from loraplex.server.batches.line_call import line_app
from loraplex.server.batches.line_gate import LineGate
from loraplex.server.batches.objects import ENDED, StoredBatch
from loraplex.server.batches.store import BatchStore
from loraplex.server.deps import ServerDeps
from loraplex.server.tenants.access import UNRESTRICTED, Access

T = TypeVar("T")
logger = logging.getLogger(__name__)

_SCAN_S: Final = 10.0
_RUNS_PER_TENANT: Final = 2
"""Batches of a tenant that run at a time; the others wait for them."""
_ADAPTERS_PER_REPLICA: Final = 4

_AROUND_BODY_BYTES: Final = 4096
"""Bytes of a line beside the body of its request."""


class BatchRunner:
    """Give it a task for `run`; cancelling that stops all batches, for the next start to go on with."""

    def __init__(self, deps: ServerDeps, store: BatchStore) -> None:
        self._deps = deps
        self._store = store
        self._app = line_app(deps)
        self._wake = asyncio.Event()
        self._runs: dict[str, tuple[str, asyncio.Task[None]]] = {}  # tenant and task, by batch
        self._running: dict[str, BatchRun] = {}
        self._gate = LineGate(deps.waiting, self._num_replicas)
        self._damaged: set[str] = set()

    async def run(self) -> None:
        """Run batches until cancelled."""
        self._store.listeners.append(self._on_change)
        try:
            await self._look(self._store.remove_abandoned)
            while True:
                self._wake.clear()
                for stored in await self._look(self._open_batches) or ():
                    self._start(stored)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SCAN_S):  # unlike wait_for, which may swallow a cancellation
                        await self._wake.wait()
        finally:
            self._store.listeners.remove(self._on_change)
            tasks = [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _open_batches(self) -> list[StoredBatch]:
        return self._store.open_batches(self._on_damaged)

    def _on_damaged(self, error: StorageError) -> None:
        if (reason := str(error)) not in self._damaged:
            self._damaged.add(reason)
            logger.warning("a batch is left out: %s", reason)

    def _on_change(self) -> None:
        self._wake.set()
        for run in self._running.values():
            run.look_again()

    def _start(self, stored: StoredBatch) -> None:
        batch_id, tenant = stored.batch.id, stored.tenant
        if batch_id in self._runs:
            return
        is_over = self._store.wall_clock_s() >= stored.batch.expires_at
        if self._access(tenant) is None and not is_over:
            return  # of another server's tenant, or of one that may come back
        if Counter(each for each, _ in self._runs.values())[tenant] >= _RUNS_PER_TENANT:
            return
        task = asyncio.create_task(self._run(batch_id, tenant), name=f"run {batch_id}")
        self._runs[batch_id] = tenant, task

    async def _run(self, batch_id: str, tenant: str) -> None:
        owned = self._store.owned_by(tenant)
        has_ended = False
        try:
            with owned.claim(batch_id) as is_ours:
                stored = owned.stored(batch_id) if is_ours else None
                if stored is None:
                    owned.no_wait(batch_id)
                    return  # another server runs it
                if stored.batch.status in ENDED:
                    owned.save(stored)  # the last run ended before it had removed the mark
                    return
                run = self._running[batch_id] = BatchRun(
                    stored,
                    owned,
                    app=self._app,
                    gate=self._gate,
                    access=lambda: self._access(tenant),
                    num_adapters=_ADAPTERS_PER_REPLICA * self._num_replicas(),
                    max_line_bytes=self._deps.bodies.max_body_bytes + _AROUND_BODY_BYTES,
                )
                logger.info("batch %s runs", batch_id)
                has_ended = await run.run()
        except StorageError as error:
            logger.warning("batch %s is tried again later: %s", batch_id, error)
            owned.wait_for_disk(batch_id, error)
        except Exception:
            logger.exception("batch %s failed; it is tried again later", batch_id)
        finally:
            self._running.pop(batch_id, None)
            del self._runs[batch_id]
            if has_ended:
                logger.info("batch %s has ended", batch_id)
                self._wake.set()  # there is room for another

    async def _look(self, at_disk: Callable[[], T]) -> T | None:
        try:
            return await asyncio.to_thread(at_disk)
        except StorageError as error:
            logger.warning("batches cannot be looked for: %s", error)
            return None

    def _access(self, tenant: str) -> Access | None:
        """Return the rights of a batch's tenant; None if there is no such tenant here."""
        if tenant == NO_TENANT:
            return UNRESTRICTED
        return None if self._deps.tenants is None else self._deps.tenants.access(tenant)

    def _num_replicas(self) -> int:
        return 1 if self._deps.fleet is None else max(len(self._deps.fleet.replicas), 1)
