"""The layout of merged weights: a second set of an adapter's linears, which have scale * B A added.

On a device they lie at the top of the memory that adapters share with KV blocks, always at the same
addresses, because captured graphs hold these. All layers of a group lie together, and groups grow downwards
from the top, so that an adapter on few groups takes only the topmost part:

    ... | down of all layers | gate_up | o | qkv of all layers | top
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape

_ALIGNMENT: Final = 256
"""Bytes. Weights begin at multiples of it below the top, as device allocations do."""


def group_size(group: str, shape: ModelShape) -> tuple[int, int]:
    """Return the outputs and inputs of a group's stacked weight in one layer."""
    modules = GROUPS[group]
    return sum(shape.out_features(module) for module in modules), shape.in_features(modules[0])


def layout_bytes(groups: Iterable[str], shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes below the top that merged weights of these groups take: all groups above the lowest of
    them count, too."""
    wanted = frozenset(groups)
    total = taken = 0
    for group in GROUPS:
        total += shape.num_layers * _weight_bytes(group, shape, element_bytes)
        if group in wanted:
            taken = total
    return taken


def distance_below_top(layer: int, group: str, shape: ModelShape, element_bytes: int) -> int:
    """Return how many bytes below the top the weight of a group in a layer begins."""
    above = 0
    for name in GROUPS:
        size = _weight_bytes(name, shape, element_bytes)
        if name == group:
            return above + (shape.num_layers - layer) * size
        above += shape.num_layers * size
    raise KeyError(group)


def touched_bytes(spec: AdapterSpec, shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes of merged weights where each has memory of its own: the stacked weights of the groups
    that the adapter changes, layer by layer."""
    group_of = {module: group for group, modules in GROUPS.items() for module in modules}
    touched = {(lora.layer, group_of[lora.module]) for lora in spec.modules}
    sizes = {group: group_size(group, shape) for group in GROUPS}
    return sum(sizes[group][0] * sizes[group][1] * element_bytes for _, group in touched)


def _weight_bytes(group: str, shape: ModelShape, element_bytes: int) -> int:
    out_features, in_features = group_size(group, shape)
    return -(-out_features * in_features * element_bytes // _ALIGNMENT) * _ALIGNMENT
