"""The slab layout: the position of each weight in an adapter's one contiguous block of memory.

A slab is ordered by layer, then by group of linears that share an input; within a group come first the
stacked A's, (rank, in) each, then every B transposed, (rank, out). The size is that of the weights
themselves: nothing is padded to a common rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape

_ALIGNMENT = 16
"""Alignment of matrices, in elements (64 bytes in float32), so that vector loads cross no cache line
needlessly."""


class ModuleSlot(NamedTuple):
    """One module's position in the slab, in elements, and in its group.

    Its A is rows [rank_start, rank_start + rank) of the group's stack; its outputs begin at column
    `out_start` of the group's stacked output.
    """

    lora: LoraModule
    a_start: int
    b_start: int
    rank_start: int
    out_start: int
    in_features: int
    out_features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabLayout:
    """An adapter's layout for a model of `shape`. `layers[i]` maps group name -> slots of the targeted
    modules, in stacking order."""

    shape: ModelShape
    layers: tuple[dict[str, tuple[ModuleSlot, ...]], ...]
    num_elements: int


def slab_layout(spec: AdapterSpec, shape: ModelShape) -> SlabLayout:
    """Lay an adapter out for a model of this shape."""
    by_place = {(lora.layer, lora.module): lora for lora in spec.modules}
    linears = {group: _stacked(modules, shape) for group, modules in GROUPS.items()}
    layers: list[dict[str, tuple[ModuleSlot, ...]]] = []
    cursor = 0
    for layer in range(shape.num_layers):
        groups: dict[str, tuple[ModuleSlot, ...]] = {}
        for group, stacked in linears.items():
            loras = [
                (by_place[layer, each.module], each) for each in stacked if (layer, each.module) in by_place
            ]
            if loras:
                groups[group], cursor = _place_group(loras, cursor)
        layers.append(groups)
    return SlabLayout(shape=shape, layers=tuple(layers), num_elements=cursor)


def slab_gaps(layout: SlabLayout) -> Iterator[tuple[int, int]]:
    """Yield the gaps of a slab, as (start, end) in elements: padding that aligns the next matrix."""
    for slots in (slots for groups in layout.layers for slots in groups.values()):
        first = slots[0]
        ends = [first.a_start + sum(slot.lora.rank for slot in slots) * first.in_features]
        ends += [slot.b_start + slot.lora.rank * slot.out_features for slot in slots]
        for end in ends:
            if end != _align(end):
                yield end, _align(end)


def touched_groups(spec: AdapterSpec) -> frozenset[str]:
    """Return the groups of linears that an adapter changes in any layer."""
    touched = {lora.module for lora in spec.modules}
    return frozenset(group for group, modules in GROUPS.items() if not touched.isdisjoint(modules))


class _Linear(NamedTuple):
    """A linear whose outputs begin at column `out_start` of its group's stacked output."""

    module: str
    in_features: int
    out_features: int
    out_start: int


def _stacked(modules: tuple[str, ...], shape: ModelShape) -> list[_Linear]:
    """Return the linears of a group, in stacking order."""
    widths = [shape.out_features(module) for module in modules]
    starts = accumulate(widths, initial=0)
    return [
        _Linear(module, shape.in_features(module), width, start)
        for module, width, start in zip(modules, widths, starts, strict=False)
    ]


def _place_group(loras: list[tuple[LoraModule, _Linear]], cursor: int) -> tuple[tuple[ModuleSlot, ...], int]:
    in_features = loras[0][1].in_features
    a_start = _align(cursor)
    cursor = _align(a_start + sum(lora.rank for lora, _ in loras) * in_features)
    slots, rank_start = [], 0
    for lora, linear in loras:
        slots.append(
            ModuleSlot(
                lora=lora,
                a_start=a_start + rank_start * in_features,
                b_start=cursor,
                rank_start=rank_start,
                out_start=linear.out_start,
                in_features=in_features,
                out_features=linear.out_features,
            )
        )
        rank_start += lora.rank
        cursor = _align(cursor + lora.rank * linear.out_features)
    return tuple(slots), cursor


def _align(num_elements: int) -> int:
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
