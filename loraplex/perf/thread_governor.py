"""Decides how many threads the steps of a CPU engine run on.

All threads of a step meet at a barrier after each of its hundreds of kernels. If another program is busy
on one of their cores, every barrier waits for a time slice, and a step takes many times as long as it would
on fewer threads. The governor notices that from a step's CPU usage, tries fewer threads for a few
steps, and keeps what is faster. Later it tries more threads again, since other programs end.

    all threads ──suspicion──▶ trial of each lower level ──faster──▶ fewer threads
         ▲                             │ not faster                       │ now and then
         └───────── pause ◀────────────┘          ◀──not faster── trial of more threads

In a trial a level runs a few steps, each compared with steps of the same size on the level in use: as many
tokens, and as much context to attend to, since a step takes longer as contexts grow, whatever other programs
do. A trial ends as soon as it cannot win, and its cost determines how soon the next may start.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_MIN_CPU_SHARE: Final = 0.5
"""Least share of CPU time: threads that are not held up use nearly all of it, as they spin at barriers."""
_MAX_PREEMPTIONS_PER_S: Final = 20.0
"""Most preemptions per second of a process that has its cores to itself. A busy program on one of the
cores takes it about a hundred times a second."""
_WINDOW_STEPS: Final = 4
_HURRY_S: Final = 1.0
"""Seconds after which two steps, rather than a full window, are enough to suspect interference."""
_MIN_KNOWN_STEPS: Final = 2
_REMEMBERED_STEPS: Final = 8
_TRIAL_STEPS: Final = 3
_MAX_TRIAL_STEPS: Final = 6
"""Steps after which a level is given up if too few of them can be compared with the level in use."""
_FASTER_WITH_FEWER: Final = 0.8
_FASTER_WITH_MORE: Final = 0.9
_HOPELESS: Final = 1.5
"""Ratio of seconds to the level in use from which levels still further away are not tried."""
_FIRST_PAUSE_S: Final = 5.0
_MAX_PAUSE_S: Final = 60.0
_PAUSE_PER_COST: Final = 20.0
"""Trials take at most one part in this many of the time."""

_Size = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepUsage:
    """Resources of one step: `cpu_s` of all threads, and how often the system took a core from one of them.

    `work`: its computation in tokens without context; exceeds `num_tokens` by the cost of attending to
    their contexts.
    """

    num_tokens: int
    work: float
    wall_s: float
    cpu_s: float
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadChange:
    """A number of threads that was found to be faster, and by how much for steps of the same size."""

    old_threads: int
    new_threads: int
    old_step_s: float
    new_step_s: float


@dataclass(kw_only=True, slots=True)
class _Trial:
    """Levels left to try, the first of them running. `found`: seconds relative to the level in use."""

    levels: list[int]
    threshold: float
    ratios: list[float] = field(default_factory=list)
    num_steps: int = 0
    found: dict[int, float] = field(default_factory=dict)
    cost_s: float = 0.0


class ThreadGovernor:
    """Chooses `num_threads` for the next step; its usage must then be given to `observe`."""

    def __init__(self, max_threads: int) -> None:
        assert max_threads > 1, "with one thread there is nothing to decide"
        self.max_threads = max_threads
        self._levels = thread_levels(max_threads)
        self._chosen = max_threads
        self._recent: deque[StepUsage] = deque(maxlen=_WINDOW_STEPS)
        self._known = _known_steps()
        self._trial: _Trial | None = None
        self._quiet_until_s = float("-inf")
        self._num_failures = 0
        self._fewer_failed = False

    @property
    def num_threads(self) -> int:
        return self._chosen if self._trial is None else self._trial.levels[0]

    def observe(self, step: StepUsage, now_s: float) -> ThreadChange | None:
        """Record a step that ran on `num_threads`; return the change that it decided, if any."""
        if self._trial is not None:
            return self._observe_trial(self._trial, step, now_s)
        self._recent.append(step)
        self._known[_size(step)].append(step.wall_s)
        if now_s >= self._quiet_until_s:
            self._trial = self._begin_trial(step)
        return None

    def _begin_trial(self, step: StepUsage) -> _Trial | None:
        if len(self._known[_size(step)]) < _MIN_KNOWN_STEPS:
            return None  # too few steps to compare with
        below = [level for level in self._levels if level < self._chosen]
        above = [level for level in self._levels if level > self._chosen]
        # Between the ends both directions take turns: failures of one must not delay the other.
        if below and self._is_held_up() and not (above and self._fewer_failed):
            return _Trial(levels=below[::-1], threshold=_FASTER_WITH_FEWER)
        if above:
            return _Trial(levels=sorted({above[-1], above[0]}, reverse=True), threshold=_FASTER_WITH_MORE)
        return None

    def _is_held_up(self) -> bool:
        """Return whether recent steps got much less of the CPU than their threads needed."""
        wall_s = sum(step.wall_s for step in self._recent)
        num_steps = len(self._recent)
        if num_steps < _WINDOW_STEPS and not (num_steps >= _MIN_KNOWN_STEPS and wall_s >= _HURRY_S):
            return False
        cpu_share = sum(step.cpu_s for step in self._recent) / (wall_s * self._chosen)
        preemptions = sum(step.num_preemptions for step in self._recent)
        return cpu_share < _MIN_CPU_SHARE or preemptions > _MAX_PREEMPTIONS_PER_S * max(wall_s, 0.1)

    def _observe_trial(self, trial: _Trial, step: StepUsage, now_s: float) -> ThreadChange | None:
        trial.num_steps += 1
        known = self._known.get(_size(step), ())
        if len(known) >= _MIN_KNOWN_STEPS:
            expected_s = _mean(known)
            trial.ratios.append(step.wall_s / expected_s)
            trial.cost_s += max(step.wall_s - expected_s, 0.0)
        lost = sum(trial.ratios) >= trial.threshold * _TRIAL_STEPS
        if not lost and len(trial.ratios) < _TRIAL_STEPS and trial.num_steps < _MAX_TRIAL_STEPS:
            return None
        level = trial.levels.pop(0)
        if lost and _mean(trial.ratios) >= _HOPELESS and level < self._chosen:
            trial.levels.clear()
        if not lost and len(trial.ratios) >= _TRIAL_STEPS:
            trial.found[level] = _mean(trial.ratios)
        trial.ratios, trial.num_steps = [], 0
        return None if trial.levels else self._end_trial(trial, step, now_s)

    def _end_trial(self, trial: _Trial, step: StepUsage, now_s: float) -> ThreadChange | None:
        """Keep the fastest level, if any was faster than the one in use, and pause before the next trial."""
        self._trial = None
        self._recent.clear()
        self._num_failures = 0 if trial.found else self._num_failures + 1
        self._fewer_failed = not trial.found and trial.threshold == _FASTER_WITH_FEWER
        if not trial.found:
            self._pause(now_s, trial.cost_s)
            return None
        best = min(trial.found, key=lambda level: trial.found[level])
        old_step_s = _mean(self._known.get(_size(step)) or [step.wall_s])
        change = ThreadChange(
            old_threads=self._chosen,
            new_threads=best,
            old_step_s=old_step_s,
            new_step_s=old_step_s * trial.found[best],
        )
        # Trying the old number again costs at least one step on it.
        self._pause(now_s, max(trial.cost_s, change.old_step_s - change.new_step_s))
        self._chosen, self._known = best, _known_steps()
        return change

    def _pause(self, now_s: float, cost_s: float) -> None:
        backoff_s = min(_FIRST_PAUSE_S * 2 ** min(self._num_failures, 10), _MAX_PAUSE_S)
        self._quiet_until_s = now_s + max(backoff_s, _PAUSE_PER_COST * cost_s)


def thread_levels(max_threads: int) -> tuple[int, ...]:
    """Return the numbers of threads worth trying: all, all but one, three quarters, and halves down to
    one."""
    halves = itertools.takewhile(lambda level: level >= 1, (max_threads >> shift for shift in range(64)))
    return tuple(sorted({*halves, max_threads - 1, max_threads * 3 // 4, 1}))


def _known_steps() -> defaultdict[_Size, deque[float]]:
    return defaultdict(lambda: deque(maxlen=_REMEMBERED_STEPS))


def _size(step: StepUsage) -> _Size:
    """Return a class of similar steps. Both numbers count: a token behind a long context is as much work as
    several without, but reads the model's weights only once."""
    return _magnitude(step.num_tokens), _magnitude(step.work)


def _magnitude(value: float) -> tuple[int, int]:
    """Return a class of numbers that differ by at most a quarter: four classes per power of two."""
    mantissa, exponent = math.frexp(value)
    return exponent, int(mantissa * 8)


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values)
