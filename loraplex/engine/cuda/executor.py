"""The executor of one CUDA device.

A launch lays the step out as one block of integers for the device to fetch, replays a graph (or runs the
kernels), and returns; the sampled tokens stay on the device for the next step and come back to the host by an
asynchronous copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.adapters.slab import touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import CapacityError
from loraplex.core.request import EngineRequest, TokenLogprob
from loraplex.engine.adapter_reads import AdapterReads
from loraplex.engine.batch import BatchBuilder, BuiltBatch
from loraplex.engine.cuda.adapter_store import AdapterStore, Arrival, Transfer
from loraplex.engine.cuda.cpu_assist import AssistedSpan, AssistedTasks, CpuAssist
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.device_sampler import draw_once, draw_tokens, stays_on_device
from loraplex.engine.cuda.kv_swap import KVSwap
from loraplex.engine.cuda.merge_buffer import MergeBuffer
from loraplex.engine.cuda.step_buffers import SCRATCH_SEAT, HostBlock
from loraplex.engine.cuda.step_lora import to_device
from loraplex.engine.cuda.step_runner import RowSeats, StepOutput, StepRunner
from loraplex.engine.cuda.streams import Moment, use_device
from loraplex.engine.executor import AdapterEvent, LoadOrder, StepResult, SwapEvent
from loraplex.engine.peers import ReadCounts
from loraplex.engine.prompt_scores import score_prompt, wants_prompt_scores
from loraplex.engine.resident_adapters import ResidentAdapters
from loraplex.engine.sampler import SamplingState, not_finite, sample
from loraplex.kernels.triton.lora_step import MAX_RANK
from loraplex.model.decoder import Decoder
from loraplex.perf.assist_split import MAX_SPANS
from loraplex.scheduling.plan import AdapterRead, BlockCopy, Chunk, Move, StepPlan

_NUM_READS: Final = 2
"""Number of threads that read adapters; each has helper threads."""
_ARRIVAL_WAIT_S: Final = 50e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFlight:
    """A step in flight: its (token, finite) pairs are being copied to the host. `begun`: the moment from
    which the device could compute it, which is not before the end of the step before."""

    plan: StepPlan
    dtype: torch.dtype
    request_ids: tuple[str, ...]
    tokens_L2: torch.Tensor
    begun: Moment
    done: Moment
    runs_ahead: bool
    logprobs: dict[str, TokenLogprob]
    prompt_logprobs: dict[str, list[TokenLogprob]]
    assist: CpuAssist | None = None

    def land(self) -> StepResult:
        self.done.wait()
        if self.assist is not None:
            self.assist.check()
        result = StepResult(
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            device_s=self.done.seconds_since(self.begun),
        )
        for request_id, (token, finite) in zip(self.request_ids, self.tokens_L2.tolist(), strict=False):
            if finite:
                result.tokens[request_id] = token
            else:
                result.failures[request_id] = not_finite(self.plan, request_id, self.dtype)
        return result


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
        self._arrivals: dict[str, Arrival] = {}  # adapters being copied, in copy order
        self._behind_launch: list[Transfer] = []  # not needed by the step launched next
        self._host_blocks_in_use: deque[tuple[Moment, HostBlock]] = (
            deque()
        )  # each is kept until the step that fetches it is over
        self._assisted_steps: dict[str, Moment] = {}  # by version: the last step that workers assisted
        self._last_moves = Moment(device)  # after the arena's initial fill
        self._has_drawn = False
        self._states: dict[str, SamplingState] = {}
        self._seats: dict[str, int] = {}
        self._free_seats = [seat for seat in range(num_seats) if seat != SCRATCH_SEAT]

    # ---- requests and adapters

    def begin(self, request: EngineRequest) -> None:
        self._states[request.request_id] = SamplingState(request)

    def end(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self.preempt(request_id)

    def preempt(self, request_id: str) -> None:
        seat = self._seats.pop(request_id, None)
        if seat is not None:  # steps in flight still write to it, but before any step of its next owner
            self._free_seats.append(seat)
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
        self._transfer_behind_launch()
        awaited: list[Transfer] = []
        others: list[Transfer] = []
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
            (awaited if load.awaited else self._behind_launch if load.behind else others).append(transfer)
        if self._assist is not None and any(transfer.assisted_layers > 0 for transfer in awaited):
            self._assist.arm()
        for transfers in (awaited, *([transfer] for transfer in others)):
            self._transfer(transfers)

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        """Start copies that take turns."""
        if transfers:
            for arrival in self._store.start(transfers):
                self._adapters.weights[arrival.transfer.spec.version] = arrival.weights
                self._arrivals[arrival.transfer.spec.version] = arrival

    def _transfer_behind_launch(self) -> None:
        """Start the copies that were held back for a launch, one after the other: the adapter that requests
        have waited for longest arrives first."""
        transfers, self._behind_launch = self._behind_launch, []
        for transfer in transfers:
            self._transfer([transfer])

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
        assert version not in self._arrivals, "an adapter is merged before it is on the device"
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
        return self._adapters.num_pending + len(self._arrivals) + len(self._behind_launch) + num_swaps

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        until = time.monotonic() + timeout_s
        while True:
            awaits_copies = bool(self._arrivals) or (
                self._kv_swap is not None and self._kv_swap.num_pending > 0
            )
            wait_s = min(timeout_s, _ARRIVAL_WAIT_S) if awaits_copies else timeout_s
            events = [*self._take_arrived(), *self._adapters.poll(0.0)]
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
        assert self._states.keys() == request_ids
        assert self._seats.keys() <= request_ids
        assert len({*self._seats.values(), *self._free_seats}) == len(self._seats) + len(self._free_seats)
        assert self._adapters.weights.keys() - self._arrivals.keys() == adapters
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
        while self._host_blocks_in_use:
            self._host_blocks_in_use.popleft()[0].wait()

    # ---- steps

    def launch(self, plan: StepPlan) -> CudaFlight:
        begun = Moment(self._device, timed=True)
        while self._host_blocks_in_use and self._host_blocks_in_use[0][0].passed:
            self._host_blocks_in_use.popleft()
        scored = {c.request_id for c in plan.chunks if wants_prompt_scores(self._states[c.request_id], c)}
        merged = self._merged_groups(plan)
        adapters = self._adapters.weights if plan.merged is None else None
        built = self._builder.build(plan.chunks, adapters, all_rows_of=scored)
        output = self._run(built, merged)
        prompt_logprobs = {
            chunk.request_id: score_prompt(
                self._decoder,
                self._states[chunk.request_id],
                chunk,
                output.states_LH[built.rows_of[chunk.request_id]],
            )
            for chunk in plan.chunks
            if chunk.request_id in scored and output.states_LH is not None
        }
        logprobs, on_device = self._choose(built, output)
        rows = list(built.sampling.values())
        tokens_L2 = output.tokens_L2
        if rows != list(range(len(rows))):
            tokens_L2 = tokens_L2[to_device(rows, tokens_L2.device)]
        host_L2 = torch.empty(tokens_L2.shape, dtype=torch.int64, pin_memory=tokens_L2.is_cuda)
        host_L2.copy_(tokens_L2, non_blocking=True)
        done = Moment(tokens_L2.device, timed=True)
        self._host_blocks_in_use.append((done, output.host_block))
        self._transfer_behind_launch()
        return CudaFlight(
            plan=plan,
            dtype=output.logits_LV.dtype,
            request_ids=tuple(built.sampling),
            tokens_L2=host_L2,
            begun=begun,
            done=done,
            runs_ahead=on_device,
            logprobs=logprobs,
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
        follows: list[bool] = []
        row_seats: list[int] = []
        for chunk in built.chunks:
            seat = self._seat(chunk)
            follows += [chunk.follows] * chunk.num_tokens
            row_seats += [seat] * chunk.num_tokens
        logit_seats = [SCRATCH_SEAT] * built.batch.logit_rows_L.shape[0]
        for request_id, row in built.sampling.items():
            logit_seats[row] = self._seats[request_id]
        seats = RowSeats(follows=follows, rows=row_seats, logits=logit_seats)
        if merged:  # it reads no adapter, even if that is on its way again
            return self._runner.run(built, seats, merged=merged)
        assisted = self._assisted_tasks(built)
        output = self._runner.run(built, seats, self._wanted_copies(built, assisted), assisted)
        for span in assisted.spans if assisted is not None else ():
            self._assisted_steps[span.arrival.transfer.spec.version] = Moment(self._device)
        return output

    def _assisted_tasks(self, built: BuiltBatch) -> AssistedTasks | None:
        """Submit tasks for the prompts whose first layers CPU workers may compute."""
        if self._assist is None or not self._arrivals or self._assist.num_ready == 0:
            return None
        found: list[AssistedSpan] = []
        for chunk, first in _first_rows(built.chunks):
            arrival = self._arrivals.get(chunk.adapter or "")
            if arrival is not None and arrival.transfer.assisted_layers > 0 and chunk.num_tokens > 1:
                found.append(
                    AssistedSpan(
                        first=first,
                        count=chunk.num_tokens,
                        source=arrival.transfer.source,
                        arrival=arrival,
                        num_layers=arrival.transfer.assisted_layers,
                    )
                )
        if not found or not self._runner.assists(built):
            return None
        return self._assist.submit(found[:MAX_SPANS])

    def _wanted_copies(
        self, built: BuiltBatch, assisted: AssistedTasks | None
    ) -> npt.NDArray[np.int64] | None:
        """Return the copies that the whole step waits for, by place (`kernels.triton.gate`); None for none.
        For adapters that only assisted spans use, it waits only for the tables."""
        arrivals = {
            version: self._arrivals[version]
            for version in (chunk.adapter for chunk in built.chunks)
            if version in self._arrivals
        }
        if not arrivals:
            return None
        if built.batch.span_starts_S.shape[0] == 0:  # it has no gates, and is short: it starts later
            for arrival in arrivals.values():
                arrival.done.hold_back()
            return None
        tickets = np.array([arrival.tickets for arrival in arrivals.values()], dtype=np.int64)
        spans = {span.first for span in assisted.spans} if assisted is not None else set[int]()
        others = {chunk.adapter for chunk, first in _first_rows(built.chunks) if first not in spans}
        tickets[[version not in others for version in arrivals], 1:] = 0
        wanted: npt.NDArray[np.int64] = tickets.max(axis=0)
        return wanted

    def _take_arrived(self) -> list[AdapterEvent]:
        arrived: dict[str, Arrival] = {}
        for version, arrival in self._arrivals.items():
            # Workers read its host memory until the end of the step.
            last_step = self._assisted_steps.get(version)
            if not arrival.done.passed or (last_step is not None and not last_step.passed):
                break  # those after it have not arrived either
            arrived[version] = arrival
        for version in arrived:
            del self._arrivals[version]
            self._assisted_steps.pop(version, None)
        return [
            AdapterEvent(version=version, copied=_copied(arrival)) for version, arrival in arrived.items()
        ]

    def _seat(self, chunk: Chunk) -> int:
        seat = self._seats.get(chunk.request_id)
        if seat is None:
            seat = self._seats[chunk.request_id] = self._free_seats.pop()
        return seat

    def _choose(self, built: BuiltBatch, output: StepOutput) -> tuple[dict[str, TokenLogprob], bool]:
        """Replace the greedy tokens of requests that are not greedy, or need the host.

        Return log-probabilities, and whether all tokens were chosen on the device.
        """
        drawn: list[tuple[int, str]] = []
        by_host: list[tuple[int, str]] = []
        for request_id, row in built.sampling.items():
            state = self._states[request_id]
            if not stays_on_device(state):
                by_host.append((row, request_id))
                continue
            if not state.params.greedy:
                drawn.append((row, request_id))
        if drawn:
            rows = to_device([row for row, _ in drawn], output.logits_LV.device)
            states = [self._states[request_id] for _, request_id in drawn]
            self._replace(output, rows, draw_tokens(output.logits_LV[rows], states), [i for _, i in drawn])
        logprobs = self._choose_by_host(output, by_host) if by_host else {}
        for request_id in built.sampling.keys() - {request_id for _, request_id in by_host}:
            self._states[request_id].num_output += 1
        return logprobs, not by_host

    def _choose_by_host(
        self, output: StepOutput, by_host: Sequence[tuple[int, str]]
    ) -> dict[str, TokenLogprob]:
        device = output.logits_LV.device
        rows = to_device([row for row, _ in by_host], device)
        states = [self._states[request_id] for _, request_id in by_host]
        logprobs: dict[str, TokenLogprob] = {}
        tokens = []
        for (_, request_id), state, chosen in zip(
            by_host, states, sample(output.logits_LV[rows].cpu(), states), strict=True
        ):
            tokens.append(0 if chosen.token_id is None else chosen.token_id)
            if chosen.token_id is not None:
                state.accept(chosen.token_id)
            if chosen.logprob is not None:
                logprobs[request_id] = chosen.logprob
        self._replace(output, rows, to_device(tokens, device), [request_id for _, request_id in by_host])
        return logprobs

    def _replace(
        self, output: StepOutput, rows: torch.Tensor, tokens_L: torch.Tensor, request_ids: Sequence[str]
    ) -> None:
        output.tokens_L2[:, 0].index_copy_(0, rows, tokens_L)
        seats = to_device([self._seats[request_id] for request_id in request_ids], rows.device)
        self._runner.last_tokens.index_copy_(0, seats, tokens_L)


def _first_rows(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """Yield each chunk with its first row in the step."""
    return zip(chunks, accumulate((chunk.num_tokens for chunk in chunks), initial=0), strict=False)


def _copied(arrival: Arrival) -> tuple[int, float] | None:
    seconds = arrival.done.seconds_since(arrival.transfer_batch.begun)
    return None if seconds is None else (arrival.transfer_batch.num_bytes, seconds)
