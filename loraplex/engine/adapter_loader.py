"""Reads adapters from disk into memory beside the running step."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from loraplex.adapters.slab import ModuleSlot, SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import AdapterError, CapacityError
from loraplex.core.shape import ModelShape
from loraplex.core.words import plural
from loraplex.engine.adapter_reads import ReadSlab
from loraplex.engine.peers import ComesLaterError
from loraplex.kernels.lora import LoraGroup, LoraPart, LoraWeights, host_weights

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 5.0
"""Seconds that `close` waits for reads in flight: enough for a healthy disk."""
_AGAIN_S: Final = 0.003
"""Seconds that a loader thread sleeps after a load that must wait for another replica."""

Load = Callable[[AdapterSpec], LoraWeights]
Read = Callable[[AdapterSpec], None]
"""Both run on the loader's threads, and raise AdapterError or OSError if the weights cannot be read. A read
puts the weights into their memory. On ComesLaterError the task is queued again, behind the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """The end of a load: its weights, or the error. `read`: a read, which has no weights."""

    version: str
    weights: LoraWeights | None = None
    error: str | None = None
    read: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """A version to load from the first of its folders that still holds it, or only to read."""

    sources: Sequence[AdapterSpec]
    load: Load | Read
    is_read: bool


class AdapterLoader:
    """A few threads that read adapters; the engine's own thread collects the results.

    A read from a disk that is gone may never return, and its thread cannot be ended. `overdue` starts another
    thread in its place, so that one such adapter does not block the others. Threads are daemons for the same
    reason: the process can exit while one of them hangs.

        submit --> queued --> begun --------------> finished --poll--> collected
                     ^           |`---> overdue ---'
                     `-- later --'
    """

    def __init__(self, num_threads: int = 1, on_thread: Callable[[], None] | None = None) -> None:
        """`on_thread`: called first by each thread."""
        self._on_thread = on_thread
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the fields below
        self._begun: dict[_Task, tuple[float, threading.Thread]] = {}
        self._overdue: set[_Task] = set()
        self._threads: list[threading.Thread] = []
        self._num_uncollected = 0
        for _ in range(num_threads):
            self._start_thread()

    @property
    def num_pending(self) -> int:
        """Number of reads and loads not collected yet, without overdue ones. An overdue one counts again when
        it has ended after all."""
        return self._num_uncollected - len(self._overdue)

    @property
    def is_reading(self) -> bool:
        """Return whether any thread may still write to the memory of its read."""
        return bool(self._begun)

    def submit(self, sources: Sequence[AdapterSpec], load: Load) -> None:
        """Load one version from the first of its folders that still holds it."""
        self._num_uncollected += 1
        self._tasks.put(_Task(sources=sources, load=load, is_read=False))

    def submit_read(self, sources: Sequence[AdapterSpec], read: Read) -> None:
        """Read one version, without a load, from the first of its folders that still holds it."""
        self._num_uncollected += 1
        self._tasks.put(_Task(sources=sources, load=read, is_read=True))

    def overdue(self, deadline_s: float) -> list[str]:
        """Return the versions whose read or load began at least `deadline_s` ago and has not ended. `poll`
        still reports its result if it ends after all."""
        if not self._begun:
            return []
        now_s = time.monotonic()
        with self._lock:
            late = {
                task: thread
                for task, (begun_s, thread) in self._begun.items()
                if now_s - begun_s >= deadline_s
            }
            for task in late.keys() - self._overdue:
                self._overdue.add(task)
                self._threads.remove(late[task])
                self._start_thread()
        return [task.sources[0].version for task in late]

    def poll(self, timeout_s: float = 0.0) -> list[LoadResult]:
        """Return the loads that finished; wait up to `timeout_s` for the first of them."""
        results: list[LoadResult] = []
        try:
            if timeout_s > 0.0 and self.num_pending > 0:
                results.append(self._finished.get(timeout=timeout_s))
            while True:
                results.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        self._num_uncollected -= len(results)
        return results

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait up to `timeout_s` for reads that have begun, except overdue ones. `is_reading` tells whether
        any is left."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        with self._lock:
            left = sorted(task.sources[0].version for task in self._begun)
        if left:
            logger.warning(
                "closed although %d adapter %s did not end (version %s), whose threads and memory are left "
                "behind; check the disk that holds them",
                len(left),
                plural("read", len(left)),
                ", ".join(left),
            )

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        if self._on_thread is not None:
            self._on_thread()
        while (task := self._tasks.get()) is not None:
            with self._lock:
                self._begun[task] = (time.monotonic(), threading.current_thread())
            try:
                result = self._load(task)
            except ComesLaterError:
                result = None
                time.sleep(_AGAIN_S)
            with self._lock:
                del self._begun[task]
                is_replaced = task in self._overdue
                self._overdue.discard(task)
            if result is None:
                self._tasks.put(task)
            else:
                self._finished.put(result)
            if is_replaced:
                return

    def _load(self, task: _Task) -> LoadResult:
        version, reason = task.sources[0].version, ""
        for spec in task.sources:
            try:
                weights = task.load(spec)
            except ComesLaterError:
                raise
            except (AdapterError, CapacityError) as error:
                reason = str(error)
            except OSError as error:
                reason = f"its files cannot be read ({error.strerror}); restore them or load it again"
            except Exception:  # a bug must fail the waiting requests, not leave them waiting
                reason = "it could not be loaded; the server's log says why"
                logger.exception("a bug while loading an adapter")
            else:
                return LoadResult(version=version, weights=weights, read=task.is_read)
            # Clients get the reason; the path is for the operator only.
            logger.warning("the adapter in %s was not loaded: %s", spec.path, reason)
        message = f"the adapter is not available: {reason}"
        return LoadResult(version=version, error=message, read=task.is_read)


def resident_bytes(spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes that the adapter takes in memory."""
    return slab_layout(spec, shape).num_elements * dtype.itemsize


def read_weights(spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype, read: ReadSlab) -> LoraWeights:
    """Read a version, or a shard of it, as the CPU kernels use it. `shape` is the shard's."""
    layout = slab_layout(spec, shape)
    slab = torch.empty(layout.num_elements, dtype=dtype)
    read(spec, layout, slab)
    return slab_weights(slab, layout, spec.max_rank)


def slab_weights(slab: torch.Tensor, layout: SlabLayout, max_rank: int) -> LoraWeights:
    """Return a slab in host memory as the CPU kernels use it."""
    return host_weights(_views(slab, layout), max_rank)


def _views(slab: torch.Tensor, layout: SlabLayout) -> tuple[dict[str, LoraGroup], ...]:
    return tuple(
        {name: _group_view(slab, slots) for name, slots in groups.items()} for groups in layout.layers
    )


def _group_view(slab: torch.Tensor, slots: Sequence[ModuleSlot]) -> LoraGroup:
    total_rank, in_features = sum(slot.lora.rank for slot in slots), slots[0].in_features
    a_start = slots[0].a_start
    parts = tuple(
        LoraPart(
            module=slot.lora.module,
            b_t_RO=slab[slot.b_start : slot.b_start + slot.lora.rank * slot.out_features].view(
                slot.lora.rank, slot.out_features
            ),
            scale=slot.lora.scale,
            rank_start=slot.rank_start,
            rank_end=slot.rank_start + slot.lora.rank,
            out_start=slot.out_start,
            out_end=slot.out_start + slot.out_features,
        )
        for slot in slots
    )
    a_RI = slab[a_start : a_start + total_rank * in_features].view(total_rank, in_features)
    return LoraGroup(a_RI=a_RI, parts=parts)
