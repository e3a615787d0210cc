"""The state of a slot engine as arrays, and its transitions, compiled.

Requests are numbered in order of arrival. Waiting ones are queued for each adapter (`head`, `tail`,
`behind`), so that an admissible request is found without iterating over the others; preempted ones are before
them in `front`, the last one first.

A decode step gives a token to every running request, and writes to none of them: `NUM_DECODES` counts these
steps, and what depends on the number of a request's tokens follows from it, such as when it ends (`ends`,
`num_ending`) and when it needs another block (`growing`). The running requests are, in their order, in parts
that had their last token at the same time (`part_last_s`, `part_size`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from loraplex.workload.jsonl import WorkloadRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BLOCK_SIZE: Final = 16
_ENDS: Final = 2048
"""Entries of `State.num_ending`, a power of two; requests with more tokens share entries with others."""
NOBODY: Final = -1
_SHORTEST_GAP_S: Final = 1e-5
_GAPS_AN_E: Final = 100
"""Bins of gaps per factor of e: neighbours differ by one percent."""
_NUM_GAPS: Final = 2000

compiled: Final = numba.njit(cache=True, nogil=True, _nrt=False)
"""Compile without counting references to arrays, which otherwise takes most of the time: nothing that is
compiled here makes an array or keeps one."""

# Indices into `State.counts`.
NUM_RUNNING: Final = 0
NUM_WAITING: Final = 1
NUM_FRONT: Final = 2
NUM_FREE_BLOCKS: Final = 3
NUM_ADAPTERS: Final = 4  # of running requests
NUM_ACTIVE: Final = 5  # adapters in a slot
NUM_BATCH: Final = 6  # entries of `batch`
CLOCK: Final = 7  # counts touches
KV_TOKENS: Final = 8
NUM_LOADS: Final = 9
NUM_PREEMPTIONS: Final = 10
IS_BLOCKED: Final = 11  # no waiting request can be admitted before one arrives or ends
IS_STALE: Final = 12  # the order of touches is not that of the running adapters
NUM_ARRIVED: Final = 13
STEP_FIRST: Final = 14  # index in `running` of the first request that the step in flight computes
IS_UNDER_WAY: Final = 15  # a step is in flight
NUM_NOTES: Final = 16  # entries of `notes`
NUM_DECODES: Final = 17  # steps without prompts that have begun
NUM_PARTS: Final = 18  # of the running requests
IS_PROMPTS: Final = 19  # the step in flight reads prompts
NUM_COUNTS: Final = 20

# Kinds of notes: of adapters when a step begins, of requests when it ends.
NOTE_READ: Final = 0  # from disk, or from another replica
NOTE_EVICT: Final = 1
NOTE_LOAD: Final = 2
NOTE_FIRST: Final = 3  # first token
NOTE_END: Final = 4
_NOTES_A_REQUEST: Final = 5
"""Most notes of a running request in one step: one of each kind."""


class Requests(NamedTuple):
    """Arrays with one entry per request, in order of arrival. `adapter`: the adapter's number."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    adapter: Ints


class Limits(NamedTuple):
    """Limits of an engine. `spare_blocks`: blocks that admissions leave free. `max_open`: most concurrent
    requests of the client; further ones are lost."""

    num_slots: int
    max_rank: int
    num_blocks: int
    spare_blocks: int
    max_running: int
    max_step_tokens: int
    max_open: int
    until_s: float


class State(NamedTuple):
    """The state of an engine. By request: `generated` to `is_lost`; `generated`: its tokens, while it runs
    less `NUM_DECODES`; `last_s`: time of its last token when it was preempted. By adapter: `head` to
    `position`. `order`: adapters by ascending `position`. `ends`: by place in `running`, `NUM_DECODES` after
    the step that ends the request. `num_ending`: number of requests that end at a value of `NUM_DECODES`, by
    its last digits; `growing`: of those that need a block in the step after. `gaps`: number of gaps in each
    bin (`gap_place`). `notes`: externally visible events of the last step, as (kind, number of the adapter or
    request); has no rows if they are not recorded."""

    counts: Ints
    running: Ints
    ends: Ints
    num_ending: Ints
    growing: Ints
    part_last_s: Floats
    part_size: Ints
    front: Ints
    batch: Ints
    behind: Ints
    generated: Ints
    is_running: Flags
    first_s: Floats
    last_s: Floats
    finish_s: Floats
    is_lost: Flags
    head: Ints
    tail: Ints
    num_running_of: Ints
    touched: Ints
    is_active: Flags
    is_known: Flags
    rank: Floats
    order: Ints
    position: Ints
    gaps: Ints
    notes: Ints


def new_state(requests: Requests, limits: Limits, ranks: Floats, order: Ints) -> State:
    """`order`: the order in which the engine processes the adapters of a batch."""
    num_requests, num_adapters = len(requests.arrival_s), len(ranks)
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[NUM_FREE_BLOCKS] = limits.num_blocks
    position = np.empty(num_adapters, np.int64)
    position[order] = np.arange(num_adapters)
    return State(
        counts=counts,
        running=np.empty(limits.max_running + 1, np.int64),
        ends=np.empty(limits.max_running + 1, np.int64),
        num_ending=np.zeros(_ENDS, np.int64),
        growing=np.zeros(BLOCK_SIZE, np.int64),
        part_last_s=np.empty(limits.max_running + 1),
        part_size=np.empty(limits.max_running + 1, np.int64),
        front=np.empty(num_requests + 1, np.int64),
        batch=np.empty(num_adapters + 1, np.int64),
        behind=np.full(num_requests, NOBODY, np.int64),
        generated=np.zeros(num_requests, np.int64),
        is_running=np.zeros(num_requests, np.bool_),
        first_s=np.full(num_requests, np.nan),
        last_s=np.full(num_requests, np.nan),
        finish_s=np.full(num_requests, np.nan),
        is_lost=np.zeros(num_requests, np.bool_),
        head=np.full(num_adapters, NOBODY, np.int64),
        tail=np.full(num_adapters, NOBODY, np.int64),
        num_running_of=np.zeros(num_adapters, np.int64),
        touched=np.zeros(num_adapters, np.int64),
        is_active=np.zeros(num_adapters, np.bool_),
        is_known=np.zeros(num_adapters, np.bool_),
        rank=ranks,
        order=order,
        position=position,
        gaps=np.zeros(_NUM_GAPS, np.int64),
        notes=np.zeros((0, 2), np.int64),
    )


def notes_for(limits: Limits) -> Ints:
    """Return an array large enough for the notes of any step."""
    return np.zeros((_NOTES_A_REQUEST * limits.max_running, 2), np.int64)


def requests_of(workload: Sequence[WorkloadRequest]) -> Requests:
    return Requests(
        arrival_s=np.array([each.arrival_s for each in workload], np.float64),
        prompt_tokens=np.array([each.prompt_tokens for each in workload], np.int64),
        output_tokens=np.array([each.output_tokens for each in workload], np.int64),
        adapter=np.array([each.adapter for each in workload], np.int64),
    )


def no_requests(num_requests: int) -> Requests:
    """Return arrays with room for this many requests."""
    return Requests(
        arrival_s=np.zeros(num_requests),
        prompt_tokens=np.zeros(num_requests, np.int64),
        output_tokens=np.zeros(num_requests, np.int64),
        adapter=np.zeros(num_requests, np.int64),
    )


def with_more_room(state: State, requests: Requests) -> tuple[State, Requests]:
    """Return both with room for twice as many requests."""
    more = len(requests.arrival_s)
    return state._replace(
        front=np.append(state.front, np.empty(more, np.int64)),
        behind=np.append(state.behind, np.full(more, NOBODY, np.int64)),
        generated=np.append(state.generated, np.zeros(more, np.int64)),
        is_running=np.append(state.is_running, np.zeros(more, np.bool_)),
        first_s=np.append(state.first_s, np.full(more, np.nan)),
        last_s=np.append(state.last_s, np.full(more, np.nan)),
        finish_s=np.append(state.finish_s, np.full(more, np.nan)),
        is_lost=np.append(state.is_lost, np.zeros(more, np.bool_)),
    ), Requests(*(np.append(old, new) for old, new in zip(requests, no_requests(more), strict=True)))


def with_adapter(state: State, *, rank: float, position: int, is_known: bool) -> State:
    """Return the state with one more adapter. `position`: its unique place in the engine's order."""
    number = len(state.head)
    place = int(np.searchsorted(state.position[state.order], position))
    return state._replace(
        batch=np.empty(number + 2, np.int64),
        head=np.append(state.head, NOBODY),
        tail=np.append(state.tail, NOBODY),
        num_running_of=np.append(state.num_running_of, 0),
        touched=np.append(state.touched, 0),
        is_active=np.append(state.is_active, False),
        is_known=np.append(state.is_known, is_known),
        rank=np.append(state.rank, rank),
        order=np.insert(state.order, place, number),
        position=np.append(state.position, position),
    )


@compiled
def note(notes, counts, kind, number):  # type: ignore[no-untyped-def]
    """Record a note, if notes are recorded."""
    if len(notes) > 0:
        place = counts[NUM_NOTES]
        notes[place, 0] = kind
        notes[place, 1] = number
        counts[NUM_NOTES] = place + 1


@compiled
def gap_place(gap_s):  # type: ignore[no-untyped-def]
    """Return the index of a gap's bin in `State.gaps`."""
    return min(max(int(_GAPS_AN_E * math.log(gap_s / _SHORTEST_GAP_S)), 0), _NUM_GAPS - 1)


def gap_seconds(place: int) -> float:
    """Return the middle of a bin."""
    return _SHORTEST_GAP_S * math.exp((place + 0.5) / _GAPS_AN_E)


def num_generated(state: State, request: int) -> int:
    """Return the tokens of a request between two steps."""
    num_decodes = state.counts[NUM_DECODES] if state.is_running[request] else 0
    return int(state.generated[request] + num_decodes)


@compiled
def enqueue(state, requests, request):  # type: ignore[no-untyped-def]
    adapter = requests.adapter[request]
    if state.head[adapter] == NOBODY:
        state.head[adapter] = request
    else:
        state.behind[state.tail[adapter]] = request
    state.tail[adapter] = request
    state.counts[NUM_WAITING] += 1
    if state.num_running_of[adapter] > 0:  # otherwise it has no slot either
        state.counts[IS_BLOCKED] = 0


@compiled
def take_arrivals(state, requests, num_requests, max_open, now_s):  # type: ignore[no-untyped-def]
    """Queue the requests that have arrived by now, or count them as lost; considers the first
    `num_requests`."""
    counts = state.counts
    while counts[NUM_ARRIVED] < num_requests and requests.arrival_s[counts[NUM_ARRIVED]] <= now_s:
        request = counts[NUM_ARRIVED]
        if counts[NUM_WAITING] + counts[NUM_RUNNING] < max_open:
            enqueue(state, requests, request)
        else:
            state.is_lost[request] = True
        counts[NUM_ARRIVED] += 1


@compiled
def first_admissible(state, requests, num_slots):  # type: ignore[no-untyped-def]
    """Return the first waiting request whose adapter runs or can have a slot, and its index in `front`."""
    counts = state.counts
    has_slot = counts[NUM_ADAPTERS] < num_slots
    for place in range(counts[NUM_FRONT] - 1, -1, -1):
        request = state.front[place]
        if has_slot or state.num_running_of[requests.adapter[request]] > 0:
            return request, place
    first = len(requests.arrival_s)
    for adapter in range(len(state.head)):
        head = state.head[adapter]
        if head != NOBODY and head < first and (has_slot or state.num_running_of[adapter] > 0):
            first = head
    if first == len(requests.arrival_s):
        return NOBODY, NOBODY
    return first, NOBODY


@compiled
def dequeue(state, requests, request, place):  # type: ignore[no-untyped-def]
    counts = state.counts
    if place == NOBODY:
        adapter = requests.adapter[request]
        state.head[adapter] = state.behind[request]
    else:
        counts[NUM_FRONT] -= 1
        for index in range(place, counts[NUM_FRONT]):
            state.front[index] = state.front[index + 1]
    counts[NUM_WAITING] -= 1


@compiled
def enter_batch(state, adapter):  # type: ignore[no-untyped-def]
    """Insert an adapter into `batch`, a set in the engine's order."""
    counts, batch, position = state.counts, state.batch, state.position
    index = counts[NUM_BATCH]
    for place in range(index):
        if batch[place] == adapter:
            return
    while index > 0 and position[batch[index - 1]] > position[adapter]:
        batch[index] = batch[index - 1]
        index -= 1
    batch[index] = adapter
    counts[NUM_BATCH] += 1


@compiled
def start(state, requests, request, num_blocks):  # type: ignore[no-untyped-def]
    counts, adapter = state.counts, requests.adapter[request]
    if state.num_running_of[adapter] == 0:
        counts[NUM_ADAPTERS] += 1
    state.num_running_of[adapter] += 1
    counts[NUM_FREE_BLOCKS] -= num_blocks
    counts[KV_TOKENS] += requests.prompt_tokens[request] + state.generated[request]
    state.is_running[request] = True
    state.generated[request] += 1 - counts[NUM_DECODES]  # the step that reads its prompt gives it a token
    end = requests.output_tokens[request] - state.generated[request]
    state.num_ending[end & (_ENDS - 1)] += 1
    state.growing[_growing_place(state, requests, request)] += 1
    state.running[counts[NUM_RUNNING]] = request
    state.ends[counts[NUM_RUNNING]] = end
    counts[NUM_RUNNING] += 1
    enter_batch(state, adapter)


@compiled
def _growing_place(state, requests, request):  # type: ignore[no-untyped-def]
    """Return the index in `growing` of a running request. It needs a block when the tokens whose KV it has
    fill its blocks, and its last one is to be added."""
    return (1 - requests.prompt_tokens[request] - state.generated[request]) & (BLOCK_SIZE - 1)


@compiled
def stop(state, requests, request):  # type: ignore[no-untyped-def]
    """Free all that a request holds; the caller removes it from `running` and its part."""
    counts, adapter = state.counts, requests.adapter[request]
    state.num_running_of[adapter] -= 1
    if state.num_running_of[adapter] == 0:
        counts[NUM_ADAPTERS] -= 1
        counts[IS_STALE] = 1
        counts[IS_BLOCKED] = 0
    state.num_ending[(requests.output_tokens[request] - state.generated[request]) & (_ENDS - 1)] -= 1
    state.growing[_growing_place(state, requests, request)] -= 1
    state.is_running[request] = False
    state.generated[request] += counts[NUM_DECODES]
    num_tokens = requests.prompt_tokens[request] + state.generated[request]
    counts[NUM_FREE_BLOCKS] += (num_tokens - 1 + BLOCK_SIZE - 1) // BLOCK_SIZE  # the last one has no KV yet
    counts[KV_TOKENS] -= num_tokens


@compiled
def withdraw(state, requests, request):  # type: ignore[no-untyped-def]
    """Remove a running or waiting request as if it had never arrived."""
    counts, running = state.counts, state.running
    for index in range(counts[NUM_RUNNING]):
        if running[index] == request:
            stop(state, requests, request)
            counts[NUM_RUNNING] -= 1
            for place in range(index, counts[NUM_RUNNING]):
                running[place], state.ends[place] = running[place + 1], state.ends[place + 1]
            _leave_part(state, index)
            return
    for place in range(counts[NUM_FRONT]):
        if state.front[place] == request:
            dequeue(state, requests, request, place)
            return
    adapter = requests.adapter[request]
    before, each = NOBODY, state.head[adapter]
    while each != request:
        before, each = each, state.behind[each]
    if before == NOBODY:
        state.head[adapter] = state.behind[request]
    else:
        state.behind[before] = state.behind[request]
    if state.tail[adapter] == request:
        state.tail[adapter] = before
    counts[NUM_WAITING] -= 1


@compiled
def _leave_part(state, index):  # type: ignore[no-untyped-def]
    """Remove the running request at `index` from its part; return the time of its last token."""
    counts, part, end = state.counts, 0, state.part_size[0]
    while end <= index:
        part += 1
        end += state.part_size[part]
    last_s = state.part_last_s[part]
    state.part_size[part] -= 1
    if state.part_size[part] == 0:
        counts[NUM_PARTS] -= 1
        for place in range(part, counts[NUM_PARTS]):
            state.part_last_s[place] = state.part_last_s[place + 1]
            state.part_size[place] = state.part_size[place + 1]
    return last_s


@compiled
def admit(state, requests, limits):  # type: ignore[no-untyped-def]
    """Admit requests with whole prompts, first come first served, skipping those without a slot. Return their
    tokens."""
    counts = state.counts
    num_tokens = 0
    counts[NUM_BATCH] = 0
    while counts[NUM_WAITING] > 0 and counts[NUM_RUNNING] < limits.max_running and counts[IS_BLOCKED] == 0:
        request, place = first_admissible(state, requests, limits.num_slots)
        if request == NOBODY:
            counts[IS_BLOCKED] = 1
            break
        length = requests.prompt_tokens[request] + state.generated[request]
        num_blocks = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
        if counts[NUM_FREE_BLOCKS] - num_blocks < limits.spare_blocks:
            break
        if num_tokens > 0 and num_tokens + length > limits.max_step_tokens:
            break
        dequeue(state, requests, request, place)
        start(state, requests, request, num_blocks)
        num_tokens += length
    return num_tokens


@compiled
def grow(state, requests):  # type: ignore[no-untyped-def]
    """Begin a decode step: give a block to each running request that needs one, preempting the youngest if
    necessary."""
    counts, place = state.counts, state.counts[NUM_DECODES] & (BLOCK_SIZE - 1)
    if state.growing[place] > counts[NUM_FREE_BLOCKS]:
        _preempt(state, requests, place)
    counts[NUM_FREE_BLOCKS] -= state.growing[place]
    counts[NUM_DECODES] += 1


@compiled
def _preempt(state, requests, place):  # type: ignore[no-untyped-def]
    """Preempt the youngest requests as long as older ones in `growing[place]` need blocks that are not
    free."""
    counts, index, num_given = state.counts, 0, 0
    while index < counts[NUM_RUNNING]:
        if _growing_place(state, requests, state.running[index]) == place:
            while counts[NUM_FREE_BLOCKS] == num_given and index < counts[NUM_RUNNING]:
                victim = state.running[counts[NUM_RUNNING] - 1]
                stop(state, requests, victim)
                state.last_s[victim] = _leave_part(state, counts[NUM_RUNNING] - 1)
                counts[NUM_RUNNING] -= 1
                counts[IS_BLOCKED] = 0  # its adapter may still run, by an older request
                state.front[counts[NUM_FRONT]] = victim
                counts[NUM_FRONT] += 1
                counts[NUM_WAITING] += 1
                counts[NUM_PREEMPTIONS] += 1
            if index == counts[NUM_RUNNING]:
                break
            num_given += 1
        index += 1


@compiled
def batch_of_all(state):  # type: ignore[no-untyped-def]
    """Set `batch` to all running adapters in the engine's order; to none if the last such step touched the
    same."""
    counts = state.counts
    counts[NUM_BATCH] = 0
    if counts[IS_STALE] == 0:
        return
    for adapter in state.order:
        if state.num_running_of[adapter] > 0:
            state.batch[counts[NUM_BATCH]] = adapter
            counts[NUM_BATCH] += 1
    counts[IS_STALE] = 0


@compiled
def touch(state, num_slots):  # type: ignore[no-untyped-def]
    """Give every adapter of the batch a slot in turn, evicting the least recently touched one. That may be
    one later in the same batch: it is then loaded again, evicting the next one. Return the number of loads,
    the sum of their ranks, the number of those from disk, and the sum of their ranks."""
    counts = state.counts
    num_loads, num_cold, ranks, cold_ranks = 0, 0, 0.0, 0.0
    for index in range(counts[NUM_BATCH]):
        adapter = state.batch[index]
        counts[CLOCK] += 1
        if not state.is_active[adapter]:
            num_loads += 1
            ranks += state.rank[adapter]
            if not state.is_known[adapter]:
                state.is_known[adapter] = True
                num_cold += 1
                cold_ranks += state.rank[adapter]
                note(state.notes, counts, NOTE_READ, adapter)
            if counts[NUM_ACTIVE] >= num_slots:
                oldest, since = NOBODY, counts[CLOCK]
                for other in range(len(state.touched)):
                    if state.is_active[other] and state.touched[other] < since:
                        oldest, since = other, state.touched[other]
                state.is_active[oldest] = False
                note(state.notes, counts, NOTE_EVICT, oldest)
            else:
                counts[NUM_ACTIVE] += 1
            state.is_active[adapter] = True
            note(state.notes, counts, NOTE_LOAD, adapter)
        state.touched[adapter] = counts[CLOCK]
    counts[NUM_LOADS] += num_loads
    return num_loads, ranks, num_cold, cold_ranks
