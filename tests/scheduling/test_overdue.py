"""Reads and loads that do not end: what goes on beside them, and how their late ends are accounted for."""

from __future__ import annotations

import pytest

from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_reads import HostReads
from loraplex.scheduling.host_room import HostRoom
from loraplex.scheduling.memory import Memory, SeparateMemory
from loraplex.scheduling.room import ByteBudget
from loraplex.scheduling.scheduler import Scheduler

PAGE = 4096


class Bench:
    """A scheduler whose reads and loads end when they are asked for, but for those that hang."""

    def __init__(self, memory: Memory, *, cold_start: ColdStart = ColdStart.OVERLAP, **sizes: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=200, cold_start=cold_start), memory)
        self.sizes = sizes
        self.hung: set[str] = set()
        self.ended: dict[str, str | None] = {}
        for version, size in sizes.items():
            self.scheduler.adapters.add(version, size * PAGE)

    def ask(self, request_id: str, adapter: str | None, *, tokens: int = 2) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], params=params, adapter=adapter)
        )

    def hang(self, *versions: str) -> None:
        """Ask for these, whose reads begin and are then overdue."""
        self.hung |= set(versions)
        for version in versions:
            self.ask(f"hung {version}", version)
        self.run(1)
        for version in versions:
            self.overdue(version)

    def overdue(self, version: str) -> None:
        self.scheduler.adapter_overdue(version, "it does not come")
        self.scheduler.check_integrity()

    def run(self, num_steps: int = 20) -> None:
        scheduler = self.scheduler
        for _ in range(num_steps):
            plan = scheduler.schedule()
            scheduler.check_integrity()
            for version in {read.version for read in plan.adapter_reads} - self.hung:
                scheduler.adapter_read(version)
            for load in plan.adapter_loads:
                if load.source is not None or load.version not in self.hung:
                    scheduler.adapter_loaded(load.version)
            if plan.chunks:
                updates = scheduler.update(plan, {c.request_id: 5 for c in plan.chunks if c.samples})
                self.ended |= {u.request_id: None for u in updates if u.finish_reason is not None}
            self.ended |= {failure.request_id: failure.error for failure in scheduler.take_failures()}

    def bytes_of(self, *versions: str) -> int:
        return sum(self.sizes[version] * PAGE for version in versions)


def arena(*, host_pages: int, num_pages: int = 60) -> Arena:
    return Arena(num_pages=num_pages, page_bytes=PAGE, block_size=4, host_bytes=host_pages * PAGE)


def test_two_reads_that_hang_hold_up_no_other_adapter() -> None:
    bench = Bench(arena(host_pages=20), a=2, b=2, fine=2)
    bench.hang("a", "b")
    bench.ask("waits", "fine")
    bench.run()
    assert bench.ended == {"hung a": "it does not come", "hung b": "it does not come", "waits": None}
    assert not bench.scheduler.has_work()


@pytest.mark.parametrize("error", [None, "its file is cut short"])
def test_a_read_that_ends_late_is_accounted_for_once(error: str | None) -> None:
    bench = Bench(memory := arena(host_pages=20), a=2, b=2, c=2, d=2)
    bench.hang("a", "b")
    bench.hung |= {"c", "d"}
    for version in "cd":
        bench.ask(version, version)
    bench.run(2)
    # These two are under way: the late end of the others makes room for no third one.
    bench.scheduler.adapter_read("a", error)
    bench.scheduler.adapter_read("b", error)
    bench.scheduler.check_integrity()
    staged = () if error else ("a", "b")
    assert memory.table.host.resident == set(staged)
    assert memory.table.host.room.used_bytes == bench.bytes_of(*staged, "c", "d")
    bench.hung.clear()
    for version in "cd":
        bench.scheduler.adapter_read(version)
    for version in "ab":
        bench.ask(f"again {version}", version)
    bench.run()
    assert {name: bench.ended[name] for name in ("c", "d", "again a", "again b")} == dict.fromkeys(
        ("c", "d", "again a", "again b")
    )


def test_what_finds_no_room_beside_reads_that_hang_is_loaded_from_disk() -> None:
    bench = Bench(memory := arena(host_pages=10), hung=6, large=8, small=3)
    bench.hang("hung")
    bench.ask("large", "large")
    bench.ask("small", "small")
    bench.run()
    assert bench.ended["large"] is None
    assert bench.ended["small"] is None
    assert memory.table.host.resident == {"small"}
    bench.scheduler.adapters.add("large", 8 * PAGE)
    assert not memory.table.can_load("large"), "it is staged again when it is added again"


def test_a_kept_adapter_that_hangs_does_not_keep_the_others_out() -> None:
    bench = Bench(memory := arena(host_pages=20), cold_start=ColdStart.CACHED, a=2, b=2, c=2)
    bench.hung = {"a"}
    bench.run(3)
    bench.overdue("a")
    bench.run()
    assert memory.table.serving.resident == {"b", "c"}
    assert not bench.scheduler.has_work()


def test_a_request_that_outgrows_memory_does_not_wait_for_a_load_that_hangs() -> None:
    # Too large for the host: it is loaded straight to the device, where it takes all but 10 pages.
    bench = Bench(arena(host_pages=4, num_pages=30), hung=20)
    bench.hang("hung")
    bench.ask("grows", None, tokens=80)
    bench.run(100)
    assert "too few for this request" in str(bench.ended["grows"])


@pytest.mark.parametrize("shared", [True, False])
def test_requests_without_room_beside_a_load_that_hangs_fail_and_others_go_on(shared: bool) -> None:
    memory: Memory = SeparateMemory(num_blocks=60, block_size=4, adapter_bytes=12 * PAGE)
    if shared:
        memory = arena(host_pages=1, num_pages=20)
    bench = Bench(memory, hung=8, large=12, small=2)
    bench.hang("hung")
    bench.ask("stream", None, tokens=30)
    bench.ask("large", "large")
    bench.ask("small", "small")
    bench.run(60)
    assert "no memory for the request" in str(bench.ended["large"])
    assert bench.ended["stream"] is bench.ended["small"] is None
    bench.scheduler.adapter_loaded("hung")
    bench.hung.clear()
    bench.ask("large again", "large")
    bench.run()
    assert bench.ended["large again"] is None


def test_the_first_of_many_that_are_read_ahead_is_read_first() -> None:
    table = AdapterTable(ByteBudget(10_000 * PAGE), host=HostRoom(10_000 * PAGE))
    reads = HostReads(table)
    versions = [f"v{number}" for number in range(10_000)]
    for version in versions:
        table.add(version, PAGE)
    for version in [*versions, *reversed(versions)]:
        reads.stage_ahead(version)
    begun = []
    while reads.ahead:
        reads.fetch_ahead()
        for read in reads.take():
            begun.append(read.version)
            table.read_ended(read.version)
    assert begun == versions
