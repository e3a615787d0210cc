"""The delay of a step that uses an adapter while it is being copied, layer by layer.

    bus     |launch|layer 0|launch|layers 1 2 3|launch|layers 4 .. 11     |
    device          wait   |layer 0|layer 1|layer 2|layer 3|layer 4|...
                           ^ stall

Layer i is reached after i layers of computing and all stalls so far. The bus copies layers in their order, in
groups of one copy each: a group's layers have arrived when its copy ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

from loraplex.perf.line import Line

_HALVINGS = 8
"""Steps of the bisection over stalls, which begins with the stall of a single copy: half a per cent of it."""

_LARGEST_GROUP_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bus:
    """`copy`: the cost of one copy on an idle bus, by bytes. `launch_s`: what cutting a copy in two adds."""

    copy: Line
    launch_s: float

    @property
    def lead_s(self) -> float:
        """Seconds before the first of several copies, beside its launch."""
        return max(self.copy.latency_s - self.launch_s, 0.0)


def arrivals_s(bus: Bus, layer_bytes: Sequence[int], groups: Sequence[int]) -> list[float]:
    """Return when each layer has arrived. Layers without bytes have from the beginning."""
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
    """Return how long a step that is launched now waits in all for layers; `step_s` is its time without that.

    The step is as late as the latest layer is, measured against when it would be reached.
    """
    layer_s = step_s / max(len(arrivals), 1)
    return max([0.0, *(arrival - layer * layer_s for layer, arrival in enumerate(arrivals))])


def plan_groups(bus: Bus, layer_bytes: Sequence[int], step_s: float) -> tuple[int, ...]:
    """Return how many layers to copy at a time, so that a step launched now stalls least.

    Among plans that stall alike, the one of fewest copies: one more copy must save more than its launch. A
    plan begins with a small group, since nothing can be computed before it, and groups grow as far as the bus
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
    """Yield the same groups, but cut those of several layers that are too large.

    A plan is made for one step. Another, longer one would wait for all of a large group where it could
    compute with the first of its layers.
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
    """CPU workers compute the first `num_layers` layers. The step takes `delay_s` longer than with an adapter
    that is on the device, which is `saved_s` less than without workers."""

    num_layers: int = 0
    saved_s: float = 0.0
    delay_s: float = 0.0


def assist_layers(
    bus: Bus, layer_bytes: Sequence[int], step_s: float, assist_layer_s: float, begins_s: float = 0.0
) -> AssistPlan:
    """Return how many of the first layers CPU workers should compute while the bus copies the others; none if
    the bus alone is as fast. `assist_layer_s`: what workers add to a layer. `begins_s`: seconds until the
    step begins, while others run; the bus copies from now on.

    The bus copies the layers after those first: ideally their first arrives when the workers are done.
    """
    layer_s = step_s / max(len(layer_bytes), 1)
    arrived_s = [at - begins_s for at in arrivals_s(bus, layer_bytes, [1] * len(layer_bytes))]
    alone_s = best_s = stall_s(arrived_s, step_s)
    best_number, slowdown_s = 0, 0.0
    for number in range(1, len(layer_bytes) + 1):
        if layer_bytes[number - 1] == 0:
            continue  # it costs nothing, so it is no place to stop at
        slowdown_s += assist_layer_s
        # The others arrive earlier, by what the bus would have taken for the first.
        sooner_s = arrived_s[number - 1] + begins_s - bus.lead_s
        rest_s = [at - sooner_s for at in arrived_s[number:]]
        waits_s = max((at - (number + i) * layer_s - slowdown_s for i, at in enumerate(rest_s)), default=0.0)
        delay_s = slowdown_s + max(waits_s, 0.0)
        if delay_s < best_s:
            best_number, best_s = number, delay_s
        if slowdown_s >= best_s:
            break
    return AssistPlan(num_layers=best_number, saved_s=alone_s - best_s, delay_s=best_s)


class _Deadlines:
    """Groups that keep a step's stall within a bound."""

    def __init__(self, bus: Bus, layer_bytes: Sequence[int], step_s: float) -> None:
        self._bus = bus
        self._layer_s = step_s / max(len(layer_bytes), 1)
        self._copied_s = [0.0, *accumulate(num_bytes * bus.copy.unit_s for num_bytes in layer_bytes)]
        # From each layer on, the first that has bytes: a group beginning there is waited for by that layer.
        self._first_with_bytes = [len(layer_bytes)] * (len(layer_bytes) + 1)
        for layer in reversed(range(len(layer_bytes))):
            following = self._first_with_bytes[layer + 1]
            self._first_with_bytes[layer] = layer if layer_bytes[layer] > 0 else following

    def groups_within(self, allowed_s: float) -> tuple[int, ...] | None:
        """Return the fewest groups; None if there are none.

        Each group takes as many layers as arrive before the first of them is due: no other choice leaves
        later deadlines and less to copy.
        """
        num_layers = len(self._copied_s) - 1
        groups: list[int] = []
        start = 0
        while start < num_layers:
            first = self._first_with_bytes[start]
            if first == num_layers:  # nothing is left to copy
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
