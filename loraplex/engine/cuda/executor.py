"""The executor of one CUDA device.

A launch lays the step out as one block of integers for the device to fetch, replays a graph (or runs the
kernels), and returns; the sampled tokens stay on the device for the next step, and a kernel writes them to
pinned memory of the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence, Set
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from loraplex.adapters.slab import touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import CapacityError
from loraplex.core.modules import MAX_RANK
from loraplex.core.request import EngineRequest
from loraplex.engine.adapter_reads import AdapterReads
from loraplex.engine.batch import BatchBuilder, BuiltBatch
from loraplex.engine.cuda.adapter_store import AdapterStore, Transfer
from loraplex.engine.cuda.arrivals import Arrivals
from loraplex.engine.cuda.cpu_assist import AssistedTasks, CpuAssist
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.device_sampler import draw_once
from loraplex.engine.cuda.flight import CudaFlight
from loraplex.engine.cuda.kv_swap import KVSwap
from loraplex.engine.cuda.merge_buffer import MergeBuffer
from loraplex.engine.cuda.seats import Seats
from loraplex.engine.cuda.small_copies import SmallCopies
from loraplex.engine.cuda.step_buffers import HostBlock
from loraplex.engine.cuda.step_runner import StepOutput, StepRunner
from loraplex.engine.cuda.streams import Moment, use_device
from loraplex.engine.cuda.token_choice import TokenChoice
from loraplex.engine.executor import AdapterEvent, LoadOrder, SwapEvent
from loraplex.engine.grammars import AnswerGrammar
from loraplex.engine.peers import ReadCounts
from loraplex.engine.prompt_scores import score_prompt, wants_prompt_scores
from loraplex.engine.resident_adapters import ResidentAdapters
from loraplex.model.decoder import Decoder
from loraplex.perf.assist_split import MAX_SPANS
from loraplex.scheduling.plan import AdapterRead, BlockCopy, Move, StepPlan

_NUM_READS: Final = 2
"""Number of threads that read adapters; each has helper threads."""
_ARRIVAL_WAIT_S: Final = 50e-6


class CudaExecutor:
    """Owns the device's model and its arena."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        runner: StepRunner,
        builder: BatchBuilder,
        arena: DeviceArena,
        store: AdapterStore,
        device: torch.device,
        num_seats: int,
        reads: AdapterReads,
        merge_buffer: MergeBuffer,
        assist: CpuAssist | None = None,
        kv_swap: KVSwap | None = None,
    ) -> None:
        """`reads`: fills the host blocks of `store`. `merge_buffer`: must be that of `runner`. `kv_swap`: the
        host tier of KV blocks."""
        self._decoder = decoder
        self._runner = runner
        self._builder = builder
        self._arena = arena
        self._store = store
        self._device = device
        self._reads = reads
        self._assist = assist
        self._merge_buffer = merge_buffer
        self._merged: tuple[str, frozenset[str]] | None = None  # a version, and the groups that it touches
        self._kv_swap = kv_swap
        self._adapters = ResidentAdapters(_NUM_READS, partial(use_device, device))
        self._arrivals = Arrivals(store, self._adapters, device)
        self._small_copies = SmallCopies(device)
        self._in_use: deque[tuple[Moment, HostBlock, list[torch.Tensor]]] = (
            deque()
        )  # host memory, kept until the step whose kernels read or write it is over
        self._last_moves = Moment(device)  # after the arena's initial fill
        self._has_drawn = False
        self._seats = Seats(num_seats)
        self._tokens = TokenChoice(runner.last_tokens, self._seats, self._small_copies)

    # ---- requests and adapters

    def begin(self, request: EngineRequest, grammar: AnswerGrammar | None = None) -> None:
        self._tokens.begin(request, grammar)

    def end(self, request_id: str) -> None:
        self._tokens.end(request_id)
        self.preempt(request_id)

    def preempt(self, request_id: str) -> None:
        self._seats.leave(request_id)
        self._builder.tables.forget(request_id)

    def adapter_bytes(self, spec: AdapterSpec) -> int:
        if spec.max_rank > MAX_RANK:
            raise CapacityError(
                f"the adapter has rank {spec.max_rank}, the GPU's kernels go up to {MAX_RANK}; serve it with "
                "--device cpu, or train it with a lower rank"
            )
        return self._store.num_bytes(spec)

    def read_adapter(self, sources: Sequence[AdapterSpec], read: AdapterRead) -> None:
        self._adapters.read(sources, partial(self._store.read, place=read.place))

    def load_adapters(self, loads: Sequence[LoadOrder]) -> None:
        """Copy adapters to the device, first those that the next step uses, and their first layers before
        their last ones. Those marked `behind` start after the next launch."""
        self._arrivals.start_held_back()
        awaited: list[Transfer] = []
        others: list[Transfer] = []
        held_back: list[Transfer] = []
        for sources, load in loads:
            assert load.place is not None
            after = self._last_moves if load.quiet else Moment(self._device)
            if load.source is None:
                self._adapters.load(sources, partial(self._store.load, place=load.place, after=after))
                continue
            transfer = Transfer(
                spec=sources[0],
                source=load.source,
                place=load.place,
                after=after,
                assisted_layers=load.assisted_layers,
            )
            (awaited if load.awaited else held_back if load.behind else others).append(transfer)
        if self._assist is not None and any(transfer.assisted_layers > 0 for transfer in awaited):
            self._assist.arm()
        self._arrivals.hold_back(held_back)
        for transfers in (awaited, *([transfer] for transfer in others)):
            self._arrivals.start(transfers)

    def evict_adapter(self, version: str) -> None:
        """Free its place. Whatever uses the place next runs after the steps that read it: later steps by
        stream order, and loads too, unless they are `quiet` because no step in flight uses the place."""
        del self._adapters.weights[version]

    def move(self, moves: Sequence[Move]) -> None:
        self._arena.move(moves)
        if any(move.version is None for move in moves):
            self._builder.tables.forget_contents()
        self._last_moves = Moment(self._device)
        weights = self._adapters.weights
        for move in moves:
            if move.version in weights:  # it may have been evicted since
                weights[move.version] = self._store.moved(weights[move.version], move.target_byte)

    def swap(self, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> None:
        assert self._kv_swap is not None
        self._kv_swap.start(outs, ins, after=Moment(self._device))

    def poll_swaps(self) -> Sequence[SwapEvent]:
        return () if self._kv_swap is None else self._kv_swap.poll()

    @property
    def why_not_merged(self) -> str | None:
        return self._decoder.why_not_merged or self._merge_buffer.why_not_merged

    def merge_bytes(self, spec: AdapterSpec) -> int | None:
        return self._merge_buffer.num_bytes(touched_groups(spec))

    def merge_adapter(self, version: str, place: int | None) -> None:
        assert version not in self._arrivals.versions, "an adapter is merged before it is on the device"
        weights = self._adapters.weights[version]
        assert place is not None
        assert place <= self._merge_buffer.begin(weights.touched), "others have some of this memory"
        self._decoder.merge(weights, self._merge_buffer.weight)
        self._merged = version, weights.touched
        # Loads that wait for no step must not overwrite what is still read or written.
        self._last_moves = Moment(self._device)

    def drop_merged(self) -> None:
        """Free their memory: whatever uses it next runs after the steps that read it (see
        `evict_adapter`)."""
        self._merged = None

    @property
    def read_counts(self) -> ReadCounts:
        return self._reads.counts

    @property
    def num_pending_loads(self) -> int:
        num_swaps = 0 if self._kv_swap is None else self._kv_swap.num_pending
        return self._adapters.num_pending + self._arrivals.num_pending + num_swaps

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        until = time.monotonic() + timeout_s
        while True:
            awaits_copies = bool(self._arrivals.versions) or (
                self._kv_swap is not None and self._kv_swap.num_pending > 0
            )
            wait_s = min(timeout_s, _ARRIVAL_WAIT_S) if awaits_copies else timeout_s
            events = [*self._arrivals.take_arrived(), *self._adapters.poll(0.0)]
            if events or self._swap_has_ended or time.monotonic() >= until or self.num_pending_loads == 0:
                return events
            if self._adapters.num_pending > 0:
                events = self._adapters.poll(wait_s)
                if events:
                    return events
            else:
                time.sleep(wait_s)

    @property
    def _swap_has_ended(self) -> bool:
        return self._kv_swap is not None and self._kv_swap.has_ended

    def overdue_adapters(self, deadline_s: float) -> Sequence[str]:
        return self._adapters.overdue(deadline_s)

    def expect(self, spec: AdapterSpec) -> None:
        groups = touched_groups(spec)
        self._runner.expect(groups)
        if self._merge_buffer.num_bytes(groups) is not None:
            self._runner.expect_merged(groups)

    @property
    def num_workers(self) -> int:
        """Number of CPU workers that can assist with steps: those that are ready, once a graph has their
        kernels."""
        return 0 if self._assist is None or not self._runner.has_assist_kernels else self._assist.num_ready

    @property
    def num_required(self) -> int:
        return self._runner.num_required

    def prepare(self) -> bool:
        if not self._has_drawn:
            self._has_drawn = True
            shape = self._decoder.config.shape
            draw_once(shape.vocab_size, self._arena.caches[0].k.dtype, self._device)
        return self._runner.prepare() or self._store.prepare()

    def check_integrity(self, request_ids: Set[str], adapters: Set[str]) -> None:
        assert self._tokens.states.keys() == request_ids
        self._seats.check_integrity(request_ids)
        assert self._adapters.weights.keys() - self._arrivals.versions == adapters
        self._builder.tables.check_integrity(request_ids)

    def close(self) -> None:
        with ExitStack() as closing:  # in reverse order, all of them even if one raises
            closing.callback(self._close_store)
            if self._assist is not None:
                closing.callback(self._assist.close)
            if self._kv_swap is not None:
                closing.callback(self._kv_swap.close)
            closing.callback(self._finish_steps)
            closing.callback(self._adapters.close)

    def _close_store(self) -> None:
        # A thread that hangs in a read would write to freed memory if its disk answered after all.
        self._store.close(frees_memory=not self._adapters.is_reading)

    def _finish_steps(self) -> None:
        while self._in_use:
            self._in_use.popleft()[0].wait()

    # ---- steps

    def launch(self, plan: StepPlan) -> CudaFlight:
        begun = Moment(self._device, timed=True)
        while self._in_use and self._in_use[0][0].passed:
            self._in_use.popleft()
        states = self._tokens.states
        scored = {c.request_id for c in plan.chunks if wants_prompt_scores(states[c.request_id], c)}
        merged = self._merged_groups(plan)
        adapters = self._adapters.weights if plan.merged is None else None
        built = self._builder.build(plan.chunks, adapters, all_rows_of=scored)
        output = self._run(built, merged)
        prompt_logprobs = {
            chunk.request_id: score_prompt(
                self._decoder,
                states[chunk.request_id],
                chunk,
                output.states_LH[built.rows_of[chunk.request_id]],
                self._small_copies,
            )
            for chunk in plan.chunks
            if chunk.request_id in scored and output.states_LH is not None
        }
        chosen = self._tokens.choose(built.sampling, output)
        rows = list(built.sampling.values())
        tokens_L2 = output.tokens_L2
        if rows != list(range(len(rows))):
            tokens_L2 = tokens_L2[self._small_copies.integers(rows)]
        host_L2 = self._small_copies.to_host(tokens_L2)
        done = Moment(tokens_L2.device, timed=True)
        self._tokens.sent(list(built.sampling), host_L2, done)
        self._in_use.append((done, output.host_block, self._small_copies.take_kept()))
        self._arrivals.start_held_back()
        return CudaFlight(
            plan=plan,
            dtype=output.logits_LV.dtype,
            request_ids=tuple(built.sampling),
            tokens_L2=host_L2,
            begun=begun,
            done=done,
            runs_ahead=chosen.on_device,
            logprobs=chosen.logprobs,
            failures=chosen.failures,
            failed_params=chosen.failed_params,
            prompt_logprobs=prompt_logprobs,
            assist=self._assist,
        )

    def _merged_groups(self, plan: StepPlan) -> frozenset[str]:
        """Return the groups of linears for which a step uses merged weights."""
        if plan.merged is None:
            return frozenset()
        assert self._merged is not None, "nothing is merged"
        version, groups = self._merged
        assert plan.merged == version, f"{version} is merged, not {plan.merged}"
        return groups

    def _run(self, built: BuiltBatch, merged: frozenset[str]) -> StepOutput:
        seats = self._seats.for_step(built)
        if merged:  # it reads no adapter, even if that is on its way again
            return self._runner.run(built, seats, merged=merged)
        assisted = self._assisted_tasks(built)
        spans = () if assisted is None else assisted.spans
        output = self._runner.run(built, seats, self._arrivals.wanted_copies(built, spans), assisted)
        self._arrivals.step_assisted(spans)
        return output

    def _assisted_tasks(self, built: BuiltBatch) -> AssistedTasks | None:
        """Submit tasks for the prompts whose first layers CPU workers may compute."""
        if self._assist is None or not self._arrivals.versions or self._assist.num_ready == 0:
            return None
        spans = self._arrivals.assisted_spans(built.chunks)
        if not spans or not self._runner.assists(built):
            return None
        return self._assist.submit(spans[:MAX_SPANS])
