"""Section `kernels`: the LoRA kernels over mixed ranks, missing modules, base rows and empty segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.correctness.check import Check, Setting, holds, row_error, within
from loraplex.core.modules import GROUPS, MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.kernels.lora import (
    LoraGroup,
    LoraPart,
    LoraSegment,
    LoraWeights,
    add_lora_segment,
    host_weights,
)
from loraplex.kernels.triton.lora_blocks import BlocksLaunch
from loraplex.kernels.triton.lora_rows import RowsLaunch
from loraplex.kernels.triton.lora_step import cut_tiles, new_step
from loraplex.model.shapes import config_of_shape

RANKS = (1, 3, 8, 17, 64, 128, 256, 512)
TARGETS = (
    MODULES,
    ("q_proj", "v_proj"),
    ("k_proj", "o_proj", "up_proj"),
    ("v_proj", "gate_proj", "down_proj"),
)
LAYER = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """`lens[i]` rows for the i-th segment, with a base row before every third."""

    name: str
    launch: RowsLaunch | BlocksLaunch
    lens: Sequence[int]


def lora_checks(shape_name: str, setting: Setting, tolerance: float) -> list[Check]:
    shape = replace(config_of_shape(shape_name).shape, num_layers=LAYER + 1)
    ranks = RANKS[:4] if setting.tiny else RANKS
    adapters = [
        random_adapter(shape, rank, targets, setting)
        for index, rank in enumerate(ranks)
        for targets in dict.fromkeys((TARGETS[0], TARGETS[index % len(TARGETS)]))
    ]
    return [
        replace(check, name=f"{shape_name}: {check.name}")
        for case in (_tiny_cases() if setting.tiny else _cases(len(adapters)))
        for group in GROUPS
        for check in _compare(shape, adapters, case, group, setting, tolerance)
    ]


def _cases(num_adapters: int) -> list[_Case]:
    one_each = [1] * num_adapters
    return [
        _Case(name="rows, one each", launch=RowsLaunch(), lens=one_each),
        _Case(name="rows, few segments", launch=RowsLaunch.for_segments(4), lens=[1, 0, 1, 1]),
        _Case(name="rows, a single token", launch=RowsLaunch.for_segments(1), lens=[0] * 6 + [1]),
        _Case(name="rows, shared", launch=RowsLaunch(), lens=[1, 3, 0, 2, 5] * 3),
        *(
            _Case(name=f"small blocks, shared, {few}", launch=launch, lens=[1, 16, 0, 17, 5] * 3)
            for few, launch in (("few", BlocksLaunch.for_decode(32)), ("many", BlocksLaunch.for_decode(256)))
        ),
        _Case(name="blocks of prompts", launch=BlocksLaunch(), lens=[1, 0, 5, 64, 65, 17, 130] * 2),
        _Case(name="a few prompts", launch=BlocksLaunch.for_prompts(256), lens=[1, 0, 5, 33, 64, 17, 130]),
        _Case(name="one long prompt", launch=BlocksLaunch(), lens=[0] * (num_adapters - 1) + [700]),
    ]


def _tiny_cases() -> list[_Case]:
    return [
        _Case(
            name="rows",
            launch=RowsLaunch(
                shrink_block_r=8, shrink_block_k=32, rank_programs=2, expand_block_n=32, expand_block_r=16
            ),
            lens=[1, 0, 2, 1],
        ),
        _Case(
            name="blocks",
            launch=BlocksLaunch(
                block_m=16,
                shrink_block_r=16,
                shrink_block_k=32,
                rank_programs=2,
                expand_block_n=32,
                expand_block_r=16,
            ),
            lens=[1, 0, 17, 2],
        ),
    ]


def random_adapter(shape: ModelShape, rank: int, targets: Sequence[str], setting: Setting) -> LoraWeights:
    """Random weights in one layer, of a size at which the product is as large as the base's output."""
    groups: dict[str, LoraGroup] = {}
    for name, modules in GROUPS.items():
        targeted = [module for module in modules if module in targets]
        if not targeted:
            continue
        in_features, parts = shape.in_features(modules[0]), []
        for index, module in enumerate(targeted):
            out = shape.out_features(module)
            out_start = sum(shape.out_features(before) for before in modules[: modules.index(module)])
            parts.append(
                LoraPart(
                    module=module,
                    b_t_RO=_normal(setting, rank, out, std=rank**-0.5),
                    scale=0.5 * (1 + MODULE_INDEX[module]),
                    rank_start=index * rank,
                    rank_end=(index + 1) * rank,
                    out_start=out_start,
                    out_end=out_start + out,
                )
            )
        a = _normal(setting, rank * len(targeted), in_features, std=in_features**-0.5)
        groups[name] = LoraGroup(a_RI=a, parts=tuple(parts))
    made = host_weights((*({} for _ in range(LAYER)), groups), rank)
    table_LM = made.table_LM.to(setting.torch_device)
    table_LM[..., :2] -= table_LM.data_ptr()  # on a device, addresses count from the table
    return replace(made, table_LM=table_LM)


def _segments(adapters: Sequence[LoraWeights], lens: Sequence[int]) -> tuple[list[LoraSegment], int]:
    segments, start = [], 0
    for index, length in enumerate(lens):
        start += index % 3 == 0
        weights = adapters[index % len(adapters)]
        segments.append(LoraSegment(start=start, end=start + length, weights=weights))
        start += length
    return segments, start + 2


def _compare(
    shape: ModelShape,
    adapters: Sequence[LoraWeights],
    case: _Case,
    group: str,
    setting: Setting,
    tolerance: float,
) -> list[Check]:
    segments, num_rows = _segments(adapters, case.lens)
    modules = GROUPS[group]
    x = _normal(setting, num_rows, shape.in_features(modules[0]))
    y = _normal(setting, num_rows, sum(shape.out_features(module) for module in modules))
    expected, is_base = y.double(), torch.ones(num_rows, dtype=torch.bool, device=y.device)
    for segment in segments:
        lora = segment.weights.groups[LAYER].get(group)
        if lora is not None:
            is_base[segment.start : segment.end] = False
            parts = tuple(replace(part, b_t_RO=part.b_t_RO.double()) for part in lora.parts)
            add_lora_segment(expected, x.double(), segment, LoraGroup(a_RI=lora.a_RI.double(), parts=parts))
    base_rows = y[is_base].clone()
    _add(shape, segments, case.launch, x, y, group)
    name = f"{case.name}, {group}"
    return [
        within(
            f"LoRA {name}",
            f"{len(segments)} segments in {num_rows} rows, row by row against float64",
            row_error(y, expected),
            tolerance,
        ),
        holds(f"base rows beside {name}", "to the last bit as before", torch.equal(y[is_base], base_rows)),
    ]


def _add(
    shape: ModelShape,
    segments: Sequence[LoraSegment],
    launch: RowsLaunch | BlocksLaunch,
    x: torch.Tensor,
    y: torch.Tensor,
    group: str,
) -> None:
    """Compute it as a step does: segments cut into tiles, two padding tiles behind them."""
    spans = np.array([(s.start, s.end - s.start) for s in segments], dtype=np.int64)
    addresses = np.array([s.weights.table_LM.data_ptr() for s in segments], dtype=np.int64)
    tiles, tables = cut_tiles(spans, addresses, launch)
    padding = np.zeros((2, 2), dtype=np.int64)
    step = new_step(
        shape,
        tiles_N2=torch.from_numpy(np.concatenate((tiles, padding))).to(x.device),
        tables_N=torch.from_numpy(np.concatenate((tables, padding[0]))).to(x.device),
        num_rows=x.shape[0],
        launch=launch,
        groups=frozenset({group}),
    )
    step.shrunk_STR.fill_(torch.nan)  # whatever is read must have been written
    step.gather()
    step.add(y, x, shape, LAYER, group)


def _normal(setting: Setting, *size: int, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device=setting.torch_device) * std).to(setting.kernel_dtype)
