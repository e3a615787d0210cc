"""The executor of a CPU: torch and compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from loraplex.adapters.merged_layout import touched_bytes
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest
from loraplex.engine.adapter_loader import Load, read_weights, resident_bytes
from loraplex.engine.adapter_reads import AdapterReads
from loraplex.engine.batch import BatchBuilder, BuiltBatch
from loraplex.engine.cpu_threads import StepThreads
from loraplex.engine.executor import AdapterEvent, LandedFlight, LoadOrder, StepResult, SwapEvent
from loraplex.engine.grammars import AnswerGrammar
from loraplex.engine.peers import ReadCounts
from loraplex.engine.prompt_scores import score_prompt, wants_prompt_scores
from loraplex.engine.resident_adapters import ResidentAdapters
from loraplex.engine.sampler import SamplingState, not_finite, sample
from loraplex.engine.slab_reader import read_slab
from loraplex.model.decoder import Decoder, KVCache, Linears
from loraplex.scheduling.plan import AdapterRead, BlockCopy, Chunk, Move, StepPlan


class TorchExecutor:
    """Owns the model, its KV cache and the adapters in memory."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        caches: list[KVCache],
        builder: BatchBuilder,
        dtype: torch.dtype,
        runs_ahead: bool = False,
        read: Load | None = None,
        reads: AdapterReads | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        """`read`: loads adapters, instead of `reads`. `reads`: fills slabs; by default, from adapter folders
        alone. `threads`: chooses the number of threads of each step; torch's default if None.

        `runs_ahead`: let steps be launched before the last one's tokens are reported. It gains nothing on a
        CPU, but lets tests drive the engine as a GPU does.
        """
        self._decoder = decoder
        self._caches = caches
        self._builder = builder
        self._dtype = dtype
        self._runs_ahead = runs_ahead
        shape = decoder.config.shape
        self._reads = own = reads or AdapterReads(read_slab)
        self._read = read or (lambda spec: read_weights(spec, shape, dtype, own.keep))
        self._threads = threads
        self._adapters = ResidentAdapters()
        self._merged: tuple[str, Linears] | None = None  # a version and the linears that it is merged into
        self._states: dict[str, SamplingState] = {}

    def begin(self, request: EngineRequest, grammar: AnswerGrammar | None = None) -> None:
        self._states[request.request_id] = SamplingState(request, grammar)

    def preempt(self, request_id: str) -> None:
        self._builder.tables.forget(request_id)

    def end(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._builder.tables.forget(request_id)

    def adapter_bytes(self, spec: AdapterSpec) -> int:
        return resident_bytes(spec, self._decoder.config.shape, self._dtype)

    def read_adapter(self, sources: Sequence[AdapterSpec], read: AdapterRead) -> None:
        raise AssertionError("adapters are read to where they are used")

    def load_adapters(self, loads: Sequence[LoadOrder]) -> None:
        for order in loads:
            self._adapters.load(order.sources, self._read)

    def move(self, moves: Sequence[Move]) -> None:
        raise AssertionError("there is no arena on a CPU")

    def swap(self, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> None:
        raise AssertionError("keys and values are in host memory already")

    def poll_swaps(self) -> Sequence[SwapEvent]:
        return ()

    def evict_adapter(self, version: str) -> None:
        del self._adapters.weights[version]
        self._reads.forget(version)

    @property
    def why_not_merged(self) -> str | None:
        return self._decoder.why_not_merged

    def merge_bytes(self, spec: AdapterSpec) -> int | None:
        if self.why_not_merged is not None:
            return None
        return touched_bytes(spec, self._decoder.config.shape, self._dtype.itemsize)

    def merge_adapter(self, version: str, place: int | None) -> None:
        assert place is None, "there is no arena on a CPU"
        self._merged = None  # first: there is memory for one
        self._merged = version, self._decoder.merge(self._adapters.weights[version])

    def drop_merged(self) -> None:
        self._merged = None

    @property
    def read_counts(self) -> ReadCounts:
        return self._reads.counts

    @property
    def num_pending_loads(self) -> int:
        return self._adapters.num_pending

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        return self._adapters.poll(timeout_s)

    def overdue_adapters(self, deadline_s: float) -> Sequence[str]:
        return self._adapters.overdue(deadline_s)

    def expect(self, spec: AdapterSpec) -> None:
        """Do nothing: nothing is compiled or captured for a kind of adapter here."""

    @property
    def num_required(self) -> int:
        return 0

    def prepare(self) -> bool:
        return False

    def check_integrity(self, request_ids: Set[str], adapters: Set[str]) -> None:
        assert self._states.keys() == request_ids
        assert self._adapters.weights.keys() == adapters
        self._builder.tables.check_integrity(request_ids)

    def close(self) -> None:
        self._adapters.close()
        if self._threads is not None:
            self._threads.close()

    def launch(self, plan: StepPlan) -> LandedFlight:
        if self._threads is None:
            return self._run(plan)
        with self._threads.step(plan):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> LandedFlight:
        wanting = {c.request_id for c in plan.chunks if wants_prompt_scores(self._states[c.request_id], c)}
        chunks = [self._known(chunk) for chunk in plan.chunks]
        merged = self._merged_linears(plan)
        adapters = self._adapters.weights if merged is None else None
        built = self._builder.build(chunks, adapters, all_rows_of=wanting)
        states_LH = self._decoder.forward(built.batch, self._caches, merged)
        result = StepResult()
        for chunk in plan.chunks:
            if chunk.request_id in wanting:
                result.prompt_logprobs[chunk.request_id] = score_prompt(
                    self._decoder,
                    self._states[chunk.request_id],
                    chunk,
                    states_LH[built.rows_of[chunk.request_id]],
                )
        self._sample(plan, built, states_LH, result)
        return LandedFlight(result=result, runs_ahead=self._runs_ahead)

    def _merged_linears(self, plan: StepPlan) -> Linears | None:
        if plan.merged is None:
            return None
        assert self._merged is not None, "nothing is merged"
        version, linears = self._merged
        assert plan.merged == version, f"{version} is merged, not {plan.merged}"
        return linears

    def _known(self, chunk: Chunk) -> Chunk:
        """Return the chunk with its token filled in, where the step before sampled it and did not report it
        yet."""
        if not chunk.follows:
            return chunk
        # A request whose last logits were not finite fails when that is reported; its row must not fail
        # others.
        last_token = self._states[chunk.request_id].last_token
        return chunk._replace(token_ids=[last_token or 0])

    def _sample(self, plan: StepPlan, built: BuiltBatch, states_LH: torch.Tensor, result: StepResult) -> None:
        if not built.sampling:
            return
        request_ids = list(built.sampling)
        rows = list(built.sampling.values())
        selected_LH = states_LH if len(rows) == states_LH.shape[0] else states_LH[rows]
        logits_LV = self._decoder.logits(selected_LH)
        states = [self._states[request_id] for request_id in request_ids]
        for request_id, state, chosen in zip(request_ids, states, sample(logits_LV, states), strict=True):
            if chosen.token_id is None:
                result.failures[request_id] = chosen.error or not_finite(plan, request_id, self._dtype)
                if chosen.error is not None and state.grammar is not None:
                    result.failed_params[request_id] = state.grammar.param
                continue
            state.accept(chosen.token_id)
            result.tokens[request_id] = chosen.token_id
            if chosen.logprob is not None:
                result.logprobs[request_id] = chosen.logprob
