"""The process that replays the requests of the last minutes on the twin of the engine.

Run as `python -m loraplex.server.shadow_replay`: it reads a `Window` as JSON from each line of stdin and
writes a `Replayed` to a line of stdout, until stdin ends. It has the lowest priority, so it delays nothing
that serves.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from loraplex.perf.cost_model import CostModel
from loraplex.perf.profile_json import profile_from_json
from loraplex.server.shadow_messages import Figures, Replayed, SeenRequest, Window
from loraplex.twin.outcome import RequestOutcome
from loraplex.twin.paused_collector import paused_collector
from loraplex.twin.replay import OwnEngines, ReplayOptions
from loraplex.twin.simulator import Simulator
from loraplex.workload.jsonl import WorkloadRequest


def replay(window: Window) -> Replayed:
    """Replay the requests of a window, each on the replica that it was sent to."""
    begun_s = time.process_time()
    measured = figures(window.requests, window.since_s, window.until_s)
    predicted, problem = None, None
    try:
        with paused_collector():
            served = [again for replica in _by_replica(window) for again in _on_twin(replica, window)]
        predicted = figures(served, window.since_s, window.until_s)
    except Exception as error:  # the server must learn of any failure, and the next window may succeed
        problem = f"{type(error).__name__}: {error}"
    return Replayed(
        num_requests=sum(each.sent_s >= window.since_s for each in window.requests),
        measured=measured,
        predicted=predicted,
        seconds=time.process_time() - begun_s,
        error=problem,
    )


def figures(requests: Iterable[SeenRequest], since_s: float, until_s: float) -> Figures:
    """Return the figures of a window. Tokens after the first are taken to be evenly spaced; TTFT and ITL
    count requests sent within the window."""
    num_tokens, waits_s, gaps_s, num_gaps = 0.0, [], 0.0, 0
    for each in requests:
        if each.first_s is None or each.last_s is None or each.first_s > until_s:
            continue
        num_tokens += since_s <= each.first_s
        spread_s, num_more = each.last_s - each.first_s, each.num_output - 1
        within_s = min(each.last_s, until_s) - max(each.first_s, since_s)
        if num_more > 0 and within_s >= 0:
            num_tokens += num_more * (within_s / spread_s if spread_s > 0 else 1.0)
        if each.sent_s >= since_s:
            waits_s.append(each.first_s - each.sent_s)
            gaps_s += spread_s
            num_gaps += max(num_more, 0)
    return Figures(
        tokens_per_s=num_tokens / (until_s - since_s),
        ttft_s=sum(waits_s) / len(waits_s) if waits_s else None,
        itl_s=gaps_s / num_gaps if num_gaps else None,
    )


def _by_replica(window: Window) -> list[list[SeenRequest]]:
    found: dict[int, list[SeenRequest]] = {}
    for each in window.requests:
        found.setdefault(each.replica, []).append(each)
    return list(found.values())


def _on_twin(requests: list[SeenRequest], window: Window) -> list[SeenRequest]:
    """Return the requests of one replica as its twin serves them."""
    profile = profile_from_json(window.costs)
    begin_s = requests[0].sent_s
    simulator = _twin(profile, requests, window)
    outcomes: list[tuple[SeenRequest, RequestOutcome, str]] = []
    for each in requests:
        asked = WorkloadRequest(
            arrival_s=each.sent_s - begin_s,
            adapter=each.adapter,
            prompt_tokens=max(each.prompt_tokens, 1),
            output_tokens=max(each.num_output, 1),
        )
        simulator.advance(asked.arrival_s)
        request_id = str(simulator.num_offered)
        outcomes.append((each, simulator.offer(asked), request_id))
    simulator.advance(window.until_s - begin_s)
    return [
        _served(each, outcome, simulator.num_output(request_id), begin_s, simulator.now_s)
        for each, outcome, request_id in outcomes
    ]


def _served(
    request: SeenRequest, outcome: RequestOutcome, num_so_far: int | None, begin_s: float, now_s: float
) -> SeenRequest:
    """Return a request with the twin's times. `num_so_far`: output tokens of one that has not ended, else
    None."""
    first_s, last_s = outcome.first_token_s, outcome.finish_s
    if num_so_far is not None and first_s is not None:
        last_s = now_s
    return msgspec.structs.replace(
        request,
        num_output=outcome.request.output_tokens if num_so_far is None else num_so_far,
        first_s=None if first_s is None else begin_s + first_s,
        last_s=None if last_s is None else begin_s + last_s,
    )


def _twin(profile: CostModel, requests: list[SeenRequest], window: Window) -> Simulator:
    """Return a simulated engine with the window's adapters; on a GPU they are in host memory, as they were
    requested before."""
    options = ReplayOptions(
        num_adapters=len(window.ranks),
        ranks=tuple(window.ranks),
        rank_bytes=max(round(window.rank_params * profile.subject.element_bytes), 1),
        max_running=window.max_running,
        cold_start=window.policy.cold_start,
        cpu_workers=window.policy.num_workers,
        batching=window.policy.batching,
        max_delay=window.policy.max_delay,
        kv_swap_bytes=window.policy.kv_swap_bytes,
    )
    longest = max(each.prompt_tokens + each.num_output + 1 for each in requests)
    engines = OwnEngines(profile, options, longest=longest)
    simulator = engines.make()
    for number in range(len(window.ranks)):
        engines.register(simulator, number)
    if profile.subject.device == "cuda":
        simulator.stage_all()
    return simulator


def main() -> None:
    """Answer windows until stdin ends."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # where it exists: use only CPU time that nobody else needs
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in sys.stdin.buffer:
        replayed = replay(msgspec.json.decode(line, type=Window))
        sys.stdout.buffer.write(msgspec.json.encode(replayed) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
