"""Measure the cost of waiting requests for running ones, and for cancelling one of them.

    python -m benchmarks.waiting_queue

Writes results/waiting_queue.json. Runs the scheduler alone, in-process: 256 requests decode, and many others
wait for adapters that never arrive. The results are ratios within one run, each the median of rounds in which
both sides take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.scheduler import Scheduler

RESULTS: Final = Path(__file__).parent / "results"
NUM_RUNNING: Final = 256
NUM_TOKENS: Final = 16
PAGE_BYTES: Final = 1 << 16
STEP_WAITING: Final = (0, 10, 100, 1_000, 10_000)
CANCEL_WAITING: Final = (100, 10_000)
"""Numbers of waiting requests, in each of the cases."""
ROUNDS: Final = 30
STEPS_A_ROUND: Final = 5
CANCEL_ROUNDS: Final = 5


def crowd(num_waiting: int) -> Scheduler:
    """Return a scheduler with running requests, and others that wait for an adapter each. Two of these
    adapters are being read forever."""
    arena = Arena(num_pages=4096, page_bytes=PAGE_BYTES, block_size=16, host_bytes=1 << 30)
    # One more than are running: admission is tried in every step.
    scheduler = Scheduler(SchedulerConfig(max_model_len=4096, max_running=NUM_RUNNING + 1), arena)
    for number in range(NUM_RUNNING):
        ask(scheduler, f"running-{number}", None)
    while scheduler.num_waiting > 0:
        step(scheduler)
    for number in range(num_waiting):
        scheduler.adapters.add(f"adapter-{number}", PAGE_BYTES)
        ask(scheduler, waiting_id(number), f"adapter-{number}")
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (NUM_RUNNING, num_waiting)
    return scheduler


def waiting_id(number: int) -> str:
    return f"waiting-{number}"


def ask(scheduler: Scheduler, request_id: str, adapter: str | None) -> None:
    scheduler.add(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(range(NUM_TOKENS)),
            params=SamplingParams(max_tokens=4000, ignore_eos=True),
            adapter=adapter,
        )
    )


def step(scheduler: Scheduler) -> float:
    """Schedule and update a step. Returns the seconds of scheduling."""
    started_s = time.perf_counter()
    plan = scheduler.schedule()
    took_s = time.perf_counter() - started_s
    scheduler.update(plan, {chunk.request_id: 7 for chunk in plan.chunks if chunk.samples})
    return took_s


def steps() -> dict[str, Any]:
    """Return the time to schedule a step, by number of waiting requests."""
    schedulers = {count: crowd(count) for count in STEP_WAITING}
    took_s: dict[int, list[float]] = {count: [] for count in STEP_WAITING}
    for _ in range(ROUNDS):
        for count, scheduler in schedulers.items():
            took_s[count].append(statistics.median(step(scheduler) for _ in range(STEPS_A_ROUND)))
    few, many = took_s[10], took_s[max(STEP_WAITING)]
    return {
        "schedule_ms": {
            str(count): round(statistics.median(each) * 1e3, 3) for count, each in took_s.items()
        },
        "ratio": round(statistics.median(b / a for a, b in zip(few, many, strict=True)), 3),
    }


def cancels() -> dict[str, Any]:
    """Return the time to cancel a request, the last of the queue first, by the initial number of waiting
    ones."""
    took_us: dict[int, list[float]] = {count: [] for count in CANCEL_WAITING}
    for _ in range(CANCEL_ROUNDS):
        for count in CANCEL_WAITING:
            scheduler = crowd(count)
            started_s = time.perf_counter()
            for number in reversed(range(count)):
                scheduler.cancel(waiting_id(number))
            took_us[count].append((time.perf_counter() - started_s) / count * 1e6)
            assert scheduler.num_waiting == 0
    few, many = (took_us[count] for count in CANCEL_WAITING)
    return {
        "cancel_us": {str(count): round(statistics.median(each), 2) for count, each in took_us.items()},
        "ratio": round(statistics.median(b / a for a, b in zip(few, many, strict=True)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "waiting_queue.json")
    args = parser.parse_args()
    result = environment(("loraplex",)) | {
        "sources": fingerprints("waiting_queue.json"),
        "num_running": NUM_RUNNING,
        "steps": steps(),
        "cancels": cancels(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
