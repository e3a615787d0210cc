"""An engine with slots for adapters (as in vLLM), simulated step by step in compiled code.

The rules are those of `Scheduler` with `prompts_first` and `max_adapters`; a test compares the two. This one
is fast for runs in which hundreds of requests decode at a time and every step ends some, so that leaps are
not possible: an hour of such a run takes a tenth of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.core.errors import CapacityError
from loraplex.perf.slot_profile import SlotCosts
from loraplex.twin.slot_costs import compiled_costs
from loraplex.twin.slot_state import (
    BLOCK_SIZE,
    IS_BLOCKED,
    IS_PROMPTS,
    IS_STALE,
    IS_UNDER_WAY,
    KV_TOKENS,
    NOTE_END,
    NOTE_FIRST,
    NUM_ADAPTERS,
    NUM_ARRIVED,
    NUM_BATCH,
    NUM_DECODES,
    NUM_FREE_BLOCKS,
    NUM_LOADS,
    NUM_NOTES,
    NUM_PARTS,
    NUM_PREEMPTIONS,
    NUM_RUNNING,
    NUM_WAITING,
    STEP_FIRST,
    Flags,
    Floats,
    Ints,
    Limits,
    Requests,
    admit,
    batch_of_all,
    compiled,
    gap_place,
    gap_seconds,
    grow,
    new_state,
    note,
    stop,
    take_arrivals,
    touch,
)

# Indices into the totals of a run.
NOW_S: Final = 0
RUNNING_S: Final = 1
WAITING_S: Final = 2
NUM_STEPS: Final = 3
STEP_S: Final = 4  # of the step in flight
NUM_TOTALS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRun:
    """The result of a run. `first_s`, `finish_s`: by request, NaN if it did not happen. `is_lost`: by
    request, because the client had no connection left. `gaps`: (seconds between two tokens of a request,
    number of such gaps), to within one percent. Means are over time."""

    requests: Requests
    first_s: Floats
    finish_s: Floats
    is_lost: Flags
    gaps: list[tuple[float, int]]
    duration_s: float
    num_steps: int
    num_loads: int
    num_preemptions: int
    mean_running: float
    mean_waiting: float


def check_room(limits: Limits, longest: int) -> None:
    """Raise CapacityError if a request of `longest` tokens could never run."""
    room = max(limits.num_blocks - limits.spare_blocks, 0) * BLOCK_SIZE
    if longest > room:
        raise CapacityError(
            f"KV memory holds {room} tokens beside the adapters and what is kept free, too few for a "
            f"request of {longest}; give fewer --slots, or more --kv-tokens"
        )


def run_slot_engine(
    requests: Requests, limits: Limits, costs: SlotCosts, *, ranks: Floats, order: Ints
) -> SlotRun:
    """`ranks`: by adapter. `order`: the order in which the engine processes the adapters of a batch."""
    if len(requests.arrival_s) > 0:
        check_room(limits, int((requests.prompt_tokens + requests.output_tokens).max()))
    state = new_state(requests, limits, ranks, order)
    totals = np.zeros(NUM_TOTALS)
    simulate(
        state,
        requests,
        len(requests.arrival_s),
        limits,
        compiled_costs(costs),
        totals,
        float(limits.until_s),
        False,
    )
    duration_s = min(float(totals[NOW_S]), limits.until_s) or 1.0
    return SlotRun(
        requests=requests,
        first_s=state.first_s,
        finish_s=state.finish_s,
        is_lost=state.is_lost,
        gaps=[(gap_seconds(place), int(state.gaps[place])) for place in np.flatnonzero(state.gaps).tolist()],
        duration_s=duration_s,
        num_steps=int(totals[NUM_STEPS]),
        num_loads=int(state.counts[NUM_LOADS]),
        num_preemptions=int(state.counts[NUM_PREEMPTIONS]),
        mean_running=float(totals[RUNNING_S]) / duration_s,
        mean_waiting=float(totals[WAITING_S]) / duration_s,
    )


@compiled
def simulate(state, requests, num_requests, limits, costs, totals, until_s, fetches):  # type: ignore[no-untyped-def]
    """Simulate all steps that begin before `until_s`, while there are requests. If notes are recorded, return
    after each step that has some. `fetches`: also return when a step that reads adapters is in flight, for
    the caller to add to its seconds."""
    counts, arrival_s = state.counts, requests.arrival_s
    now_s = totals[NOW_S]
    while True:
        if counts[IS_UNDER_WAY] == 0:
            if now_s >= until_s:
                break
            if counts[NUM_ARRIVED] < num_requests and arrival_s[counts[NUM_ARRIVED]] <= now_s:
                take_arrivals(state, requests, num_requests, limits.max_open, now_s)
            if counts[NUM_WAITING] == 0 and counts[NUM_RUNNING] == 0:
                if counts[NUM_ARRIVED] == num_requests:
                    break
                now_s = arrival_s[counts[NUM_ARRIVED]]
                continue
            num_before, num_tokens = counts[NUM_RUNNING], 0
            if counts[NUM_WAITING] > 0 and counts[IS_BLOCKED] == 0 and num_before < limits.max_running:
                num_tokens = admit(state, requests, limits)
            if num_tokens == 0 and counts[IS_STALE] == 0:
                next_s = until_s
                if counts[NUM_ARRIVED] < num_requests:
                    next_s = min(until_s, arrival_s[counts[NUM_ARRIVED]])
                decoded_s = _decode(state, limits, costs, totals, now_s, next_s)
                if decoded_s > now_s:
                    now_s = decoded_s
                    continue
            if num_tokens > 0:
                counts[IS_STALE] = 1
                num_adapters = counts[NUM_BATCH]
            else:
                grow(state, requests)
                batch_of_all(state)
                num_before = 0
                num_adapters = counts[NUM_ADAPTERS]
            loads = touch(state, limits.num_slots)
            num_in_step = counts[NUM_RUNNING] - num_before
            totals[STEP_S] = _step_seconds(
                costs, counts, limits, num_in_step, num_tokens, num_adapters, loads
            )
            counts[STEP_FIRST] = num_before
            counts[IS_PROMPTS] = num_tokens > 0
            counts[IS_UNDER_WAY] = 1
            if fetches and loads[2] > 0:
                break
        step_s = totals[STEP_S]
        totals[RUNNING_S] += counts[NUM_RUNNING] * step_s
        totals[WAITING_S] += counts[NUM_WAITING] * step_s
        totals[NUM_STEPS] += 1
        now_s += step_s
        counts[IS_UNDER_WAY] = 0
        if counts[IS_PROMPTS] != 0:
            _sample_first(state, requests, now_s)
        else:
            _sample(state, requests, now_s)
        if counts[NUM_NOTES] > 0:
            break
    totals[NOW_S] = now_s


@compiled
def _decode(state, limits, costs, totals, now_s, next_s):  # type: ignore[no-untyped-def]
    """Simulate the steps that begin before `next_s` and give nothing but a token to each running request,
    whose adapters are in their slots. Return the time of their end, `now_s` if there are none."""
    counts, growing, num_ending = state.counts, state.growing, state.num_ending
    no_loads = 0, 0.0, 0, 0.0
    num_running = counts[NUM_RUNNING]
    while now_s < next_s:
        num_decodes = counts[NUM_DECODES]
        num_growing = growing[num_decodes & (len(growing) - 1)]
        if num_growing > counts[NUM_FREE_BLOCKS]:
            break
        if num_ending[(num_decodes + 1) & (len(num_ending) - 1)] > 0:
            break
        step_s = _step_seconds(costs, counts, limits, num_running, 0, counts[NUM_ADAPTERS], no_loads)
        totals[RUNNING_S] += num_running * step_s
        totals[WAITING_S] += counts[NUM_WAITING] * step_s
        totals[NUM_STEPS] += 1
        now_s += step_s
        counts[NUM_FREE_BLOCKS] -= num_growing
        counts[NUM_DECODES] = num_decodes + 1
        counts[KV_TOKENS] += num_running
        _count_gaps(state, now_s)
    return now_s


@compiled
def _step_seconds(costs, counts, limits, num_in_step, num_tokens, num_adapters, loads):  # type: ignore[no-untyped-def]
    """`costs`: StepCosts."""
    rank = limits.max_rank
    num_loads, ranks, num_cold, cold_ranks = loads
    load, scheduler = costs.load, costs.scheduler
    seconds = (
        load.slot_s * num_loads
        + load.slot_rank_s * ranks
        + load.disk_s * num_cold
        + load.disk_rank_s * cold_ranks
    )
    seconds += scheduler.request_s * num_in_step + scheduler.waiting_s * counts[NUM_WAITING]
    if num_tokens > 0:
        prefill = costs.prefill
        return (
            seconds
            + prefill.base_s
            + prefill.token_s * num_tokens
            + prefill.adapter_s * num_adapters
            + prefill.token_rank_s * num_tokens * rank
            + prefill.slot_s * limits.num_slots
        )
    decode = costs.decode
    return (
        seconds
        + decode.base_s
        + decode.request_s * num_in_step
        + decode.adapter_s * num_adapters
        + decode.adapter_rank_s * num_adapters * rank
        + decode.kv_token_s * counts[KV_TOKENS]
        + decode.slot_s * limits.num_slots
        + decode.slot_rank_s * limits.num_slots * rank
        + decode.request_rank_s * num_in_step * rank
        + decode.request_adapter_s * num_in_step * num_adapters
        + decode.request_slot_s * num_in_step * limits.num_slots
    )


@compiled
def _sample_first(state, requests, now_s):  # type: ignore[no-untyped-def]
    """Sample a token for each of the running requests whose prompts were read, and end those that have all
    their tokens."""
    counts, first, kept = state.counts, state.counts[STEP_FIRST], state.counts[STEP_FIRST]
    counts[KV_TOKENS] += counts[NUM_RUNNING] - first
    for index in range(first, counts[NUM_RUNNING]):
        request = state.running[index]
        if np.isnan(state.first_s[request]):
            state.first_s[request] = now_s
            note(state.notes, counts, NOTE_FIRST, request)
        else:
            state.gaps[gap_place(now_s - state.last_s[request])] += 1
        if state.ends[index] <= counts[NUM_DECODES]:
            state.finish_s[request] = now_s
            note(state.notes, counts, NOTE_END, request)
            stop(state, requests, request)
        else:
            state.running[kept], state.ends[kept] = request, state.ends[index]
            kept += 1
    counts[NUM_RUNNING] = kept
    if kept > first:
        state.part_last_s[counts[NUM_PARTS]] = now_s
        state.part_size[counts[NUM_PARTS]] = kept - first
        counts[NUM_PARTS] += 1


@compiled
def _sample(state, requests, now_s):  # type: ignore[no-untyped-def]
    """Sample a token for every running request, and end those that have all their tokens."""
    counts = state.counts
    counts[KV_TOKENS] += counts[NUM_RUNNING]
    _count_gaps(state, now_s)
    num_decodes = counts[NUM_DECODES]
    if state.num_ending[num_decodes & (len(state.num_ending) - 1)] > 0:
        running, ends, kept = state.running, state.ends, 0
        for index in range(counts[NUM_RUNNING]):
            if ends[index] == num_decodes:
                request = running[index]
                state.finish_s[request] = now_s
                note(state.notes, counts, NOTE_END, request)
                stop(state, requests, request)
            else:
                running[kept], ends[kept] = running[index], ends[index]
                kept += 1
        counts[NUM_RUNNING] = kept
        state.part_size[0] = kept
        counts[NUM_PARTS] = 1 if kept > 0 else 0


@compiled
def _count_gaps(state, now_s):  # type: ignore[no-untyped-def]
    """Count the gap of every running request that gets a token now, and make them one part."""
    counts, last_s, size = state.counts, state.part_last_s, state.part_size
    for part in range(counts[NUM_PARTS]):
        state.gaps[gap_place(now_s - last_s[part])] += size[part]
    last_s[0], size[0] = now_s, counts[NUM_RUNNING]
    counts[NUM_PARTS] = 1 if counts[NUM_RUNNING] > 0 else 0
