"""The linears that a config targets, with rank and scale: PEFT's matching rules over a base's module names.

The rules (PEFT's check_target_module_exists and get_pattern_key), for a module name such as
`model.layers.3.self_attn.q_proj`:

    exclude_modules   first of all; names match as a whole or as a suffix after a dot, a string is a regex
                      for the whole name
    target_modules    the same; "all-linear" is every linear but the output head
    layers_*          narrow down suffix matches only, never a target given by its whole name
    rank_pattern,     the first key, as a regex, that matches the end of the name after a dot (or the whole
    alpha_pattern     name) wins
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from loraplex.adapters.patterns import Pattern, match_table
from loraplex.adapters.peft_config import Finding, LoraSettings, show
from loraplex.adapters.spec import LoraModule
from loraplex.core.errors import AdapterError, AdapterFormatError, AdapterMismatchError
from loraplex.core.modules import MODULES, module_path
from loraplex.core.shape import ModelShape

Number = TypeVar("Number", int, float)

TENSOR_PREFIX: Final = "base_model.model."
ALL_LINEAR: Final = "all-linear"

# Linears and embeddings that PEFT would wrap but that are not supported here.
_UNSERVED = {"lm_head": "the output head (lm_head)", "model.embed_tokens": "the embeddings (embed_tokens)"}

# PEFT takes the first numbered segment as the layer index.
_ANY_LAYER_INDEX: Final = r".*?\.[^.]*\.(?P<idx>\d+)\."

_MAX_SCALE: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPlan:
    """The modules that a config targets on one base model. Shared between adapters of the same config.

    `tensor_shapes` has every tensor the checkpoint must hold, as [rows, columns]. `canonical` is the
    effective config (rank and scale of every module) as bytes: equal exactly if the effective configs are.
    """

    modules: tuple[LoraModule, ...]
    tensor_shapes: Mapping[str, list[int]]
    canonical: bytes
    num_params: int
    notes: tuple[Finding, ...]
    refusals: tuple[AdapterError, ...]


def tensor_names(layer: int, module: str) -> tuple[str, str]:
    """Return the names under which PEFT saves a linear's A and B."""
    stem = f"{TENSOR_PREFIX}{module_path(layer, module)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def plan_targets(settings: LoraSettings, shape: ModelShape) -> TargetPlan:
    """Resolve a config against a base. Problems are in `refusals`; this never raises AdapterError."""
    try:
        return _plan_targets(settings, shape)
    except AdapterFormatError as exc:
        return _plan((), shape, (), (exc,))


# Adapters of one training recipe share their config. A pattern that took too long raises, so it is not
# cached: the machine may just have been slow.
@lru_cache(maxsize=512)
def _plan_targets(settings: LoraSettings, shape: ModelShape) -> TargetPlan:
    places = tuple(product(range(shape.num_layers), MODULES))
    keys = [module_path(layer, module) for layer, module in places]
    targeted = _targeted_keys(settings, [*keys, *_UNSERVED])
    wanted = [(place, key) for place, key in zip(places, keys, strict=True) if key in targeted]
    ranks, unused_ranks = _by_pattern("rank_pattern", settings.rank_pattern, wanted, settings.rank)
    alphas, unused_alphas = _by_pattern("alpha_pattern", settings.alpha_pattern, wanted, settings.alpha)
    refusals: list[AdapterError] = [
        AdapterFormatError(
            f"target_modules includes {what}, which is not served; train on attention and MLP linears only, "
            "or merge the adapter into the base",
            field="target_modules",
        )
        for key, what in _UNSERVED.items()
        if key in targeted
    ]
    if not wanted and not refusals:
        refusals.append(_nothing_targeted(settings))
    modules = []
    largest_scale = 0.0
    for ((layer, module), _), rank, alpha in zip(wanted, ranks, alphas, strict=True):
        scale = alpha / (math.sqrt(rank) if settings.use_rslora else rank)
        largest_scale = max(largest_scale, abs(scale))
        a_name, b_name = tensor_names(layer, module)
        modules.append(
            LoraModule(layer=layer, module=module, rank=rank, scale=scale, a_name=a_name, b_name=b_name)
        )
    if largest_scale > _MAX_SCALE:
        message = f"lora_alpha: a scale of {largest_scale:g} is beyond float32"
        refusals.append(AdapterFormatError(message, field="lora_alpha"))
    notes = (*_unused_targets(settings, keys), *unused_ranks, *unused_alphas)
    return _plan(tuple(modules), shape, notes, tuple(refusals))


def _plan(
    modules: tuple[LoraModule, ...],
    shape: ModelShape,
    notes: tuple[Finding, ...],
    refusals: tuple[AdapterError, ...],
) -> TargetPlan:
    shapes: dict[str, list[int]] = {}
    for each in modules:
        shapes[each.a_name] = [each.rank, shape.in_features(each.module)]
        shapes[each.b_name] = [shape.out_features(each.module), each.rank]
    return TargetPlan(
        modules=modules,
        tensor_shapes=MappingProxyType(shapes),
        canonical=json.dumps(
            [[each.layer, each.module, each.rank, each.scale.hex()] for each in modules]
        ).encode(),
        num_params=sum(rows * columns for rows, columns in shapes.values()),
        notes=notes,
        refusals=refusals,
    )


def _targeted_keys(settings: LoraSettings, keys: Sequence[str]) -> set[str]:
    targets, exclude = settings.target_modules, settings.exclude_modules
    if isinstance(targets, tuple):
        whole = set(targets).intersection(keys)
        targeted = whole | _in_chosen_layers(settings, sorted(_with_suffix(targets, keys) - whole))
    elif targets.lower() == ALL_LINEAR:
        targeted = set(keys).difference(_UNSERVED)
    else:
        targeted = _matching("target_modules", targets, keys)
    if isinstance(exclude, tuple):
        return targeted.difference(exclude) - _with_suffix(exclude, keys)
    return targeted - _matching("exclude_modules", exclude, keys)


def _matching(field: str, regex: str, keys: Sequence[str]) -> set[str]:
    [row] = match_table([Pattern(field=field, source=regex, regex=regex, full=True)], keys)
    return {key for key, match in zip(keys, row, strict=True) if match is not None}


def _with_suffix(names: Sequence[str], keys: Sequence[str]) -> set[str]:
    """Return the keys that end in "." and one of the names. Uses a set, as a config may list thousands of
    names."""
    lookup = set(names)
    return {key for key in keys if not lookup.isdisjoint(_suffixes(key))}


def _suffixes(key: str) -> list[str]:
    """Return the suffixes after each dot: `a.b.c` -> `b.c`, `c`."""
    parts = key.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]


def _in_chosen_layers(settings: LoraSettings, keys: Sequence[str]) -> set[str]:
    if settings.layers_to_transform is None:
        return set(keys)
    field = "layers_pattern"
    patterns = [
        Pattern(field=field, source=name, regex=rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.")
        for name in settings.layers_pattern
    ] or [Pattern(field=field, source="", regex=_ANY_LAYER_INDEX)]
    table = match_table(patterns, keys)
    chosen = set()
    for key, *matches in zip(keys, *table, strict=True):
        index = next((match for match in matches if match is not None), "")
        if index.isdecimal() and int(index) in settings.layers_to_transform:
            chosen.add(key)
    return chosen


def _by_pattern(
    field: str,
    pattern_values: tuple[tuple[str, Number], ...],
    wanted: Sequence[tuple[tuple[int, str], str]],
    default: Number,
) -> tuple[list[Number], tuple[Finding, ...]]:
    """Return the value of each wanted module, and a note for each pattern that decided none."""
    patterns = [Pattern(field=field, source=name, regex=rf"(.*\.)?({name})$") for name, _ in pattern_values]
    table = match_table(patterns, [key for _, key in wanted])
    values = [default] * len(wanted)
    decided: set[int] = set()
    notes = []
    for (name, value), row in zip(pattern_values, table, strict=True):
        new = {index for index, match in enumerate(row) if match is not None} - decided
        for index in new:
            values[index] = value
        decided |= new
        if not new:
            reason = "decides no targeted module of this base"
            notes.append(Finding(field=f"{field}[{show(name)}]", value=value, reason=reason))
    return values, tuple(notes)


def _unused_targets(settings: LoraSettings, keys: Sequence[str]) -> list[Finding]:
    if isinstance(settings.target_modules, str):
        return []
    known = {name for key in (*keys, *_UNSERVED) for name in (key, *_suffixes(key))}
    return [
        Finding(field="target_modules", value=name, reason="matches no module of this base")
        for name in settings.target_modules
        if name not in known
    ]


def _nothing_targeted(settings: LoraSettings) -> AdapterMismatchError:
    targets = settings.target_modules
    return AdapterMismatchError(
        f"target_modules = {show(targets)} matches no module of this base"
        + (" outside exclude_modules" if settings.exclude_modules else "")
        + (
            ""
            if settings.layers_to_transform is None
            else f" in layers {list(settings.layers_to_transform)[:8]}"
        )
        + f"; its linears are {', '.join(MODULES)}. Was the adapter trained on another model family?"
    )
