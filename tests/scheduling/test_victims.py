"""Victims on a CPU, in the host tier and in the arena, which all ask the same policy.

Each check below is run with the policy as it is, where it has to hold, and with the mutant that it is there
to catch, where it has to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import pytest

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling import arena, blocks, host_kv, host_room, room, victims
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.adapter_tier import Copy, Tier
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_kv import HostKV
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
    Uses,
    Victim,
    blocks_to_save,
    next_victim,
)

PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Idle:
    version: str
    num_bytes: int = 1
    last_use: int = 0
    uses: Uses = field(default_factory=Uses)
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
    if victim is None:
        return None
    return victim.last_use if isinstance(victim, CachedBlock) else victim.version


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
    assert (adapter.num_bytes, adapter.uses.total, adapter.reloads_from_host) == (2 * PAGE, 3, True)
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


def check_of_adapters_used_once_the_oldest_goes_first() -> None:
    table = cpu_table(a=1, b=1, c=1, new=1)
    for version in ("b", "a", "c", "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["b"]


def check_what_is_used_often_stays() -> None:
    table = cpu_table(often=1, b=1, c=1, new=1)
    for version in ("often", "often", "b", "c", "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["b"]


def check_old_uses_count_less() -> None:
    table = cpu_table(once_popular=1, b=1, always=1, new=1)
    for version in (*["once_popular"] * 40, *["always"] * 2500, *["b"] * 3, "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["once_popular"]


def check_uses_before_an_eviction_count() -> None:
    table = cpu_table(back=1, b=1, c=1, new=1)
    for _ in range(3):
        use(table, "back")
    table.serving.evict(next(iter(table.serving.idle)))
    table.serving.take_evictions()
    for version in ("back", "b", "b", "c", "c", "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["b"]


def check_of_two_that_reload_alike_the_larger_goes() -> None:
    table = cpu_table(small=1, large=2, new=1)
    table.predict_reloads(lambda adapter: 1.0)
    for version in ("small", "large", "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["large"]


def check_what_reloads_faster_goes_first() -> None:
    table = cpu_table(slow=1, fast=1, b=1, new=1)
    table.predict_reloads(lambda adapter: 1.0 if adapter.version == "fast" else 9.0)
    for version in ("slow", "b", "fast", "new"):
        use(table, version)
    assert table.serving.take_evictions() == ["fast"]


def device_table(*versions: str) -> AdapterTable:
    """A device with room for two adapters of one page, and a host with room for all; reading one from disk
    takes 30 times as long as copying it. All of them are read, and the first two used in turn."""
    table = AdapterTable(ByteBudget(2 * PAGE), host=HostRoom(9 * PAGE))
    table.predict_reloads(lambda adapter: 1.0 if adapter.reloads_from_host else 30.0)
    for version in versions:
        table.add(version, PAGE)
        read(table, version)
    for version in versions[:2]:
        use(table, version)
    return table


def check_what_the_host_has_goes_before_what_is_on_disk() -> None:
    table = device_table("disk", "host", "new")
    table.unstage("disk")
    use(table, "new")
    assert table.serving.take_evictions() == ["host"]


def check_what_the_host_has_again_is_worth_less_again() -> None:
    table = device_table("back", "host", "new")
    table.unstage("back")
    read(table, "back")
    use(table, "new")
    assert table.serving.take_evictions() == ["back"]


def check_what_was_read_for_a_request_waits_in_the_host() -> None:
    table = host_table(a=1, b=1, read=1, new=1)
    for version in "ab":
        read(table, version)
        use(table, version)
    read(table, "read")
    read(table, "new")
    assert table.host.take_evictions() == ["a"]


def check_what_is_copied_often_stays_in_the_host() -> None:
    table = host_table(a=1, b=1, c=1, new=1)
    for version in "abc":
        read(table, version)
    use(table, "a")
    table.serving.evict(next(iter(table.serving.idle)))
    for version in "abc":
        use(table, version)
    read(table, "new")
    assert table.host.take_evictions() == ["b"]


def check_the_oldest_block_is_emptied_first() -> None:
    memory = full_arena("1", "2", "3")
    assert victims_for_block(memory) == ["1"]
    assert victims_for_adapter(memory) == ["2"]


def check_what_was_loaded_ahead_goes_first() -> None:
    table = cpu_table(a=1, b=1, ahead=1, new=1)
    for version in ("ahead", "ahead"):
        use(table, version)
    table.serving.evict(next(iter(table.serving.idle)))
    table.serving.take_evictions()
    for version in "ab":
        use(table, version)
    load_ahead(table, "ahead")
    use(table, "new")
    assert table.serving.take_evictions() == ["ahead"]


def check_what_was_read_ahead_leaves_the_host_first() -> None:
    table = host_table(a=1, b=1, ahead=1, new=1)
    for version in ("a", "b", "ahead"):
        read(table, version)
        use(table, version)
    table.unstage("ahead")
    table.host.take_evictions()
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


def filled_host(*nodes: int) -> HostKV:
    """A host tier of as many blocks, whose contents were copied there in this order."""
    host = HostKV(len(nodes), PAGE)
    for node in nodes:
        number = host.reserve(node, (0, (node,)), None, spared=())
        assert number is not None
        host.copied_out(number)
    return host


def check_the_least_recently_used_block_leaves_the_host_first() -> None:
    host = filled_host(1, 2, 3)
    host.touch(1)
    assert host.reserve(4, (0, (4,)), None, spared=()) is not None
    assert [node for node in (1, 2, 3) if not host.holds(node)] == [2]


def check_blocks_that_are_being_saved_stay_in_the_host() -> None:
    host = filled_host(1, 2, 3)
    assert host.reserve(4, (0, (4,)), None, spared={1, 2}) is not None
    assert [node for node in (1, 2, 3) if not host.holds(node)] == [3]
    assert host.reserve(5, (0, (5,)), None, spared={1, 2}) is None


def check_only_shared_blocks_that_go_next_are_saved() -> None:
    cached = blocks_of(*range(2, 102))
    cached.add(1, 1, None, shared=False)
    saved = victims.blocks_to_save(cached, lambda contents: False)
    assert saved == [1000 + use for use in range(2, 34)]


def check_what_the_host_holds_is_not_saved_again() -> None:
    saved = victims.blocks_to_save(blocks_of(1, 2, 3), lambda contents: contents == 1002)
    assert saved == [1001, 1003]


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


def first_by(mutation: Mutation, key: Callable[[IdleAdapters, IdleAdapter], tuple[float, ...]]) -> None:
    def first(self: IdleAdapters) -> IdleAdapter | None:
        return min(self, key=lambda adapter: key(self, adapter), default=None)

    mutation.set(IdleAdapters, "first", property(first))


def newest_adapter_first(mutation: Mutation) -> None:
    first_by(mutation, lambda idle, adapter: (-adapter.last_use,))


def most_valuable_first(mutation: Mutation) -> None:
    first_by(mutation, lambda idle, adapter: (-idle.value(adapter),))


def ahead_is_not_first(mutation: Mutation) -> None:
    first_by(mutation, lambda idle, adapter: (idle.value(adapter), adapter.last_use))


def value_by(mutation: Mutation, value: Callable[[IdleAdapters, IdleAdapter], float]) -> None:
    mutation.set(IdleAdapters, "value", value)


def least_recently_used_first(mutation: Mutation) -> None:
    value_by(mutation, lambda idle, adapter: 0.0)


def uses_do_not_count(mutation: Mutation) -> None:
    value_by(mutation, lambda idle, adapter: idle.reload_s(adapter) / adapter.num_bytes)


def uses_never_fade(mutation: Mutation) -> None:
    value_by(mutation, lambda idle, adapter: math.log2(adapter.uses.total))


def only_the_last_use_counts(mutation: Mutation) -> None:
    def add(self: Uses, when: int) -> None:
        self.score = when / 512

    mutation.set(Uses, "add", add)


def an_eviction_forgets_uses(mutation: Mutation) -> None:
    evict = Tier.evict

    def evict_and_forget(self: Tier, victim: IdleAdapter) -> None:
        evict(self, victim)
        victim.uses = Uses()  # type: ignore[misc]

    mutation.set(Tier, "evict", evict_and_forget)


def bytes_do_not_count(mutation: Mutation) -> None:
    value_by(mutation, lambda idle, adapter: adapter.uses.score + math.log2(idle.reload_s(adapter)))


def reloads_do_not_count(mutation: Mutation) -> None:
    value_by(mutation, lambda idle, adapter: adapter.uses.score - math.log2(adapter.num_bytes))


def every_reload_comes_from_disk(mutation: Mutation) -> None:
    mutation.set(Copy, "reloads_from_host", False)


def changes_in_the_host_go_unnoticed(mutation: Mutation) -> None:
    mutation.set(Tier, "revalue", lambda self, copy: None)


def reads_go_unnoticed(mutation: Mutation) -> None:
    end = Tier.end

    def end_silently(self: Tier, copy: Copy) -> None:
        on_change, self.on_change = self.on_change, lambda version: None
        end(self, copy)
        self.on_change = on_change

    mutation.set(Tier, "end", end_silently)


def a_read_is_no_use(mutation: Mutation) -> None:
    begin = Tier.begin

    def begin_uncounted(self: Tier, copy: Copy, spare_blocks: int = 0, *, ahead: bool = False) -> bool:
        score = copy.uses.score
        begins = begin(self, copy, spare_blocks, ahead=ahead)
        copy.uses.score, copy.awaited = score, False
        return begins

    mutation.set(Tier, "begin", begin_uncounted)


def host_block(mutation: Mutation, choice: Callable[[list[int], Collection[int]], list[int]]) -> None:
    def choose(idle: Iterable[int], spared: Collection[int]) -> int | None:
        return next(iter(choice(list(idle), spared)), None)

    mutation.monkeypatch.setattr(host_kv, "next_host_victim", choose)


def newest_host_block_first(mutation: Mutation) -> None:
    host_block(mutation, lambda idle, spared: [each for each in reversed(idle) if each not in spared])


def spared_host_blocks_too(mutation: Mutation) -> None:
    host_block(mutation, lambda idle, spared: idle)


def unspared_host_blocks_stay(mutation: Mutation) -> None:
    host_block(mutation, lambda idle, spared: [each for each in idle if each in spared])


def save_by(mutation: Mutation, choice: Callable[[CachedBlocks, Callable[[int], bool]], list[int]]) -> None:
    mutation.monkeypatch.setattr(victims, "blocks_to_save", choice)


def all_shared_blocks_are_saved(mutation: Mutation) -> None:
    save_by(mutation, lambda cached, is_held: [each for each in cached.shared() if not is_held(each)])


def unshared_blocks_are_saved(mutation: Mutation) -> None:
    save_by(mutation, lambda cached, is_held: [each.contents for each in cached][:32])


def held_blocks_are_saved(mutation: Mutation) -> None:
    save_by(mutation, lambda cached, is_held: blocks_to_save(cached, lambda contents: False))


def newest_block_first(mutation: Mutation) -> None:
    def newest(cached: CachedBlocks) -> CachedBlock | None:
        return max(cached, key=lambda block: block.last_use, default=None)

    mutation.set(CachedBlocks, "first", property(newest))


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
        (newest_adapter_first, check_of_adapters_used_once_the_oldest_goes_first),
        (newest_adapter_first, check_what_is_copied_often_stays_in_the_host),
        (most_valuable_first, check_what_is_used_often_stays),
        (least_recently_used_first, check_what_reloads_faster_goes_first),
        (uses_do_not_count, check_what_is_used_often_stays),
        (uses_do_not_count, check_what_is_copied_often_stays_in_the_host),
        (only_the_last_use_counts, check_what_is_used_often_stays),
        (uses_never_fade, check_old_uses_count_less),
        (an_eviction_forgets_uses, check_uses_before_an_eviction_count),
        (bytes_do_not_count, check_of_two_that_reload_alike_the_larger_goes),
        (reloads_do_not_count, check_what_reloads_faster_goes_first),
        (every_reload_comes_from_disk, check_what_the_host_has_goes_before_what_is_on_disk),
        (changes_in_the_host_go_unnoticed, check_what_the_host_has_goes_before_what_is_on_disk),
        (reads_go_unnoticed, check_what_the_host_has_again_is_worth_less_again),
        (a_read_is_no_use, check_what_was_read_for_a_request_waits_in_the_host),
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
        (newest_host_block_first, check_the_least_recently_used_block_leaves_the_host_first),
        (spared_host_blocks_too, check_blocks_that_are_being_saved_stay_in_the_host),
        (unspared_host_blocks_stay, check_blocks_that_are_being_saved_stay_in_the_host),
        (all_shared_blocks_are_saved, check_only_shared_blocks_that_go_next_are_saved),
        (unshared_blocks_are_saved, check_only_shared_blocks_that_go_next_are_saved),
        (held_blocks_are_saved, check_what_the_host_holds_is_not_saved_again),
    ],
)
def test_a_mutant_is_caught(
    mutate: Callable[[Mutation], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(Mutation(monkeypatch))
    with pytest.raises(AssertionError):
        check()
