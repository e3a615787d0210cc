"""The engine: schedule, launch, land, update.

Where the executor allows it, the next step is decided and launched while the last one is in flight, so that
the device never waits for Python.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Final, NamedTuple

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.batching import Batching
from loraplex.core.clock import MonotonicClock
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import InvalidRequestError, ModelError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason, TokenLogprob
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.compilation import GrammarCompilation
from loraplex.engine.executor import Executor, Flight, LoadOrder, StepResult
from loraplex.engine.grammars import AnswerGrammar, Grammars
from loraplex.engine.phase_clock import PhaseClock
from loraplex.perf.cost_model import CostKind
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_LOAD_WAIT_S = 0.001
"""Seconds that a step without chunks waits for a load before it checks for new requests again."""
LOAD_DEADLINE_S: Final = 120.0
"""Seconds until a read counts as overdue: long enough for gigabytes from a slow disk."""
MAX_PAUSE_S: Final = 5.0
_OBSERVED_STEPS = 8
"""Number of steps between two comparisons of a step with its predicted cost."""


class _Launched(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    flight: Flight
    launched_s: float


class Engine:
    """`engine.interface.EngineCore` over any executor."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        memory: Memory,
        executor: Executor,
        costs: DriftWatch | None = None,
        request_costs: DriftWatch | None = None,
        grammars: Grammars | None = None,
        count_workers: Callable[[], int] | None = None,
        load_deadline_s: float = LOAD_DEADLINE_S,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """`costs`: predicted costs on this machine, corrected by measured ones. `request_costs`: by which
        tenants are charged and victims valued, if not by these. `grammars`: of structured output; None for an
        engine without a tokenizer, which refuses it. `count_workers`: returns how many CPU workers are ready
        now; None if their number does not change. `load_deadline_s`: requests fail if reading their adapter
        from disk takes longer. `max_pause_s`: with `ColdStart.ON_DEMAND`, the longest that a step waits for a
        load."""
        _check_batching(config.batching, executor)
        self.max_model_len = config.max_model_len
        self.step_work = config.work
        self._memory = memory
        self.cold_start = config.cold_start
        self.num_workers = config.num_workers
        self._table = memory.table
        self._swaps = memory.pool.host is not None
        self._scheduler = Scheduler(
            config, memory, costs, request_costs=request_costs, clock=MonotonicClock()
        )
        self._costs = costs
        self._count_workers = count_workers
        self._executor = executor
        self._compilation = GrammarCompilation(grammars)
        self._load_deadline_s = load_deadline_s
        self._max_pause_s = max_pause_s
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self._phases = PhaseClock()
        self._flights: deque[_Launched] = deque()
        self.landed: StepPlan | None = None
        """The plan of the step that landed last."""
        self._landed_device_s: float | None = None
        self._landed_s = 0.0
        self._num_steps = 0

    def step(self) -> Sequence[EngineOutput]:
        failed = self._begin_compiled()
        self._collect_loads(timeout_s=0.0)
        self._fail_overdue()
        if self._count_workers is not None:
            self._scheduler.adapters.set_num_workers(self._count_workers())
        plan = self._scheduler.schedule()
        if self._phases:
            self._phases.decided(plan)
        for request_id in plan.preempted:
            self._executor.preempt(request_id)
        if plan.drops_merged:
            self._executor.drop_merged()
        for version in plan.adapter_evictions:
            self._executor.evict_adapter(version)
        if plan.moves:
            self._executor.move(plan.moves)
        for read in plan.adapter_reads:
            self._executor.read_adapter(self._table.sources(read.version), read)
        if plan.adapter_loads:
            self._executor.load_adapters(
                [LoadOrder(self._table.sources(load.version), load) for load in plan.adapter_loads]
            )
        if plan.swap_outs or plan.swap_ins:
            self._executor.swap(plan.swap_outs, plan.swap_ins)
        if plan.waits_for:
            self._await_loads(plan.waits_for)
        if plan.merge is not None:
            self._executor.merge_adapter(plan.merge, self._memory.merge_place)
        if plan.chunks:
            launched_s = time.perf_counter()
            self._flights.append(_Launched(plan, self._executor.launch(plan), launched_s))
            self._num_steps += 1
        elif not self._flights:
            self._collect_loads(timeout_s=_LOAD_WAIT_S)
            self._compilation.wait(timeout_s=_LOAD_WAIT_S)
        outputs = self._land(keep=1 if plan.chunks and self._flights[-1].flight.runs_ahead else 0)
        failures = [self._output(failure, StepResult()) for failure in self._scheduler.take_failures()]
        return [*failed, *outputs, *failures]

    def _begin_compiled(self) -> list[EngineOutput]:
        """Queue requests whose grammars are ready; return the outputs of those that have none."""
        failed = []
        for request, result in self._compilation.take():
            if isinstance(result, AnswerGrammar):
                self._begin(request, result)
                continue
            self._scheduler.give_up(request)
            self._phases.forget(request.request_id)
            failed.append(
                EngineOutput(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=str(result),
                    error_param=getattr(result, "param", None),
                )
            )
        return failed

    def _land(self, keep: int) -> list[EngineOutput]:
        """Land the steps in flight, except the last `keep`."""
        outputs: list[EngineOutput] = []
        while len(self._flights) > keep:
            plan, flight, launched_s = self._flights.popleft()
            result = flight.land()
            self.landed, self._landed_device_s = plan, result.device_s
            begun_s, self._landed_s = max(launched_s, self._landed_s), time.perf_counter()
            if self._num_steps % _OBSERVED_STEPS == 0:
                seconds = self.landed_step_s(self._landed_s - begun_s)
                self._scheduler.adapters.observe_step(plan, seconds)
            self._collect_prompt_logprobs(self._scheduler.live_chunks(plan), result)
            updates = self._scheduler.update(plan, result.tokens, result.failures)
            outputs += [self._output(update, result) for update in updates]
        return outputs

    def landed_step_s(self, host_s: float) -> float:
        """Return the seconds of the step that landed last: by its device's clock, or `host_s` without one.

        The device's time begins when the step before is done, or with the launch if that is later, and
        includes building the batch then; it ends when the sampled tokens are on the host, even if the host
        samples them. The host would notice that end only after the launch of the next step, which takes long
        if it is launched kernel by kernel.
        """
        return host_s if self._landed_device_s is None else self._landed_device_s

    def has_work(self) -> bool:
        """See EngineCore. An overdue read is no work until it has ended."""
        return (
            bool(self._flights or self._compilation)
            or self._scheduler.has_work()
            or self._executor.num_pending_loads > 0
        )

    def add_request(self, request: EngineRequest) -> None:
        if request.request_id in self._compilation:
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        self._scheduler.accept(request)
        if request.traceparent:
            self._phases.queued(request)
        if request.params.structured_output is None:
            self._begin(request, None)
            return
        try:
            self._compilation.begin(request)
        except InvalidRequestError:
            self._scheduler.give_up(request)
            self._phases.forget(request.request_id)
            raise

    def _begin(self, request: EngineRequest, grammar: AnswerGrammar | None) -> None:
        self._scheduler.queue(request)
        self._executor.begin(request, grammar)
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs[request.request_id] = [None]

    def cancel(self, request_id: str) -> None:
        self._phases.forget(request_id)
        compiling = self._compilation.cancel(request_id)
        if compiling is not None:
            self._scheduler.give_up(compiling)
            return
        self._scheduler.cancel(request_id)
        self._end(request_id)

    def add_adapter(self, spec: AdapterSpec) -> None:
        self._scheduler.adapters.add(spec.version, self._executor.adapter_bytes(spec), spec)
        if self._scheduler.batcher.merges:
            self._know_merged(spec)
        self._executor.expect(spec)

    def _know_merged(self, spec: AdapterSpec) -> None:
        """Let steps run on an adapter's merged weights, if there is memory for them."""
        num_bytes, budget_bytes = self._executor.merge_bytes(spec), self._table.serving.room.budget_bytes
        own_bytes = self._table.num_bytes(spec.version)  # it is merged from there
        if num_bytes is not None and num_bytes + own_bytes <= budget_bytes:
            self._scheduler.batcher.merged.know(spec.version, num_bytes)
        elif self._executor.why_not_merged is None:
            logger.warning(
                "adapter %s (version %s) runs unmerged: its merged weights do not fit the %.1f MiB of memory "
                "for adapters beside it; %s, or choose --batching fcfs",
                spec.path.name,
                spec.version[:12],
                budget_bytes / (1 << 20),
                self._memory.adapter_advice,
            )

    def merge_once(self, version: str) -> int | None:
        """Merge a version that requests run on, and give the memory back, for measurements. Return the bytes
        written; None where merging is not possible."""
        num_bytes = self._executor.merge_bytes(self._table.sources(version)[0])
        if num_bytes is None or not self._memory.take_merged(num_bytes):
            return None
        self._scheduler.follow_moves()
        moves = self._memory.take_moves()
        if moves:
            self._executor.move(moves)
        self._executor.merge_adapter(version, self._memory.merge_place)
        self._executor.drop_merged()
        self._memory.give_back_merged()
        return num_bytes

    def choose_cold_start(self, cold_start: ColdStart) -> None:
        """Choose the policy for adapters that are loaded from now on."""
        self.cold_start = cold_start
        self._scheduler.adapters.choose_cold_start(cold_start)

    @property
    def num_required(self) -> int:
        return self._executor.num_required

    def prepare(self) -> bool:
        if not self._flights and not self._scheduler.request_ids and self._scheduler.has_work():
            self.step()  # there are no requests: this only continues reading adapters
        return self._executor.prepare()

    def get_ready(self) -> None:
        """Prepare until `num_required` is 0, for the adapters known now."""
        while self.num_required > 0:
            self.prepare()

    def warm_up(self) -> None:
        """Prepare everything, for the adapters known now."""
        while self.prepare():
            pass

    def remove_adapter(self, version: str) -> None:
        self._scheduler.adapters.remove(version)

    def take_removed_adapters(self) -> Sequence[str]:
        for version in self._table.serving.take_evictions():
            self._executor.evict_adapter(version)
        return self._scheduler.take_removed_adapters()

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        self._scheduler.fair.set_policies(policies)

    def stage_adapter(self, version: str) -> None:
        """Read a version into host memory before any request asks for it, if there is room."""
        self._scheduler.adapters.stage_ahead(version)

    def stats(self) -> EngineStats:
        counts = self._executor.read_counts
        stats = self._scheduler.stats(self._num_steps)
        stats = replace(stats, num_waiting=stats.num_waiting + len(self._compilation))
        if self._costs is not None:
            step, copy = self._costs.lately(CostKind.STEP), self._costs.lately(CostKind.COPY)
            stats = replace(
                stats,
                predicted_step_s=step.predicted_s,
                measured_step_s=step.measured_s,
                predicted_copy_s=copy.predicted_s,
                measured_copy_s=copy.measured_s,
            )
        return replace(
            stats,
            adapter_file_reads=counts.num_file_reads,
            adapter_fetches=counts.num_fetches,
            adapter_bytes_fetched=counts.num_bytes_fetched,
            adapter_fetch_failures=counts.num_fetch_failures,
        )

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants, and that no state is left of ended requests. For tests, after
        `take_removed_adapters`."""
        self._scheduler.check_integrity()
        self._executor.check_integrity(self._scheduler.request_ids, self._table.serving.resident)
        assert self._prompt_logprobs.keys() <= self._scheduler.request_ids
        assert all(self._table.sources(adapter.version) for adapter in self._table.snapshot())

    def close(self) -> None:
        self._compilation.close()
        self._executor.close()

    def _collect_loads(self, timeout_s: float) -> set[str]:
        """Process the reads, loads and copies of KV blocks that ended, and return the versions of the
        former."""
        events = self._executor.poll_adapters(timeout_s)
        for swap in self._executor.poll_swaps() if self._swaps else ():
            self._scheduler.swap_ended(swap.copies, out=swap.out, error=swap.error)
        for event in events:
            if event.copied is not None:
                self._scheduler.adapters.observe_copy(*event.copied)
            if event.read:
                self._scheduler.adapter_read(event.version, event.error)
            elif event.error is None:
                self._scheduler.adapter_loaded(event.version)
            else:
                self._scheduler.adapter_failed(event.version, event.error)
        versions = {event.version for event in events}
        if versions and self._phases:
            self._phases.loaded(versions)
        return versions

    def _await_loads(self, versions: Set[str]) -> None:
        """Wait until these versions have been read or loaded, up to `max_pause_s`: a disk that does not
        answer must not stop every stream."""
        awaited, until_s = set(versions), time.monotonic() + self._max_pause_s
        while awaited and time.monotonic() < until_s:
            awaited -= self._collect_loads(timeout_s=_LOAD_WAIT_S)

    def _fail_overdue(self) -> None:
        """Fail requests whose adapter is overdue. If its load ends later, it serves later requests."""
        for version in self._executor.overdue_adapters(self._load_deadline_s):
            self._scheduler.adapter_overdue(
                version,
                f"the adapter is not available: version {version} has not been read from disk after "
                f"{self._load_deadline_s:g} s; check the disk that holds it, then try again",
            )

    def _collect_prompt_logprobs(self, chunks: Sequence[Chunk], result: StepResult) -> None:
        """Collect the scores of prompts, which take several steps if long. A preempted prompt is scored
        again: a chunk's scores replace all from its position on."""
        for chunk in chunks:
            scored = result.prompt_logprobs.get(chunk.request_id)
            known = self._prompt_logprobs.get(chunk.request_id)  # removed with the first token
            if scored is not None and known is not None:
                known[chunk.start + 1 :] = scored

    def _output(self, update: TokenUpdate, result: StepResult) -> EngineOutput:
        request_id = update.request_id
        prompt_logprobs = self._prompt_logprobs.pop(request_id, None)
        logprob = result.logprobs.get(request_id)
        if update.finish_reason is not None:
            self._end(request_id)
        return EngineOutput(
            request_id=request_id,
            token_ids=() if update.token_id is None else (update.token_id,),
            logprobs=() if logprob is None or update.token_id is None else (logprob,),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            num_cached_tokens=update.num_cached_tokens,
            adapter_hit=update.adapter_hit,
            finish_reason=update.finish_reason,
            stop_token_id=update.stop_token_id,
            error=update.error,
            error_param=update.error_param or result.failed_params.get(request_id),
            times=self._phases.take(request_id) if self._phases else None,
        )

    def _end(self, request_id: str) -> None:
        self._executor.end(request_id)
        self._prompt_logprobs.pop(request_id, None)


def _check_batching(batching: Batching, executor: Executor) -> None:
    """Raise ModelError if the policy needs merged weights, and there can be none."""
    if batching not in (Batching.MERGED, Batching.DYNAMIC):
        return
    reason = executor.why_not_merged
    if reason is not None:
        raise ModelError(f"--batching {batching} merges adapters: {reason}; choose fcfs, grouped or auto")
