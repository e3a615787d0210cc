"""Adapters that are asked for often: counted, brought in ahead, and the first to go."""

from __future__ import annotations

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.popularity import Popularity
from loraplex.scheduling.scheduler import Scheduler

PAGE = 4096
VERSIONS = ("a", "b", "c", "d")


def test_who_was_asked_for_long_ago_falls_behind() -> None:
    popularity = Popularity()
    for _ in range(100):
        popularity.asked("once liked")
    for index in range(4000):
        popularity.asked("liked" if index % 10 == 0 else f"other {index}")
    assert popularity.most_asked(1) == ["liked"]
    assert len(popularity.most_asked(10_000)) < 3000, "nothing is ever forgotten"


def test_the_forgotten_are_not_named() -> None:
    popularity = Popularity()
    popularity.asked("a")
    popularity.asked("b")
    popularity.asked("b")
    assert popularity.most_asked(5) == ["b", "a"]
    popularity.forget("b")
    assert popularity.most_asked(5) == ["a"]


class Driver:
    """A scheduler whose loads and reads end as soon as they are decided."""

    def __init__(self, num_pages: int, *, loads_popular: bool = True) -> None:
        self.arena = Arena(num_pages=num_pages, page_bytes=PAGE, block_size=4, host_bytes=100 * PAGE)
        config = SchedulerConfig(max_model_len=16, loads_popular=loads_popular)
        self.scheduler = Scheduler(config, self.arena)
        self.loads: list[str] = []
        for version in VERSIONS:
            self.scheduler.adapters.add(version, 4 * PAGE)

    def ask(self, version: str | None, name: str) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[1, 2, 3],
                params=SamplingParams(max_tokens=2, ignore_eos=True),
                adapter=version,
            )
        )
        for _ in range(10):
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            for read in plan.adapter_reads:
                self.scheduler.adapter_read(read.version)
            for load in plan.adapter_loads:
                self.loads.append(load.version)
                self.scheduler.adapter_loaded(load.version)
            if plan.chunks:
                self.scheduler.update(plan, {c.request_id: 5 for c in plan.chunks if c.samples})

    @property
    def resident(self) -> set[str]:
        return self.arena.table.serving.resident


def evict(driver: Driver, version: str) -> None:
    """Push one out by asking for the others."""
    while version in driver.resident:
        victim = driver.arena.table.serving.idle.first
        assert victim is not None
        driver.arena.table.serving.evict(victim)
    driver.arena.table.serving.take_evictions()


def test_a_popular_adapter_comes_back_before_it_is_asked_for() -> None:
    driver = Driver(40)
    for number in range(3):
        driver.ask("a", f"a{number}")
    evict(driver, "a")
    driver.ask(None, "base")
    assert "a" in driver.resident
    assert driver.loads == ["a", "a"]


def test_without_the_option_nothing_comes_unasked() -> None:
    driver = Driver(40, loads_popular=False)
    driver.ask("a", "a")
    evict(driver, "a")
    driver.ask(None, "base")
    assert driver.resident == set()


def test_what_nobody_asked_for_takes_spare_memory_only_and_goes_first() -> None:
    driver = Driver(14)  # three adapters of four pages, and two pages for KV
    for number, version in enumerate("aabbbc"):
        driver.ask(version, str(number))
    for version in "abc":
        evict(driver, version)
    driver.ask(None, "base")
    assert driver.resident == {"a", "b"}, "not the two most popular, or no quarter of the pages is left"
    driver.ask("c", "asks for c")
    driver.ask("d", "asks for d")
    assert {"c", "d"} <= driver.resident, "one that was asked for went before one that was not"
