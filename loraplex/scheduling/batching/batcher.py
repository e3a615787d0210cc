"""Applies a batching policy to the scheduler's requests, and keeps count of what it decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from operator import attrgetter
from typing import Any

from loraplex.core.batching import Batching
from loraplex.core.clock import Clock
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.batching.auto import AutoBatching
from loraplex.scheduling.batching.credits import Credits
from loraplex.scheduling.batching.dynamic import DynamicBatching
from loraplex.scheduling.batching.grouped import EndPace
from loraplex.scheduling.batching.merged_only import MergedOnly
from loraplex.scheduling.batching.policy import ALL, BatchingPolicy, StepBatch, View
from loraplex.scheduling.batching.thresholds import AdaptiveThresholds
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.fair_queue import FairGroupedQueue, FairQueue
from loraplex.scheduling.fair_share import FairShare
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.merged_weights import MergedWeights
from loraplex.scheduling.plan import Chunk
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.request_table import RequestTable
from loraplex.scheduling.step_features import decode_features, step_features
from loraplex.scheduling.waiting_queue import WaitingQueue

_turn = attrgetter("turn")


class Batcher:
    """The batches of one scheduler. `merged`: the adapter that is merged into a second set of weights, if the
    policy `merges`. `batch`: the requests that the step being decided may have. `pauses`: whether running
    requests may be left out of a step; `displaces`: also for an older request that waits. `now_s`: sum of the
    predicted seconds of all steps so far; 0 with a policy that does not need it."""

    def __init__(self, config: SchedulerConfig, memory: Memory, costs: DriftWatch | None) -> None:
        assert costs is not None or not config.batching.needs_costs, f"{config.batching} decides by costs"
        self._config = config
        self._memory = memory
        self._costs = costs
        self.merged = MergedWeights(memory)
        self._policy = _policy_of(config)
        self.pauses = self._policy is not None
        self.merges = config.batching.merges
        self.displaces = self._policy is not None and self._policy.displaces
        self.now_s = 0.0
        self._keeps_time = config.batching.needs_costs
        self.batch: StepBatch = ALL  # of the next step
        self._is_chosen = False  # by the policy
        self._num_left_out = 0
        self._merged_before: str | None = None
        self._num_switches = 0
        self._num_merged_steps = 0
        self._num_pauses = 0
        self._num_adapters = 0

    def make_queue(self, fair: FairShare, clock: Clock) -> WaitingQueue:
        """Return the queue that the policy admits requests from. `fair`: decides between tenants."""
        if self._config.batching.groups:
            return FairGroupedQueue(fair, clock, self._config.max_delay, self._memory.table.num_bytes)
        return FairQueue(fair, clock)

    def begin(self) -> None:
        """Begin to decide a step: what the last one ran on decides nothing."""
        self.batch = ALL

    def choose(
        self,
        running: Sequence[RequestState],
        ready: Iterable[RequestState],
        known: RequestTable,
    ) -> list[RequestState]:
        """Choose the batch of the next step, and return the running requests that it has. `ready`: waiting
        requests that could be admitted, in order. `known`: all requests in the engine."""
        if self._policy is None:
            return list(running)
        requests = [*running, *ready]
        if self.displaces:
            requests.sort(key=_turn)
        batch = self._policy.choose(self._view(requests, known, any_waits=len(known) > len(running)))
        if batch.merged is not None and not self.merged.hold(batch.merged):
            batch = ALL
        self._is_chosen = True
        return self._take(batch, running, requests)

    def choose_all(self, running: Sequence[RequestState]) -> list[RequestState]:
        """Choose a batch of all running requests instead: those that the policy chose could not run."""
        self._is_chosen = False
        return self._take(ALL, running, running)

    def _take(
        self, batch: StepBatch, running: Sequence[RequestState], requests: Sequence[RequestState]
    ) -> list[RequestState]:
        """Take a batch for the next step, and return the running requests that it has. `requests`: what it
        was chosen from."""
        self.batch = batch
        chosen = set(batch.select(requests, self._config.max_running))
        active = [each for each in running if each in chosen]
        self._num_left_out = len(running) - len(active)
        return active

    def step_decided(self, chunks: Sequence[Chunk], versions: Set[str | None]) -> None:
        """Record the step that was decided. `versions`: the adapters of its chunks, with None for the base
        model."""
        if self._policy is not None:
            self._count()
            if self._is_chosen:
                self._policy.ran(self.batch)
        is_merged = self.batch.merged is not None
        self._num_adapters += 0 if is_merged else len(versions) - (None in versions)
        if self._keeps_time:
            merge_s = self._model.merge_s(self.merged.bytes_to_write)
            self.pass_time(
                merge_s + self._step_s(step_features(chunks, self._memory.table.known_bytes), is_merged)
            )

    def _count(self) -> None:
        merged = self.batch.merged
        self._num_switches += merged != self._merged_before
        self._num_merged_steps += merged is not None
        self._num_pauses += self._num_left_out
        self._merged_before = merged

    def pass_time(self, seconds: float) -> None:
        """Record predicted seconds of steps."""
        self.now_s += seconds

    def forget(self, version: str) -> None:
        """Drop what is recorded of a version that was removed."""
        self.merged.forget(version)
        if self._policy is not None:
            self._policy.forget(version)

    def end_pace(self, running: Sequence[RequestState]) -> EndPace:
        """Predict when running requests end, if each has as many tokens as it may have."""
        if not running:
            return EndPace(0.0, 0.0)
        lefts = [each.num_left(self._config.max_model_len) for each in running]
        step_s = self._iteration_s(running, False)
        return EndPace(min(lefts) * step_s, len(lefts) ** 2 / (sum(lefts) * step_s))

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that are about batching."""
        balances = self._policy.credits.balances if isinstance(self._policy, DynamicBatching) else {}
        return {
            "is_merged": int(self.merged.version is not None),
            "num_switches": self._num_switches,
            "num_merges": self.merged.num_merges,
            "num_merged_steps": self._num_merged_steps,
            "num_pauses": self._num_pauses,
            "num_step_adapters": self._num_adapters,
            "owed_credit_s": sum(balance for balance in balances.values() if balance > 0),
        }

    def check_integrity(self) -> None:
        """Assert that there is memory for what is merged, and that no credit was made or lost."""
        self.merged.check_integrity()
        if isinstance(self._policy, DynamicBatching):
            self._policy.credits.check_integrity()

    def _view(self, requests: Sequence[RequestState], known: RequestTable, *, any_waits: bool) -> View:
        return View(
            requests=requests,
            any_waits=any_waits,
            max_running=self._config.max_running,
            on_version=known.on_version,
            num_on_version=known.num_on_version,
            merged=self.merged.version,
            can_merge=self.merged.can_hold,
            merge_s=self._merge_s,
            iteration_s=self._iteration_s,
            now_s=self.now_s,
        )

    def _merge_s(self, version: str) -> float:
        return self._model.merge_s(self.merged.bytes_of(version))

    def _iteration_s(self, requests: Sequence[RequestState], is_merged: bool) -> float:
        """Return the predicted seconds of a step in which all of these requests decode. Prompts have to be
        computed once, in whatever order, so that they decide nothing."""
        return self._step_s(decode_features(requests, self._memory.table.known_bytes), is_merged)

    def _step_s(self, features: StepFeatures, is_merged: bool) -> float:
        return self._model.step_s(features.on_merged_weights() if is_merged else features)

    @property
    def _model(self) -> CostModel:
        assert self._costs is not None
        return self._costs.model


def _policy_of(config: SchedulerConfig) -> BatchingPolicy | None:
    """Return the policy that chooses the batch of each step; None if every running request is in it."""
    match config.batching:
        case Batching.MERGED:
            return MergedOnly()
        case Batching.DYNAMIC:
            return DynamicBatching(AdaptiveThresholds(config.tuning), Credits(config.credits))
        case Batching.AUTO:
            return AutoBatching(config.max_delay)
        case _:
            return None
