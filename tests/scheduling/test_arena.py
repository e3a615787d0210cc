"""KV blocks and adapters in one memory: who gets what, what moves where, and that nothing is overwritten."""

from __future__ import annotations

import random
from collections import deque

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.arena import Arena, units_per_page
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, Move, StepPlan
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.work import StepWork

UNIT = 256
HOST_PAGE = 4096
PAGE = 8 * UNIT
BLOCK_SIZE = 4
MERGED_PAGES = 4


def arena_of(num_pages: int, host_bytes: int = 0) -> Arena:
    return Arena(num_pages=num_pages, page_bytes=PAGE, block_size=BLOCK_SIZE, host_bytes=host_bytes)


def bring_in(arena: Arena, version: str, num_units: int) -> None:
    """Load a version for a request that ends at once."""
    arena.table.add(version, num_units * UNIT)
    arena.table.enter(version)
    assert arena.table.acquire(version)
    arena.take_block_moves()
    arena.table.loaded(version)
    arena.table.leave(version, pinned=True)
    arena.check_integrity()


def start_of(arena: Arena, version: str) -> int | None:
    return arena.load_of(version).place


@pytest.mark.parametrize(("page_bytes", "expected"), [(2048, 8), (256 * 6, 6), (256 * 7, 7), (100, 1)])
def test_a_page_is_cut_into_aligned_units(page_bytes: int, expected: int) -> None:
    assert units_per_page(page_bytes) == expected


def test_adapters_lie_at_the_top_and_blocks_at_the_bottom() -> None:
    arena = arena_of(4)
    bring_in(arena, "a", 3)
    assert start_of(arena, "a") == 4 * PAGE - 3 * UNIT
    assert arena.pool.num_blocks == 3
    assert arena.pool.allocate(2) == [0, 1]


def test_a_small_adapter_takes_no_page_of_its_own() -> None:
    arena = arena_of(4)
    for name in "abcd":
        bring_in(arena, name, 2)
    assert arena.pool.num_blocks == 3


def test_an_adapter_larger_than_the_arena_is_refused_by_size() -> None:
    arena = arena_of(4)
    with pytest.raises(CapacityError, match=r"7,000 bytes.*8,192; raise --memory-fraction"):
        arena.table.add("a", 7000)
    arena.table.add("b", 3 * PAGE)


def test_blocks_in_use_move_down_when_the_border_passes() -> None:
    arena = arena_of(4)
    blocks = arena.pool.allocate(4)
    assert blocks is not None
    arena.pool.release(blocks[:2])
    arena.table.add("a", 2 * PAGE)
    arena.table.enter("a")
    assert arena.table.acquire("a")
    assert arena.take_block_moves() == {2: 0, 3: 1}
    assert [(m.source_byte, m.target_byte, m.num_bytes) for m in arena.take_moves()] == [
        (2 * PAGE, 0, PAGE),
        (3 * PAGE, PAGE, PAGE),
    ]


def test_a_cached_prefix_survives_the_move_of_its_block() -> None:
    arena = arena_of(4)
    first = arena.pool.allocate(3)
    blocks = arena.pool.allocate(1)
    assert first is not None
    assert blocks == [3]
    arena.pool.publish(None, [1, 2, 3, 4], blocks, 0, 1)
    arena.pool.release(blocks)
    arena.pool.release(first)
    bring_in(arena, "a", 8)
    assert arena.pool.match(None, [1, 2, 3, 4, 5]) == [0]
    arena.pool.check_integrity([])


def test_what_was_idle_for_longest_goes_first_block_or_adapter() -> None:
    def full_arena() -> Arena:
        arena = arena_of(4)
        bring_in(arena, "old", 8)
        blocks = arena.pool.allocate(1)
        assert blocks is not None
        arena.pool.publish(None, [1, 2, 3, 4], blocks, 0, 1)
        arena.pool.release(blocks)
        bring_in(arena, "young", 8)
        assert arena.pool.allocate(1) is not None
        return arena

    arena = full_arena()
    assert arena.pool.allocate(1) is not None
    assert arena.table.serving.take_evictions() == ["old"]
    assert len(arena.pool.match(None, [1, 2, 3, 4, 5])) == 1
    assert arena.pool.allocate(1) is not None
    assert arena.table.serving.take_evictions() == []
    assert arena.pool.match(None, [1, 2, 3, 4, 5]) == []
    assert arena.pool.allocate(1) is not None
    assert arena.table.serving.take_evictions() == ["young"]
    assert arena.pool.allocate(1) is None


def test_an_adapter_outlives_a_stream_of_prompts_that_nobody_repeats() -> None:
    arena = arena_of(8)
    bring_in(arena, "a", 8)
    for start in range(20):
        tokens = [100 * start + n for n in range(8)]
        blocks = arena.pool.allocate(2)
        assert blocks is not None
        arena.pool.publish(None, tokens, blocks, 0, 2)
        arena.pool.release(blocks)
    assert arena.table.serving.take_evictions() == []


def test_holes_between_adapters_are_closed_when_a_block_needs_the_room() -> None:
    arena = arena_of(4)
    for name in "abcdef":
        bring_in(arena, name, 4)
    for name in "bd":  # holes of half a page, none at the border
        arena.table.remove(name)
    held = arena.pool.allocate(1)
    assert arena.pool.allocate(1) is not None
    moved = [move.version for move in arena.take_moves()]
    assert set(moved) <= {"e", "f", "c"}
    assert moved
    assert arena.table.serving.take_evictions() == ["b", "d"]
    assert held is not None


def test_nothing_that_loads_is_moved() -> None:
    arena = arena_of(3)
    bring_in(arena, "a", 8)
    arena.table.add("b", 4 * UNIT)
    arena.table.enter("b")
    assert arena.table.acquire("b")
    arena.table.remove("a")
    assert arena.pool.allocate(1) is not None
    # Four units of b are in the way of the eight above it.
    assert arena.pool.allocate(1) is None
    assert not arena.take_moves()
    arena.table.loaded("b")
    assert arena.pool.allocate(1) is not None


def test_a_place_that_a_step_under_way_may_look_at_is_not_quiet() -> None:
    arena = arena_of(3)
    bring_in(arena, "a", 16)
    arena.table.enter("a")
    assert arena.table.acquire("a")
    arena.step_decided()
    arena.table.leave("a", pinned=True)  # its request ended while the step runs
    for name in "bc":
        arena.table.add(name, 16 * UNIT)
        arena.table.enter(name)
    assert arena.table.acquire("b")
    assert not arena.load_of("b").quiet
    arena.table.loaded("b")
    arena.table.leave("b", pinned=True)
    arena.step_landed()
    assert arena.table.acquire("c")
    assert arena.load_of("c").quiet


def test_for_one_block_no_more_moves_than_what_lies_at_the_border() -> None:
    arena = arena_of(100)
    rng, largest = random.Random(0), 24
    for index in range(80):
        bring_in(arena, f"v{index}", rng.choice([3, 6, 12, largest]))
    arena.take_moves()
    while arena.table.serving.idle.first is not None:
        assert arena.pool.allocate(1) is not None
        assert sum(move.num_bytes for move in arena.take_moves()) <= 2 * largest * UNIT
        arena.check_integrity()


def test_who_is_beyond_the_prefetch_depth_blocks_nobody_while_there_is_room() -> None:
    arena = arena_of(1000)
    config = SchedulerConfig(max_model_len=64, prefetch_depth=4)
    scheduler = Scheduler(config, arena)
    for index in range(8):
        arena.table.add(f"v{index}", UNIT)
    for index, adapter in enumerate([*(f"v{n}" for n in range(8)), None]):
        params = SamplingParams(max_tokens=4)
        scheduler.add(
            EngineRequest(request_id=str(index), prompt_token_ids=[1, 2], params=params, adapter=adapter)
        )
    assert [chunk.request_id for chunk in scheduler.schedule().chunks] == ["8"]


def test_who_waits_for_memory_is_not_overtaken() -> None:
    arena = arena_of(6)
    scheduler = Scheduler(SchedulerConfig(max_model_len=16), arena)
    arena.table.add("large", 4 * PAGE)

    def add(request_id: str, num_prompt: int, adapter: str | None = None) -> None:
        scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=[ord(request_id)] * num_prompt,
                params=SamplingParams(max_tokens=4, ignore_eos=True),
                adapter=adapter,
            )
        )

    add("a", 6)
    plan = scheduler.schedule()
    add("b", 3, "large")
    add("c", 4)
    events = []
    for _ in range(4):  # as long as the first one runs
        scheduler.update(plan, {chunk.request_id: 7 for chunk in plan.chunks})
        plan = scheduler.schedule()
        events += [load.version for load in plan.adapter_loads] + [c.request_id for c in plan.chunks]
    assert events == ["a", "a", "a", "large", "c"]  # the load has its memory: nobody can take it any more


class TrackedMemory:
    """The content of every unit of an arena, as an executor would leave it.

    KV blocks hold the tokens written to them and by which adapter; adapters hold their names.
    """

    def __init__(self, num_pages: int) -> None:
        self.units: list[object] = [None] * (num_pages * 8)

    def move(self, move: Move) -> None:
        source, target, size = (n // UNIT for n in (move.source_byte, move.target_byte, move.num_bytes))
        self.units[target : target + size] = self.units[source : source + size]

    def block(self, block: int) -> dict[int, object]:
        found = self.units[block * 8]
        return found if isinstance(found, dict) else {}

    def write(self, block: int, offset: int, what: object) -> None:
        # A new dict: an earlier copy of the block must not see it.
        self.units[block * 8] = {**self.block(block), offset: what}


class World:
    """A scheduler over tracked memory; steps land one later than they are decided, reads and loads whenever.

    `host_units`: the host's memory that adapters come by way of, in pages of its own; None for without.
    """

    def __init__(
        self,
        num_pages: int,
        sizes: list[int],
        max_running: int,
        seed: int,
        host_units: int | None = None,
        cold_start: ColdStart = ColdStart.OVERLAP,
        loads_popular: bool = False,
        merges: bool = False,
    ) -> None:
        """`merges`: memory for merged weights is taken and given back at random; so many more pages are there
        for it."""
        self.max_merged = MERGED_PAGES * 8 if merges else 0
        self.merged = range(0)  # units of the merged weights
        self.num_takes = 0
        num_pages += self.max_merged // 8
        self.arena = arena_of(num_pages, (host_units or 0) * HOST_PAGE)
        self.host: dict[int, str] = {}  # by page
        self.reading: list[AdapterRead] = []
        self.memory = TrackedMemory(num_pages)
        self.random = random.Random(seed)
        config = SchedulerConfig(
            max_model_len=(num_pages - self.max_merged // 8 - max(sizes) // 8 - 1) * BLOCK_SIZE,
            work=StepWork(max_tokens=12),
            max_running=max_running,
            prefetch_depth=4,
            cold_start=cold_start,
            loads_popular=loads_popular,
        )
        self.max_len = config.max_model_len
        self.scheduler = Scheduler(config, self.arena)
        self.versions = [f"v{index}" for index in range(len(sizes))]
        for version, size in zip(self.versions, sizes, strict=True):
            self.scheduler.adapters.add(version, size * UNIT)
        self.sizes = dict(zip(self.versions, sizes, strict=True))
        self.places: dict[str, int] = {}
        self.loading: list[AdapterLoad] = []
        self.flights: deque[tuple[StepPlan, dict[str, int], set[int]]] = deque()
        self.texts: dict[str, list[int]] = {}
        self.adapter_of: dict[str, str | None] = {}
        self.ended: dict[str, str | None] = {}
        self.max_running = max_running
        self.seats: set[str] = set()  # of those who run, as an executor keeps them

    def add(self, request_id: str) -> None:
        num_prompt = self.random.randint(1, self.max_len - 1)
        shared = [7] * self.random.choice([0, num_prompt // 2])
        tokens = (shared + [self.random.randrange(100) for _ in range(num_prompt)])[:num_prompt]
        self.texts[request_id] = tokens
        self.adapter_of[request_id] = self.random.choice([None, *self.versions, *self.versions])
        self.scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(tokens),
                params=SamplingParams(max_tokens=self.random.randint(1, 8)),
                adapter=self.adapter_of[request_id],
                eos_token_ids=(0,),
            )
        )

    def step(self) -> None:
        loading, self.loading = self.loading, []
        for load in loading:
            if self.random.random() < 0.5:
                self.loading.append(load)
            else:
                self._copy(load)
                self.scheduler.adapter_loaded(load.version)
        reading, self.reading = self.reading, []
        for read in reading:
            if self.random.random() < 0.5:
                self.reading.append(read)
            else:
                self._write_host(read, read.version)
                self.scheduler.adapter_read(read.version)
        writes_merged = self.max_merged > 0 and self.random.random() < 0.3 and self._change_merged()
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.seats.difference_update(plan.preempted)
        for version in plan.adapter_evictions:
            del self.places[version]
        for move in plan.moves:
            self.memory.move(move)
            if move.version in self.places:
                self.places[move.version] = move.target_byte
        if writes_merged:
            for unit in self.merged:
                self.memory.units[unit] = f"merged {self.num_takes}"
        for read in plan.adapter_reads:
            self._write_host(read, "half of an adapter")
            self.reading.append(read)
        for load in plan.adapter_loads:
            assert load.place is not None
            self.places[load.version] = load.place
            self.loading.append(load)
            for _, _, touched in self.flights if load.quiet and not plan.moves else ():
                assert touched.isdisjoint(self._units(load.version)), "a load beside a step that looks there"
        for unit in self.merged:
            found = self.memory.units[unit]
            assert found == f"merged {self.num_takes}", "merged weights were overwritten"
        self.seats.update(chunk.request_id for chunk in plan.chunks)
        assert len(self.seats) <= 2 * self.max_running, "more seats than there are"
        if plan.chunks:
            sampled = self._run(plan)
            self.flights.append((plan, sampled, self._touched(plan)))
        while len(self.flights) > (1 if plan.chunks else 0):
            self._land()
        for failure in self.scheduler.take_failures():
            self.ended[failure.request_id] = failure.error
        self.seats.difference_update(self.ended)

    def _change_merged(self) -> bool:
        """Take memory for merged weights, other than before, or give it back. Return whether they are to be
        written."""
        num_units, arena = self.random.choice([0, 1, 5, self.max_merged]), self.arena
        before = arena.merged_bytes
        if num_units == 0:
            arena.give_back_merged()
            self.merged = range(0)
        elif not arena.take_merged(num_units * UNIT - self.random.randrange(UNIT)):
            assert arena.merged_bytes == before
            return False
        else:
            assert arena.merge_place is not None
            top = len(self.memory.units)
            self.merged = range(arena.merge_place // UNIT, top)
            assert len(self.merged) == num_units
            self.num_takes += 1
        assert arena.merged_bytes == num_units * UNIT
        self.scheduler.adapters.pins.follow_moves(self.scheduler._running)
        arena.check_integrity()
        return num_units > 0

    def _run(self, plan: StepPlan) -> dict[str, int]:
        sampled = {}
        for chunk in plan.chunks:
            adapter, text = chunk.adapter, self.texts[chunk.request_id]
            for load in self.loading:
                if load.version == adapter:  # the step waits for it
                    assert load.source is not None, "a step counts on what it cannot wait for"
                    self._copy(load)
            if adapter is not None:
                assert self.memory.units[self.places[adapter] // UNIT] == adapter, (
                    "an adapter was overwritten"
                )
            for position in range(chunk.start):
                block = chunk.block_ids[position // BLOCK_SIZE]
                found = self.memory.block(block)[position % BLOCK_SIZE]
                assert found == (adapter, text[position]), "a block was overwritten"
            for position in range(chunk.start, chunk.end):
                block = chunk.block_ids[position // BLOCK_SIZE]
                self.memory.write(block, position % BLOCK_SIZE, (adapter, text[position]))
            if chunk.samples:
                sampled[chunk.request_id] = self.random.randrange(20)
                self.texts[chunk.request_id] = [*text[: chunk.end], sampled[chunk.request_id]]
        return sampled

    def _copy(self, load: AdapterLoad) -> None:
        assert load.place is not None
        if load.source is not None:
            found = {self.host[page] for page in self._host_pages(load.version, load.source)}
            assert found == {load.version}, "the host's copy was overwritten under a load"
        self.memory.units[load.place // UNIT] = load.version

    def _write_host(self, read: AdapterRead, what: str) -> None:
        self.host |= dict.fromkeys(self._host_pages(read.version, read.place), what)

    def _host_pages(self, version: str, place: int) -> range:
        first = place // HOST_PAGE
        return range(first, first - (-self.sizes[version] * UNIT // HOST_PAGE))

    def _touched(self, plan: StepPlan) -> set[int]:
        """Units that a step reads or writes."""
        blocks = {block for chunk in plan.chunks for block in chunk.block_ids}
        adapters = {chunk.adapter for chunk in plan.chunks if chunk.adapter is not None}
        used = {block * 8 + n for block in blocks for n in range(8)}
        return used.union(self.merged, *map(self._units, adapters))

    def _units(self, version: str) -> range:
        start = self.places[version] // UNIT
        return range(start, start + self.sizes[version])

    def _land(self) -> None:
        plan, sampled, _ = self.flights.popleft()
        for update in self.scheduler.update(plan, sampled):
            if update.finish_reason is not None:
                self.ended[update.request_id] = update.error
        self.scheduler.check_integrity()


@settings(max_examples=examples(60, 150), deadline=None)
@given(
    num_pages=st.integers(6, 20),
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    max_running=st.integers(1, 6),
    num_requests=st.integers(1, 14),
    seed=st.integers(0, 1 << 16),
    host_units=st.none() | st.integers(0, 12),
    cold_start=st.sampled_from([ColdStart.OVERLAP, ColdStart.PIPELINED]),
    loads_popular=st.booleans(),
    merges=st.booleans(),
)
def test_whatever_moves_everybody_finds_what_they_left(
    num_pages: int,
    sizes: list[int],
    max_running: int,
    num_requests: int,
    seed: int,
    host_units: int | None,
    cold_start: ColdStart,
    loads_popular: bool,
    merges: bool,
) -> None:
    world = World(num_pages, sizes, max_running, seed, host_units, cold_start, loads_popular, merges)
    for index in range(num_requests):
        world.add(str(index))
        for _ in range(world.random.randint(0, 3)):
            world.step()
    for _ in range(5000):
        if not world.scheduler.has_work() and not world.flights:
            break
        world.step()
    assert world.ended == dict.fromkeys(map(str, range(num_requests))), "lost, or failed for want of memory"
    assert world.arena.pool.num_free == world.arena.pool.num_blocks
    world.arena.give_back_merged()
    world.arena.check_integrity()


def test_merged_weights_lie_at_the_top_and_adapters_move_below() -> None:
    arena = arena_of(8)
    for name in "abc":
        bring_in(arena, name, 5)
    arena.take_moves()
    assert arena.take_merged(9 * UNIT - 100)
    assert arena.merge_place == 8 * PAGE - 9 * UNIT
    assert arena.merged_bytes == 9 * UNIT
    arena.take_block_moves()
    arena.check_integrity()
    assert {move.version for move in arena.take_moves()} == {"a", "b"}
    assert arena.table.serving.take_evictions() == [], "there was room for all"
    assert arena.pool.num_blocks == 4, "the one that did not move lies between them"
    arena.give_back_merged()
    assert (arena.merge_place, arena.merged_bytes) == (None, 0)
    arena.check_integrity()


def test_merged_weights_evict_what_was_idle_for_longest_and_nothing_in_use() -> None:
    arena = arena_of(6)
    bring_in(arena, "old", 8)
    bring_in(arena, "young", 8)
    arena.table.enter("young")
    assert arena.table.acquire("young")
    held = arena.pool.allocate(2)
    assert held is not None
    assert not arena.take_merged(4 * PAGE), "one adapter and two blocks are in use"
    assert arena.table.serving.take_evictions() == []
    assert arena.merged_bytes == 0
    arena.check_integrity()
    assert arena.take_merged(3 * PAGE)
    arena.take_block_moves()
    arena.check_integrity()
    assert arena.table.serving.take_evictions() == ["old"]
    assert arena.pool.num_blocks == 2
    assert not arena.table.is_absent("young")
    assert arena.pool.allocate(1) is None


def test_an_adapter_that_loads_at_the_top_keeps_merged_weights_away() -> None:
    arena = arena_of(6)
    arena.table.add("a", UNIT)
    arena.table.enter("a")
    assert arena.table.acquire("a")
    arena.take_block_moves()
    assert not arena.take_merged(PAGE)
    assert not arena.take_moves()
    arena.table.loaded("a")
    assert arena.take_merged(PAGE)
    assert [move.version for move in arena.take_moves()] == ["a"]


def test_merged_weights_of_fewer_linears_give_back_the_lower_part() -> None:
    arena = arena_of(6)
    assert arena.take_merged(4 * PAGE)
    arena.take_block_moves()
    assert arena.take_merged(PAGE)
    assert arena.merge_place == 5 * PAGE
    blocks = arena.pool.allocate(5)
    assert blocks == [0, 1, 2, 3, 4]
    assert arena.pool.allocate(1) is None


def test_memory_of_merged_weights_that_a_step_under_way_may_read_is_not_quiet() -> None:
    arena = arena_of(3)
    assert arena.take_merged(2 * PAGE)
    arena.take_block_moves()
    arena.step_decided()
    arena.give_back_merged()
    for name in "ab":
        arena.table.add(name, 8 * UNIT)
        arena.table.enter(name)
    assert arena.table.acquire("a")
    assert not arena.load_of("a").quiet
    arena.step_landed()
    arena.take_block_moves()
    assert arena.table.acquire("b")
    assert arena.load_of("b").quiet


def test_more_than_the_arena_is_never_taken() -> None:
    arena = arena_of(4)
    assert not arena.take_merged(4 * PAGE), "no request could run without a block"
    assert arena.take_merged(3 * PAGE)
    assert arena.pool.num_blocks == 1
