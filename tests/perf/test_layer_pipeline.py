"""Layers that arrive while a step computes: stalls, groups of copies, and what CPU workers save."""

from __future__ import annotations

from itertools import pairwise

import pytest
from cost_models import H200_BUS, MIB, PREFILL_S, RANK_64_LAYERS
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.perf.layer_pipeline import Bus, arrivals_s, assist_layers, cut_groups, plan_groups, stall_s
from loraplex.perf.line import Line


def simulated_stall(arrivals: list[float], step_s: float) -> float:
    """Layer by layer: wait for it, compute it."""
    now = waited = 0.0
    for arrival in arrivals:
        waited += max(arrival - now, 0.0)
        now = max(arrival, now) + step_s / len(arrivals)
    return waited


def every_plan(num_layers: int) -> list[tuple[int, ...]]:
    if num_layers == 0:
        return [()]
    return [(first, *rest) for first in range(1, num_layers + 1) for rest in every_plan(num_layers - first)]


SECONDS = st.floats(0, 10)
BUSES = st.builds(
    Bus,
    copy=st.builds(Line, latency_s=st.floats(0, 1), unit_s=st.floats(0, 1)),
    launch_s=st.floats(0, 0.5),
)
LAYERS = st.lists(st.integers(0, 3), min_size=1, max_size=7)


@given(st.lists(SECONDS, min_size=1, max_size=12), SECONDS)
def test_a_stall_is_what_waiting_layer_by_layer_adds_up_to(arrivals: list[float], step_s: float) -> None:
    assert stall_s(arrivals, step_s) == pytest.approx(simulated_stall(arrivals, step_s))


def test_no_layers_stall_nobody() -> None:
    assert stall_s([], 1.0) == 0
    assert plan_groups(H200_BUS, [], 1.0) == ()


@settings(max_examples=examples(100, 300))
@given(BUSES, LAYERS, SECONDS)
def test_no_plan_is_much_better_than_the_one_chosen(bus: Bus, layers: list[int], step_s: float) -> None:
    """Against every way to cut the layers, counting a launch for each copy as a stall of its own."""

    def cost(groups: tuple[int, ...]) -> float:
        return stall_s(arrivals_s(bus, layers, groups), step_s) + len(groups) * bus.launch_s

    chosen = plan_groups(bus, layers, step_s)
    assert sum(chosen) == len(layers)
    assert min(chosen) > 0
    at_once = stall_s(arrivals_s(bus, layers, (len(layers),)), step_s)
    best = min(map(cost, every_plan(len(layers))))
    assert cost(chosen) <= best + 0.01 * at_once + bus.launch_s + 1e-9


def test_groups_begin_small_and_grow_where_the_bus_is_faster_than_the_device() -> None:
    groups = plan_groups(H200_BUS, RANK_64_LAYERS, PREFILL_S)
    assert groups[0] == 1
    assert all(sooner <= later for sooner, later in pairwise(groups[:-1]))
    assert len(groups) < 8
    stall = stall_s(arrivals_s(H200_BUS, RANK_64_LAYERS, groups), PREFILL_S)
    assert stall < 0.1 * stall_s(arrivals_s(H200_BUS, RANK_64_LAYERS, (32,)), PREFILL_S)


def test_a_small_adapter_comes_in_one_copy() -> None:
    assert plan_groups(H200_BUS, [1024] * 32, PREFILL_S) == (32,)


def test_layers_without_weights_are_never_waited_for() -> None:
    layers = [0, 0, 4 * MIB, 0, 4 * MIB, 0]
    groups = plan_groups(H200_BUS, layers, PREFILL_S)
    arrivals = arrivals_s(H200_BUS, layers, groups)
    assert [arrival == 0 for arrival in arrivals] == [num_bytes == 0 for num_bytes in layers]
    assert plan_groups(H200_BUS, [0] * 6, PREFILL_S) == (6,)


def test_a_hundred_mebibytes_in_32_copies_take_as_long_as_was_measured() -> None:
    assert arrivals_s(H200_BUS, RANK_64_LAYERS, (32,))[-1] == pytest.approx(1.94e-3, rel=0.01)
    assert arrivals_s(H200_BUS, RANK_64_LAYERS, (1,) * 32)[-1] == pytest.approx(2.04e-3, rel=0.01)


def simulated_assist(
    bus: Bus, layers: list[int], step_s: float, assist_s: float, begins_s: float, number: int
) -> float:
    """Return the seconds of a step whose first layers come from workers, the others from the bus, which has
    copied for `begins_s` when it begins."""
    now, on_bus, layer_s = begins_s, bus.lead_s, step_s / len(layers)
    arrivals = {}
    for layer in range(number, len(layers)):
        if layers[layer] > 0:
            on_bus += bus.launch_s + layers[layer] * bus.copy.unit_s
            arrivals[layer] = on_bus
    for layer, num_bytes in enumerate(layers):
        helped = layer < number and num_bytes > 0
        now = max(now, arrivals.get(layer, 0.0)) + layer_s + (assist_s if helped else 0.0)
    return now - begins_s


@settings(max_examples=examples(100, 300))
@given(BUSES, LAYERS, SECONDS, st.floats(0, 3), st.one_of(st.just(0.0), SECONDS))
def test_workers_get_as_many_layers_as_make_the_step_shortest(
    bus: Bus, layers: list[int], step_s: float, assist_s: float, begins_s: float
) -> None:
    took = [
        simulated_assist(bus, layers, step_s, assist_s, begins_s, number) for number in range(len(layers) + 1)
    ]
    plan = assist_layers(bus, layers, step_s, assist_s, begins_s)
    assert took[plan.num_layers] == pytest.approx(min(took))
    assert plan.saved_s == pytest.approx(took[0] - min(took), abs=1e-9)
    assert plan.delay_s == pytest.approx(min(took) - step_s, abs=1e-9)


def test_a_bus_that_is_fast_enough_needs_no_workers() -> None:
    free = Bus(copy=Line(latency_s=0.0, unit_s=0.0), launch_s=0.0)
    assert assist_layers(free, RANK_64_LAYERS, PREFILL_S, 1e-9).num_layers == 0
    assert assist_layers(H200_BUS, RANK_64_LAYERS, PREFILL_S, assist_layer_s=1e-3).num_layers == 0


def test_workers_help_as_long_as_the_bus_needs_to_get_ahead() -> None:
    slow = Bus(copy=Line(latency_s=30e-6, unit_s=1 / 5e9), launch_s=5e-6)
    plan = assist_layers(slow, RANK_64_LAYERS, PREFILL_S, assist_layer_s=0.3e-3)
    assert 0 < plan.num_layers < 32
    assert plan.saved_s > 5e-3


def test_workers_leave_to_the_bus_what_it_copies_before_the_step_begins() -> None:
    slow = Bus(copy=Line(latency_s=30e-6, unit_s=1 / 5e9), launch_s=5e-6)
    at_once, soon, late = (
        assist_layers(slow, RANK_64_LAYERS, PREFILL_S, 0.3e-3, begins_s).num_layers
        for begins_s in (0.0, 5e-3, 30e-3)
    )
    assert at_once > soon > late == 0


def test_a_group_too_large_is_cut_between_layers() -> None:
    layer_bytes = [size << 20 for size in (25, 25, 25, 100, 5, 5)]
    assert list(cut_groups([6], layer_bytes)) == [2, 1, 1, 2]
    assert list(cut_groups([1, 5], layer_bytes)) == [1, 2, 1, 2]
    assert list(cut_groups([2, 2, 2], layer_bytes)) == [2, 1, 1, 2]
