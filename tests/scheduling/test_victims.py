"""Victims on a CPU, in the host tier and in the arena, which all ask the same policy.

Each check below is run with the policy as it is, where it has to hold, and with the mutant that it is there
to catch, where it has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling import arena, blocks, host_room, room
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.adapter_tier import Tier
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_room import HostRoom
from loraplex.scheduling.room import ByteBudget
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.victims import (
    NO_ADAPTERS,
    NO_BLOCKS,
    CachedBlock,
    CachedBlocks,
    IdleAdapter,
    IdleAdapters,
    Victim,
    next_victim,
)

PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Idle:
    version: str
    num_bytes: int = 1
    last_use: int = 0
    num_uses: int = 1
    ahead: bool = False
    reloads_from_host: bool = False


# ---- the function by itself


def adapters_of(*adapters: IdleAdapter) -> IdleAdapters:
    idle = IdleAdapters()
    for adapter in adapters:
        idle.add(adapter)
    return idle


def blocks_of(*last_uses: int, num_blocks: int = 100, shared: bool = True) -> CachedBlocks:
    cached = CachedBlocks(num_blocks)
    for use in last_uses:
        cached.add(1000 + use, use, "some adapter", shared=shared)
    return cached


def name_of(victim: Victim | None) -> str | int | None:
    """An adapter's version, or when a block was last used."""
    return victim.last_use if isinstance(victim, CachedBlock) else victim and victim.version


A3, A7, AHEAD = Idle(version="a3", last_use=3), Idle(version="a7", last_use=7), Idle(version="x", ahead=True)


@pytest.mark.parametrize(
    ("adapters", "cached", "expected"),
    [
        (NO_ADAPTERS, NO_BLOCKS, None),
        (adapters_of(A3, A7), NO_BLOCKS, "a3"),
        (NO_ADAPTERS, blocks_of(2, 5), 2),
        (adapters_of(A3), blocks_of(5), "a3"),
        (adapters_of(A7), blocks_of(5), 5),
        (adapters_of(A3, AHEAD), NO_BLOCKS, "x"),
        (adapters_of(AHEAD), blocks_of(1), "x"),
        # Blocks that nobody ever shared have more than a quarter of the memory: one of them goes.
        (adapters_of(A3), blocks_of(5, 6, num_blocks=4, shared=False), 5),
        (adapters_of(A3, AHEAD), blocks_of(5, 6, num_blocks=4, shared=False), 5),
        (adapters_of(A3), blocks_of(5, num_blocks=4, shared=False), "a3"),
    ],
)
def test_the_next_victim(adapters: IdleAdapters, cached: CachedBlocks, expected: object) -> None:
    assert name_of(next_victim(adapters, cached, short=1)) == expected
    assert next_victim(adapters, cached, short=0) is None


def test_among_blocks_the_oldest_goes_unless_unshared_ones_have_too_much() -> None:
    cached = blocks_of(1, num_blocks=8)
    for use in (2, 3):
        cached.add(use, use, None, shared=False)
    assert name_of(cached.first) == 1
    cached.add(4, 4, None, shared=False)
    assert name_of(cached.first) == 2
    cached.remove(2)
    assert name_of(cached.first) == 1


def test_what_a_policy_can_see_of_an_adapter_and_of_a_block() -> None:
    memory = Arena(num_pages=40, page_bytes=PAGE, block_size=4, host_bytes=8 * PAGE)
    table = memory.table
    table.add("a", 2 * PAGE)
    assert table.begin_read("a")
    table.read_ended("a")
    for _ in range(3):
        use(table, "a")
    cache(memory, 7, adapter="a")
    adapter, block = table.serving.idle.first, memory.pool.cached.first
    assert adapter is not None
    assert block is not None
    assert (adapter.num_bytes, adapter.num_uses, adapter.reloads_from_host) == (2 * PAGE, 3, True)
    assert (block.adapter, block.shared, block.last_use > adapter.last_use) == ("a", False, True)
    assert block.adapter in table.serving.idle.resident
    table.unstage("a")
    assert not adapter.reloads_from_host
    table.serving.evict(adapter)
    assert block.adapter not in table.serving.idle.resident


def test_the_blocks_of_a_request_are_older_than_its_adapter() -> None:
    """So that LRU never leaves the blocks of an adapter in memory that is not: they go before it."""
    memory = Arena(num_pages=40, page_bytes=PAGE, block_size=4)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), memory)
    scheduler.adapters.add("a", 2 * PAGE)
    params = SamplingParams(max_tokens=9)
    scheduler.add(EngineRequest(request_id="1", prompt_token_ids=[5] * 9, params=params, adapter="a"))
    while scheduler.has_work():
        plan = scheduler.schedule()
        for load in plan.adapter_loads:
            scheduler.adapter_loaded(load.version)
        if plan.chunks:
            scheduler.update(plan, {chunk.request_id: 7 for chunk in plan.chunks if chunk.samples})
    [adapter] = memory.table.serving.idle
    assert len(memory.pool.cached) == 4
    assert all(block.last_use < adapter.last_use for block in memory.pool.cached)


# ---- through the memories that ask for victims


def use(table: AdapterTable, version: str) -> None:
    """A request that ends at once, for which the version is loaded if need be."""
    table.enter(version)
    assert table.acquire(version)
    if version in table.serving.loading:
        table.loaded(version)
    table.leave(version, pinned=True)


def load_ahead(table: AdapterTable, version: str) -> None:
    assert table.load_ahead(version)
    table.loaded(version)


def cache(memory: Arena, token: int, adapter: str | None = None) -> None:
    """A request whose one block stays in the prefix cache, where another one finds it."""
    found = memory.pool.allocate(1)
    assert found is not None
    memory.pool.publish(adapter, [token] * 4, found, 0, 1)
    memory.pool.release(found)


def share(memory: Arena, token: int) -> None:
    found = memory.pool.match(None, [token] * 5)
    memory.pool.share(found)
    memory.pool.release(found)


def is_cached(memory: Arena, token: int) -> bool:
    return bool(memory.pool.match(None, [token] * 5))


def cpu_table(**sizes: int) -> AdapterTable:
    """Room for three adapters of one page."""
    table = AdapterTable(ByteBudget(3 * PAGE))
    for version, size in sizes.items():
        table.add(version, size * PAGE)
    return table


def read(table: AdapterTable, version: str, *, ahead: bool = False) -> None:
    assert table.begin_read(version, ahead=ahead)
    table.read_ended(version)


def host_table(**sizes: int) -> AdapterTable:
    """Three pages in the host tier, for adapters of one page."""
    table = AdapterTable(ByteBudget(100 * PAGE), host=HostRoom(3 * PAGE))
    for version, size in sizes.items():
        table.add(version, size * PAGE)
    return table


def full_arena(*order: str, num_pages: int = 5) -> Arena:
    """An arena in which adapters (letters) and cached blocks (digits) of one page each were last used in this
    order, and all other pages are held."""
    memory = Arena(num_pages=num_pages, page_bytes=PAGE, block_size=4)
    for version in ("a", "b", "c", "d", "new"):
        memory.table.add(version, PAGE)
    for what in order:
        if what.isdigit():
            cache(memory, int(what))
        else:
            use(memory.table, what)
    for what in order:
        share(memory, int(what)) if what.isdigit() else use(memory.table, what)
    assert memory.pool.allocate(memory.pool.num_empty) is not None
    memory.take_block_moves()
    return memory


def victims_for_adapter(memory: Arena) -> list[str]:
    before = {token for token in "123" if is_cached(memory, int(token))}
    memory.table.enter("new")
    assert memory.table.acquire("new")
    memory.take_block_moves()
    gone = sorted(token for token in before if not is_cached(memory, int(token)))
    return memory.table.serving.take_evictions() + gone


def victims_for_block(memory: Arena) -> list[str]:
    before = {token for token in "123" if is_cached(memory, int(token))}
    assert memory.pool.allocate(1) is not None
    gone = sorted(token for token in before if not is_cached(memory, int(token)))
    return memory.table.serving.take_evictions() + gone


def check_the_least_recently_used_goes_first() -> None:
    table = cpu_table(a=1, b=1, c=1, new=1)
    for version in ("a", "b", "c", "a", "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["b"]


def check_the_least_recently_copied_leaves_the_host_first() -> None:
    table = host_table(a=1, b=1, c=1, new=1)
    for version in "abc":
        read(table, version)
    use(table, "a")
    read(table, "new")
    assert table.host.take_evictions() == ["b"]


def check_the_oldest_block_is_emptied_first() -> None:
    memory = full_arena("1", "2", "3")
    assert victims_for_block(memory) == ["1"]
    assert victims_for_adapter(memory) == ["2"]


def check_what_was_loaded_ahead_goes_first() -> None:
    table = cpu_table(a=1, b=1, ahead=1, new=1)
    for version in "ab":
        use(table, version)
    load_ahead(table, "ahead")
    use(table, "new")
    assert table.serving.take_evictions() == ["ahead"]


def check_what_was_read_ahead_leaves_the_host_first() -> None:
    table = host_table(a=1, b=1, ahead=1, new=1)
    for version in "ab":
        read(table, version)
    read(table, "ahead", ahead=True)
    read(table, "new")
    assert table.host.take_evictions() == ["ahead"]


def check_what_was_loaded_ahead_goes_before_an_older_block() -> None:
    memory = Arena(num_pages=3, page_bytes=PAGE, block_size=4)
    memory.table.add("ahead", PAGE)
    cache(memory, 1)
    share(memory, 1)
    load_ahead(memory.table, "ahead")
    assert memory.pool.allocate(2) is not None
    assert memory.table.serving.take_evictions() == ["ahead"]
    assert is_cached(memory, 1)


def check_an_older_block_goes_before_a_younger_adapter() -> None:
    assert victims_for_adapter(full_arena("1", "a", "2", "b")) == ["1"]
    assert victims_for_block(full_arena("1", "a", "2", "b")) == ["1"]


def check_an_older_adapter_goes_before_a_younger_block() -> None:
    assert victims_for_adapter(full_arena("a", "1", "b", "2")) == ["a"]
    assert victims_for_block(full_arena("a", "1", "b", "2")) == ["a"]


def check_what_is_in_use_stays() -> None:
    table = cpu_table(pinned=1, kept=1, idle=1, new=1)
    for version in ("pinned", "kept", "idle"):
        use(table, version)
    table.enter("pinned")
    assert table.acquire("pinned")
    assert table.keep("kept")
    use(table, "new")
    assert table.serving.take_evictions() == ["idle"]


def check_what_a_device_copies_stays_in_the_host() -> None:
    table = host_table(copied=1, idle=1, other=1, new=1)
    for version in ("copied", "idle", "other"):
        read(table, version)
    table.enter("copied")
    assert table.acquire("copied")
    read(table, "new")
    assert table.host.take_evictions() == ["idle"]


def check_no_more_goes_than_is_needed() -> None:
    table = cpu_table(a=1, b=1, c=1, one=1, two=2)
    for version in ("a", "b", "c", "one"):
        use(table, version)
    assert table.serving.take_evictions() == ["a"]
    use(table, "two")
    assert table.serving.take_evictions() == ["b", "c"]


def check_no_more_leaves_the_host_or_the_arena_than_is_needed() -> None:
    table = host_table(a=1, b=1, c=1, new=1)
    for version in ("a", "b", "c", "new"):
        read(table, version)
    assert table.host.take_evictions() == ["a"]
    assert victims_for_adapter(full_arena("a", "b", "c", num_pages=4)) == ["a"]
    assert victims_for_block(full_arena("a", "b", "c", num_pages=4)) == ["a"]


Check = Callable[[], None]
CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS)
def test_the_policy(check: Check) -> None:
    check()


# ---- mutants of the policy


class Mutation:
    """Changes to the policy, for as long as a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def choose(self, choice: Callable[[IdleAdapters, CachedBlocks, int], Victim | None]) -> None:
        for module in (arena, blocks, host_room, room):
            self.monkeypatch.setattr(
                module, "next_victim", lambda adapters, cached, short: choice(adapters, cached, short)
            )

    def set(self, of: type, name: str, value: object) -> None:
        self.monkeypatch.setattr(of, name, value)


def newest_adapter_first(mutation: Mutation) -> None:
    mutation.set(IdleAdapters, "first", property(lambda self: next(reversed(list(self)), None)))


def newest_block_first(mutation: Mutation) -> None:
    def newest(cached: CachedBlocks) -> CachedBlock | None:
        return max(cached, key=lambda block: block.last_use, default=None)

    mutation.set(CachedBlocks, "first", property(newest))


def ahead_is_not_first(mutation: Mutation) -> None:
    def add(self: IdleAdapters, adapter: IdleAdapter) -> None:
        self._adapters[adapter.version] = adapter
        self.num_bytes += adapter.num_bytes

    mutation.set(IdleAdapters, "add", add)


def ahead_counts_as_just_used(mutation: Mutation) -> None:
    def choose(adapters: IdleAdapters, cached: CachedBlocks, short: int) -> Victim | None:
        adapter, block = adapters.first, cached.first
        is_ahead = adapter is not None and adapter.ahead
        return block if is_ahead and block else next_victim(adapters, cached, short=short)

    mutation.choose(choose)


def adapters_before_blocks(mutation: Mutation) -> None:
    mutation.choose(lambda adapters, cached, short: (adapters.first or cached.first) if short > 0 else None)


def blocks_before_adapters(mutation: Mutation) -> None:
    mutation.choose(lambda adapters, cached, short: (cached.first or adapters.first) if short > 0 else None)


def pinned_ones_too(mutation: Mutation) -> None:
    def pin(self: Tier, copy: object) -> None:
        """Do the same as `Tier.pin`, but the copy goes on to be a candidate."""
        copy.pins += 1  # type: ignore[attr-defined]

    mutation.set(Tier, "pin", pin)


def pinned_ones_too_without_a_check(mutation: Mutation) -> None:
    pinned_ones_too(mutation)
    evict = Tier.evict

    def evict_anything(self: Tier, victim: IdleAdapter) -> None:
        victim.pins = 0  # type: ignore[attr-defined]
        evict(self, victim)

    mutation.set(Tier, "evict", evict_anything)


def more_than_needed(mutation: Mutation) -> None:
    mutation.choose(lambda adapters, cached, short: next_victim(adapters, cached, short=1))


def all_that_is_idle(mutation: Mutation) -> None:
    evict = Tier.evict

    def evict_all(self: Tier, victim: IdleAdapter) -> None:
        for each in list(self.idle):
            evict(self, each)

    mutation.set(Tier, "evict", evict_all)


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        (newest_adapter_first, check_the_least_recently_used_goes_first),
        (newest_adapter_first, check_the_least_recently_copied_leaves_the_host_first),
        (newest_block_first, check_the_oldest_block_is_emptied_first),
        (ahead_is_not_first, check_what_was_loaded_ahead_goes_first),
        (ahead_is_not_first, check_what_was_read_ahead_leaves_the_host_first),
        (ahead_counts_as_just_used, check_what_was_loaded_ahead_goes_before_an_older_block),
        (adapters_before_blocks, check_an_older_block_goes_before_a_younger_adapter),
        (blocks_before_adapters, check_an_older_adapter_goes_before_a_younger_block),
        (pinned_ones_too, check_what_is_in_use_stays),
        (pinned_ones_too_without_a_check, check_what_is_in_use_stays),
        (pinned_ones_too_without_a_check, check_what_a_device_copies_stays_in_the_host),
        (more_than_needed, check_no_more_goes_than_is_needed),
        (all_that_is_idle, check_no_more_leaves_the_host_or_the_arena_than_is_needed),
    ],
)
def test_a_mutant_is_caught(
    mutate: Callable[[Mutation], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(Mutation(monkeypatch))
    with pytest.raises(AssertionError):
        check()
