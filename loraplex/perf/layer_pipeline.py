"""An adapter that arrives layer by layer while a step is already computing with it.

    bus     |launch|layer 0|launch|layers 1 2 3|launch|layers 4 .. 11     |
    device          wait   |layer 0|layer 1|layer 2|layer 3|layer 4|...
                           ^ stall

Layer i is reached after i layers of computing and all stalls so far. The bus brings layers in their order, in
groups of one copy each: a group's layers are there when its copy ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

from loraplex.perf.line import Line

_HALVINGS = 8
"""Stalls are told apart down to that of a single copy, halved so often: half a per cent of it."""

_LARGEST_GROUP_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bus:
    """`copy`: of one copy on an idle bus, by bytes. `launch_s`: what cutting a copy in two adds."""

    copy: Line
    launch_s: float

    @property
    def lead_s(self) -> float:
        """Before the first of several copies, beside its launch."""
        return max(self.copy.latency_s - self.launch_s, 0.0)


def arrivals_s(bus: Bus, layer_bytes: Sequence[int], groups: Sequence[int]) -> list[float]:
    """When each layer is there. Layers without bytes are there from the beginning."""
    assert sum(groups) == len(layer_bytes)
    arrivals: list[float] = []
    elapsed_s = bus.lead_s
    for size in groups:
        members = layer_bytes[len(arrivals) : len(arrivals) + size]
        if any(members):
            elapsed_s += bus.launch_s + sum(members) * bus.copy.unit_s
        arrivals += [elapsed_s if num_bytes > 0 else 0.0 for num_bytes in members]
    return arrivals


def stall_s(arrivals: Sequence[float], step_s: float) -> float:
    """How long a step that is launched now waits in all for layers that are not there; `step_s` without it.

    The step is behind by as much as the latest layer is, measured against when it would be reached.
    """
    layer_s = step_s / max(len(arrivals), 1)
    return max([0.0, *(arrival - layer * layer_s for layer, arrival in enumerate(arrivals))])


def plan_groups(bus: Bus, layer_bytes: Sequence[int], step_s: float) -> tuple[int, ...]:
    """Numbers of layers to copy at a time, so that a step launched now stalls least.

    Among plans that stall alike the one of fewest copies; a copy more must save more than its launch. What
    comes out begins with a small group, since nothing can be computed before it, and grows as far as the bus
    is faster than the device.
    """
    plan = _Deadlines(bus, layer_bytes, step_s)
    if not any(layer_bytes):
        return (len(layer_bytes),) if layer_bytes else ()
    low_s, high_s = 0.0, stall_s(arrivals_s(bus, layer_bytes, (len(layer_bytes),)), step_s)
    best = plan.groups_within(high_s) or (len(layer_bytes),)
    for _ in range(_HALVINGS):
        if high_s - low_s <= bus.launch_s / 4:
            break
        middle_s = (low_s + high_s) / 2
        groups = plan.groups_within(middle_s)
        low_s, high_s, best = (low_s, middle_s, groups) if groups else (middle_s, high_s, best)
    # Allow a launch's time more of stall for every copy that could be saved by it.
    cheapest = high_s + len(best) * bus.launch_s
    for num_saved in range(1, len(best)):
        allowed_s = high_s + num_saved * bus.launch_s
        groups = plan.groups_within(allowed_s)
        if groups and allowed_s + len(groups) * bus.launch_s < cheapest:
            best, cheapest = groups, allowed_s + len(groups) * bus.launch_s
    return best


def cut_groups(groups: Sequence[int], layer_bytes: Sequence[int]) -> Iterator[int]:
    """The same groups, none of them larger than may be if it has several layers.

    A plan is made for one step. Another that takes longer would wait for the whole of a large group, where it
    could have computed with the first of its layers.
    """
    layers = iter(layer_bytes)
    for size in groups:
        count = num_bytes = 0
        for own_bytes in islice(layers, size):
            if count > 0 and num_bytes + own_bytes > _LARGEST_GROUP_BYTES:
                yield count
                count = num_bytes = 0
            count, num_bytes = count + 1, num_bytes + own_bytes
        yield count


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistPlan:
    """CPU workers compute the first `num_layers` layers, which takes `saved_s` off the step."""

    num_layers: int = 0
    saved_s: float = 0.0


def assist_layers(bus: Bus, layer_bytes: Sequence[int], step_s: float, assist_layer_s: float) -> AssistPlan:
    """How many of the first layers CPU workers should compute while the bus brings the others; none if the
    bus alone is as fast.

    Workers compute beside the device's own part of a layer, and it waits for the slower. The bus brings the
    layers after those first: ideally their first arrives when the workers are done.
    """
    layer_s = step_s / max(len(layer_bytes), 1)
    arrived_s = arrivals_s(bus, layer_bytes, [1] * len(layer_bytes))
    alone_s = best_s = stall_s(arrived_s, step_s)
    best_number, slowdown_s = 0, 0.0
    for number in range(1, len(layer_bytes) + 1):
        if layer_bytes[number - 1] == 0:
            continue  # costs nobody anything, so it is no place to stop at
        slowdown_s += max(assist_layer_s - layer_s, 0.0)
        # The others come by as much sooner as the bus would have taken for the first.
        sooner_s = arrived_s[number - 1] - bus.lead_s
        rest_s = [max(at - sooner_s, 0.0) for at in arrived_s[number:]]
        waits_s = max((at - (number + i) * layer_s - slowdown_s for i, at in enumerate(rest_s)), default=0.0)
        delay_s = slowdown_s + max(waits_s, 0.0)
        if delay_s < best_s:
            best_number, best_s = number, delay_s
        if slowdown_s >= best_s:
            break
    return AssistPlan(num_layers=best_number, saved_s=alone_s - best_s)


class _Deadlines:
    """Which groups keep a step's stall within a bound."""

    def __init__(self, bus: Bus, layer_bytes: Sequence[int], step_s: float) -> None:
        self._bus = bus
        self._layer_s = step_s / max(len(layer_bytes), 1)
        self._copied_s = [0.0, *accumulate(num_bytes * bus.copy.unit_s for num_bytes in layer_bytes)]
        # From each layer on, the first that has bytes: the one that a group beginning there is waited for.
        self._first_with_bytes = [len(layer_bytes)] * (len(layer_bytes) + 1)
        for layer in reversed(range(len(layer_bytes))):
            following = self._first_with_bytes[layer + 1]
            self._first_with_bytes[layer] = layer if layer_bytes[layer] > 0 else following

    def groups_within(self, allowed_s: float) -> tuple[int, ...] | None:
        """The fewest groups; None if there are none.

        As many layers at a time as arrive before the first of them is due: whoever got further with as many
        copies has later deadlines and less left to bring.
        """
        num_layers = len(self._copied_s) - 1
        groups: list[int] = []
        start = 0
        while start < num_layers:
            first = self._first_with_bytes[start]
            if first == num_layers:  # nothing is left to bring
                groups[-1] += num_layers - start
                break
            launched_s = self._bus.lead_s + (len(groups) + 1) * self._bus.launch_s
            due_s = allowed_s + first * self._layer_s
            end = start
            while end < num_layers and launched_s + self._copied_s[end + 1] <= due_s * (1 + 1e-12):
                end += 1
            if end <= first:
                return None
            groups.append(end - start)
            start = end
        return tuple(groups)
