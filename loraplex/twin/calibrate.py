"""Fits a profile so that simulated runs match recorded ones.

Recorded runs do not contain the time of a step, only totals: tokens per second, the mean gap between two
tokens, the mean time to the first. So this searches for the coefficients with which the simulation has the
same totals: damped least squares on the logarithms of simulated over measured, in which outliers count for
less than their square. The gradient is measured by moving one coefficient at a time, and updated after each
step from its result (Broyden), because each evaluation costs a simulation of every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from os import cpu_count
from typing import Final

import numpy as np

from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.perf.serving_costs import AdapterLoadCost, BatchDecode, Prefill, SchedulerCost, SlotMemory
from loraplex.perf.slot_profile import PARTS, ClientLimits, SlotCosts, SlotProfile
from loraplex.twin.first_guess import first_guess
from loraplex.twin.predict_run import Predicted, predict_run
from loraplex.twin.recorded_runs import KvSample, Measured, RunSetup
from loraplex.twin.run_workload import WorkloadBook
from loraplex.twin.scores import smape
from loraplex.twin.slot_state import Floats

Run = tuple[RunSetup, Measured]
Progress = Callable[[str, float], None]
"""Called with the current phase, and the fraction done of the most work there may be."""

_NUM_RUNS: Final = 32
"""Runs simulated repeatedly; more change little and take longer."""
_NUM_HELD_OUT: Final = 40
_LEAST_RUNS: Final = 6
_WEIGHTS: Final = np.array([2.0, 1.0, 0.25])
"""Weights of output throughput, gap and first token: errors of 2, 4 and 16 percent count the same."""
_OUTLIER: Final = 0.3
"""Weighted errors beyond this count linearly, not by their square."""
_SLOPE_STEP: Final = 0.1
_MAX_MOVE: Final = 0.5
_PULL: Final = 0.02
"""Strength of the pull towards the start, for coefficients that the runs do not determine."""
_MAX_ROUNDS: Final = 3
_LEAST_GAIN: Final = 0.15
"""Relative gain of a round that is followed by another. Each round begins with measuring the gradient."""
_STEPS_PER_ROUND: Final = 8
_LEFT_ALONE: Final = frozenset(
    {
        "decode.request_rank_s",
        "prefill.token_rank_s",
        "load.slot_rank_s",
        "load.disk_rank_s",
        "scheduler.request_s",
    }
)
"""Coefficients that runs determine too weakly to be worth their simulations; they stay as first guessed."""
_MAX_SPARE: Final = 0.5

START: Final = SlotCosts(
    decode=BatchDecode(
        base_s=12.5e-3,
        request_s=20e-6,
        adapter_s=300e-6,
        adapter_rank_s=5e-6,
        kv_token_s=35e-9,
        slot_s=30e-6,
        slot_rank_s=30e-9,
        request_rank_s=0.3e-6,
        request_adapter_s=0.2e-6,
        request_slot_s=0.2e-6,
    ),
    prefill=Prefill(base_s=2.5e-3, token_s=45e-6, adapter_s=300e-6, token_rank_s=0.1e-6, slot_s=30e-6),
    load=AdapterLoadCost(slot_s=2e-3, slot_rank_s=10e-6, disk_s=0.3, disk_rank_s=3.5e-3),
    scheduler=SchedulerCost(request_s=1e-9, waiting_s=0.3e-6),
)
"""Start of the search: the order of magnitude of a 7B model on a GPU of its time."""
START_CLIENT: Final = ClientLimits(latency_s=25e-3, max_open=22_000)
START_MAX_RUNNING: Final = 950
"""Runs with room for more requests never had more running, whatever their limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Logarithms of coefficients over the start's, and the errors of the runs simulated with them."""

    moves_K: Floats
    errors_N3: Floats

    @property
    def loss(self) -> float:
        size = np.abs(self.errors_N3)
        beyond = _OUTLIER * (size - _OUTLIER / 2)
        return float(
            np.where(size < _OUTLIER, size**2 / 2, beyond).sum() + _PULL * (self.moves_K**2).sum() / 2
        )


def fit_memory(samples: Sequence[KvSample], model: str, max_running: int) -> SlotMemory:
    """Fit the memory to what engines reported; runs of the model must have several numbers of slots."""
    found = [
        (each.num_slots, each.max_rank, each.kv_tokens)
        for each in samples
        if each.model == model and each.max_running == max_running
    ]
    if len({(slots, rank) for slots, rank, _ in found}) < 3:
        raise UserError(f"no three runs of {model} with different slots and kv_cache_tokens to fit memory to")
    return SlotMemory.fit(found)


def calibrate(
    runs: Sequence[Run],
    book: WorkloadBook,
    memory: SlotMemory,
    *,
    hardware: str,
    progress: Progress = lambda phase, done: None,
) -> SlotProfile:
    """Return a profile of the one model in these runs."""
    model = runs[0][0].model if runs else "the model"
    if len(runs) < _LEAST_RUNS:
        raise UserError(
            f"{len(runs)} {plural('run', len(runs))} of {model} to fit to; give at least {_LEAST_RUNS}"
        )
    chosen, held_out = _spread(runs, _NUM_RUNS)
    start = SlotProfile(
        model=model,
        hardware=hardware,
        costs=first_guess(runs, START),
        memory=memory,
        client=START_CLIENT,
        max_running=START_MAX_RUNNING,
    )
    search = _Search(start, chosen, book, progress)
    best = search.run()
    profile = search.profile(best.moves_K)
    others = _spread(held_out, _NUM_HELD_OUT)[0]
    return replace(profile, quality=_quality(profile, book, chosen, others))


def predict_all(
    profile: SlotProfile,
    book: WorkloadBook,
    setups: Sequence[RunSetup],
    on_done: Callable[[], None] = lambda: None,
) -> list[Predicted | None]:
    """Return predictions in the order of `setups`. Compiled code releases the GIL, so threads are enough.
    `on_done` is called in this thread after each."""
    found = []
    with ThreadPoolExecutor(max_workers=cpu_count()) as pool:
        for each in pool.map(lambda setup: predict_run(profile, book, setup), setups):
            found.append(each)
            on_done()
    return found


class _Search:
    def __init__(
        self, start: SlotProfile, runs: Sequence[Run], book: WorkloadBook, progress: Progress
    ) -> None:
        self._start = start
        self._progress = progress
        self._phase = "first guesses"
        self._num_trials = 0
        self._setups = [setup for setup, _ in runs]
        self._measured_N3 = np.array([[m.output_tok_s, m.itl_s, m.ttft_s] for _, m in runs])
        self._book = book
        self._requests = [book.requests(setup) for setup in self._setups]
        limits = (start.client.latency_s, start.client.max_open, start.max_running, start.spare_share)
        self._values_K = np.array([*start.costs.coefficients, *limits])
        self._names = [f"{part}.{name}" for part, kind in PARTS.items() for name in kind.UNITS]
        self._moving = [k for k in range(len(self._values_K)) if k >= len(self._names) or not self._stays(k)]

    def _stays(self, index: int) -> bool:
        return self._names[index] in _LEFT_ALONE

    def profile(self, moves_K: Floats) -> SlotProfile:
        *costs, latency_s, max_open, max_running, spare_share = self._values_K * np.exp(moves_K)
        return replace(
            self._start,
            costs=SlotCosts.of_coefficients(costs),
            client=ClientLimits(latency_s=float(latency_s), max_open=max(int(max_open), 1)),
            max_running=max(int(max_running), 1),
            spare_share=min(float(spare_share), _MAX_SPARE),
        )

    def run(self) -> _Trial:
        best = min((self._trial(moves_K) for moves_K in self._starts()), key=lambda trial: trial.loss)
        for number in range(_MAX_ROUNDS):
            self._phase = f"round {number + 1} of at most {_MAX_ROUNDS}"
            slope_MK = self._slope(best)
            before, best = best, self._descend(best, slope_MK)
            if best.loss > (1 - _LEAST_GAIN) * before.loss:
                break
        return best

    def _starts(self) -> list[Floats]:
        """Return several starting points. The cost of loads decides whether a queue behind them drains again,
        and the spare memory at admission whether requests are preempted: no gradient leads from one side to
        the other."""
        starts = []
        for disk, spare in product((1.0, 0.3), (1.0, 10.0)):
            moves_K = np.zeros(len(self._values_K))
            moves_K[self._names.index("load.disk_s")] = np.log(disk)
            moves_K[-1] = np.log(spare)
            starts.append(moves_K)
        return starts

    @property
    def _most_trials(self) -> int:
        return len(self._starts()) + _MAX_ROUNDS * (len(self._moving) + _STEPS_PER_ROUND)

    def _descend(self, best: _Trial, slope_MK: Floats) -> _Trial:
        damping = 1.0
        for _ in range(_STEPS_PER_ROUND):
            move_K = self._move(best, slope_MK, damping)
            trial = self._trial(best.moves_K + move_K)
            change_M = (trial.errors_N3 - best.errors_N3).ravel()
            slope_MK = slope_MK + np.outer(change_M - slope_MK @ move_K, move_K) / (move_K @ move_K)
            if trial.loss < best.loss:
                best, damping = trial, max(damping * 0.4, 1e-3)
            else:
                damping *= 5
        return best

    def _move(self, at: _Trial, slope_MK: Floats, damping: float) -> Floats:
        errors_M = at.errors_N3.ravel()
        weights_M = np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors_M), 1e-12))
        weighted_KM = slope_MK.T * weights_M
        curve_KK = weighted_KM @ slope_MK + 0.05 * damping * np.eye(len(at.moves_K))
        downhill_K = weighted_KM @ errors_M + _PULL * at.moves_K
        return np.clip(-np.linalg.solve(curve_KK, downhill_K), -_MAX_MOVE, _MAX_MOVE)

    def _slope(self, at: _Trial) -> Floats:
        slope_MK = np.zeros((at.errors_N3.size, len(at.moves_K)))
        for index in self._moving:
            moved_K = at.moves_K.copy()
            moved_K[index] += _SLOPE_STEP
            slope_MK[:, index] = (self._trial(moved_K).errors_N3 - at.errors_N3).ravel() / _SLOPE_STEP
        return slope_MK

    def _trial(self, moves_K: Floats) -> _Trial:
        profile, inputs = self.profile(moves_K), zip(self._setups, self._requests, strict=True)
        with ThreadPoolExecutor(max_workers=cpu_count()) as pool:
            predicted = list(pool.map(lambda run: predict_run(profile, self._book, *run), inputs))
        self._num_trials += 1
        self._progress(self._phase, self._num_trials / self._most_trials)
        found_N3 = np.array(
            [
                measured if each is None else [each.output_tok_s, each.itl_s, each.ttft_s]
                for each, measured in zip(predicted, self._measured_N3, strict=True)
            ]
        )
        ratio_N3 = np.maximum(found_N3, 1e-9) / np.maximum(self._measured_N3, 1e-9)
        return _Trial(moves_K=moves_K, errors_N3=np.log(ratio_N3) * _WEIGHTS)


def _spread(runs: Sequence[Run], count: int) -> tuple[list[Run], list[Run]]:
    """Return `count` runs spread from the idlest to the busiest, and the rest."""
    ordered = sorted(runs, key=lambda run: (run[1].output_tok_s, run[0].key))
    taken = {int(place) for place in np.linspace(0, len(ordered) - 1, min(count, len(ordered)))}
    chosen = [run for place, run in enumerate(ordered) if place in taken]
    return chosen, [run for place, run in enumerate(ordered) if place not in taken]


def _quality(
    profile: SlotProfile, book: WorkloadBook, fitted: Sequence[Run], held_out: Sequence[Run]
) -> dict[str, float]:
    """Return SMAPE in percent and R2 of the fitted runs and of held-out ones."""
    quality: dict[str, float] = {}
    for name, runs in (("fitted", fitted), ("held_out", held_out)):
        predicted = predict_all(profile, book, [setup for setup, _ in runs])
        pairs = [(p, m) for p, (_, m) in zip(predicted, runs, strict=True) if p is not None]
        quality[f"num_{name}"] = len(pairs)
        if not pairs:
            continue
        for measure in ("output_tok_s", "itl_s", "ttft_s"):
            values = [(getattr(p, measure), getattr(m, measure)) for p, m in pairs]
            quality[f"{measure}_{name}_smape"] = smape(values)
            quality[f"{measure}_{name}_r_squared"] = _r_squared(values)
    return quality


def _r_squared(pairs: Sequence[tuple[float, float]]) -> float:
    predicted_N, measured_N = np.array(pairs).T
    spread = float(((measured_N - measured_N.mean()) ** 2).sum())
    return max(1 - float(((predicted_N - measured_N) ** 2).sum()) / spread, 0.0) if spread > 0 else 0.0
