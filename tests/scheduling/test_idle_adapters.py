"""The order of idle adapters against a search through all of them, and the costs that it goes by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.drift import DriftWatch
from loraplex.perf.line import Line
from loraplex.perf.subject import Subject
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.victims import IdleAdapter, IdleAdapters, Uses


@dataclass(kw_only=True, eq=False)
class Idle:
    version: str
    num_bytes: int
    reload_s: float
    last_use: int = 0
    uses: Uses = field(default_factory=Uses)
    ahead: bool = False
    reloads_from_host: bool = False


def reload_s(adapter: IdleAdapter) -> float:
    assert isinstance(adapter, Idle)
    return adapter.reload_s


NUM_ADAPTERS = 12


@given(
    sizes=st.lists(st.integers(1, 9), min_size=NUM_ADAPTERS, max_size=NUM_ADAPTERS),
    seconds=st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=NUM_ADAPTERS, max_size=NUM_ADAPTERS),
    events=st.lists(st.tuples(st.integers(0, NUM_ADAPTERS - 1), st.booleans()), max_size=400),
)
def test_the_first_is_the_one_of_least_value(
    sizes: list[int], seconds: list[float], events: list[tuple[int, bool]]
) -> None:
    """Each event ends or begins the idle time of one adapter; now and then one that was loaded ahead."""
    adapters = [
        Idle(version=f"a{number}", num_bytes=size, reload_s=reload)
        for number, (size, reload) in enumerate(zip(sizes, seconds, strict=True))
    ]
    idle = IdleAdapters()
    idle.reload_s = reload_s
    for when, (number, ahead) in enumerate(events, 1):
        adapter = adapters[number]
        if adapter.version in idle:
            idle.remove(adapter)
        else:
            adapter.ahead, adapter.last_use = ahead, 0 if ahead else when
            if not ahead:
                adapter.uses.add(when)
            idle.add(adapter)
        in_order = sorted(
            idle, key=lambda each: (not each.ahead, idle.value(each), each.last_use, each.version)
        )
        assert idle.first is (in_order[0] if in_order else None)
        assert idle.num_bytes == sum(each.num_bytes for each in idle)


def test_what_was_removed_takes_no_memory() -> None:
    idle = IdleAdapters()
    adapters = [Idle(version=f"a{number}", num_bytes=1, reload_s=1.0) for number in range(10)]
    for adapter in adapters:
        idle.add(adapter)
    for when in range(10_000):
        adapter = adapters[when % 9]
        idle.remove(adapter)
        adapter.uses.add(when)
        idle.add(adapter)
    assert len(idle._heap) < 100
    assert idle.first is adapters[9]


def test_scores_are_logarithms_of_counts_that_fade() -> None:
    often, seldom = Uses(), Uses()
    for when in range(1, 2001):
        (seldom if when % 100 == 0 else often).add(when)

    def count(uses: range) -> float:
        return sum(2 ** ((when - 2000) / 512) for when in uses)

    assert math.isclose(2 ** (seldom.score - 2000 / 512), count(range(100, 2001, 100)))
    assert often.total == 1980
    assert seldom.score < often.score


def costs(device: str) -> CostModel:
    subject = Subject(machine="m", device=device, model="tiny", dtype="bfloat16", num_layers=2)
    model = default_cost_model(subject, config_of_shape("tiny").shape, num_cores=1)
    return replace(model, disk=Line(latency_s=3.0, unit_s=0.5))


def test_a_scheduler_values_reloads_by_its_costs() -> None:
    watch = DriftWatch(costs("cpu"))
    memory = SeparateMemory(num_blocks=4, block_size=4, adapter_bytes=100)
    Scheduler(SchedulerConfig(max_model_len=16), memory, request_costs=watch)
    for idle in (memory.table.serving.idle, memory.table.host.idle):
        assert idle.reload_s(Idle(version="a", num_bytes=10, reload_s=0.0)) == 3.0 + 10 * 0.5


def test_a_copy_in_host_memory_saves_the_disk() -> None:
    model = costs("cuda")
    copy_s = model.copy_s(1000)
    assert model.reload_s(1000, from_host=True) == copy_s > 0
    assert model.reload_s(1000, from_host=False) == copy_s + 3.0 + 1000 * 0.5
