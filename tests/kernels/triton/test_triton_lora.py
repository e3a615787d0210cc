"""The Triton LoRA kernels against plain torch, in the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.core.modules import GROUPS, MAX_RANK, MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.kernels.lora import (
    LoraGroup,
    LoraPart,
    LoraSegment,
    LoraWeights,
    add_lora_segment,
    host_weights,
)
from loraplex.kernels.triton.lora_blocks import MAX_RANK_BLOCKS, BlocksLaunch
from loraplex.kernels.triton.lora_rows import RowsLaunch
from loraplex.kernels.triton.lora_step import cut_tiles, new_step

SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=24,
    intermediate_size=56,
    num_heads=5,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=32,
    max_position=64,
)
LAYER = 1
ROWS = RowsLaunch(shrink_block_r=8, shrink_block_k=32, rank_programs=2, expand_block_n=32, expand_block_r=16)
BLOCKS = BlocksLaunch(
    block_m=16,
    shrink_block_r=16,
    shrink_block_k=16,
    rank_programs=2,
    expand_block_n=32,
    expand_block_r=16,
)
FEW_PROGRAMS = replace(BLOCKS, shrink_splits=3, tile_programs=2)
"""Programs that take several tiles each."""
MIXED = (
    {"q_proj": 1},
    {"q_proj": 7, "v_proj": 19, "down_proj": 5},
    dict.fromkeys(MODULES, 16),
    {"k_proj": 48, "o_proj": 33, "gate_proj": 2, "up_proj": 40},
)


def adapter(ranks: dict[str, int], dtype: torch.dtype, seed: int) -> LoraWeights:
    """Random weights in the second layer; modules that are not named are left alone."""
    torch.manual_seed(seed)
    groups: dict[str, LoraGroup] = {}
    for name, modules in GROUPS.items():
        targeted = [module for module in modules if module in ranks]
        if not targeted:
            continue
        parts, start = [], 0
        for module in targeted:
            out = SHAPE.out_features(module)
            out_start = sum(SHAPE.out_features(before) for before in modules[: modules.index(module)])
            parts.append(
                LoraPart(
                    module=module,
                    b_t_RO=torch.randn(ranks[module], out, dtype=dtype),
                    scale=0.25 * (1 + MODULE_INDEX[module]),
                    rank_start=start,
                    rank_end=start + ranks[module],
                    out_start=out_start,
                    out_end=out_start + out,
                )
            )
            start += ranks[module]
        a = torch.randn(start, SHAPE.in_features(modules[0]), dtype=dtype)
        groups[name] = LoraGroup(a_RI=a, parts=tuple(parts))
    weights = host_weights(({}, groups), max(ranks.values()))
    weights.table_LM[..., :2] -= weights.table_LM.data_ptr()  # as on a GPU
    return weights


def arrays(segments: Sequence[LoraSegment]) -> tuple[np.ndarray, np.ndarray]:
    spans = np.array([(s.start, s.end - s.start) for s in segments], dtype=np.int64).reshape(-1, 2)
    return spans, np.array([s.weights.table_LM.data_ptr() for s in segments], dtype=np.int64)


def check(
    group: str,
    segments: Sequence[LoraSegment],
    num_rows: int,
    dtype: torch.dtype,
    launch: RowsLaunch | BlocksLaunch,
) -> None:
    torch.manual_seed(1)
    modules = GROUPS[group]
    x = torch.randn(num_rows, SHAPE.in_features(modules[0]), dtype=dtype)
    y = torch.randn(num_rows, sum(SHAPE.out_features(m) for m in modules), dtype=dtype)
    expected = y.double()
    for segment in segments:
        lora = segment.weights.groups[LAYER].get(group)
        if lora is not None:
            parts = tuple(replace(part, b_t_RO=part.b_t_RO.double()) for part in lora.parts)
            add_lora_segment(expected, x.double(), segment, LoraGroup(a_RI=lora.a_RI.double(), parts=parts))
    spans, tables = cut_tiles(*arrays(segments), launch)
    empty = np.zeros((2, 2), dtype=np.int64)
    step = new_step(
        SHAPE,
        tiles_N2=torch.from_numpy(np.concatenate((spans, empty))),
        tables_N=torch.from_numpy(np.concatenate((tables, empty[0]))),
        num_rows=num_rows,
        launch=launch,
        groups=frozenset({group}),
    )
    step.shrunk_STR.fill_(torch.nan)  # whatever is read must have been written
    step.gather()
    step.add(y, x, SHAPE, LAYER, group)
    assert not step.counts.any(), "the next launch would not begin with zeros"
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    assert float((y.double() - expected).norm() / expected.norm()) < tolerance


each_launch = pytest.mark.parametrize("launch", [ROWS, BLOCKS, FEW_PROGRAMS], ids=["rows", "blocks", "few"])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each_launch
def test_any_mix_of_ranks_and_modules_with_base_rows_in_between(
    group: str, dtype: torch.dtype, launch: RowsLaunch | BlocksLaunch
) -> None:
    bounds = [(0, 1), (3, 3), (4, 21), (21, 24)]  # base rows at 1 to 3, an empty segment, a long one
    segments = [
        LoraSegment(start=start, end=end, weights=adapter(ranks, dtype, seed))
        for seed, ((start, end), ranks) in enumerate(zip(bounds, MIXED, strict=True))
    ]
    check(group, segments, 26, dtype, launch)


@pytest.mark.parametrize("rank", [1, 2, 15, 16, 17, 100, 512])
@each_launch
def test_every_rank_from_1_to_512(rank: int, launch: RowsLaunch | BlocksLaunch) -> None:
    weights = adapter({"q_proj": rank, "v_proj": 3}, torch.float32, rank)
    check("qkv", [LoraSegment(start=1, end=2, weights=weights)], 3, torch.float32, launch)


LAUNCHES = [
    BLOCKS,
    FEW_PROGRAMS,
    *(BlocksLaunch.for_decode(rows) for rows in (1, 256)),
    *(BlocksLaunch.for_prompts(rows) for rows in (64, 2048)),
]


def test_three_modules_of_the_largest_rank_over_several_tiles() -> None:
    weights = adapter(dict.fromkeys(("q_proj", "k_proj", "v_proj"), MAX_RANK), torch.float32, 3)
    segments = [LoraSegment(start=0, end=40, weights=weights), LoraSegment(start=41, end=43, weights=weights)]
    check("qkv", segments, 44, torch.float32, FEW_PROGRAMS)


@pytest.mark.parametrize("launch", LAUNCHES, ids=range(len(LAUNCHES)))
def test_there_are_counts_for_every_rank_and_no_tile_is_empty(launch: BlocksLaunch) -> None:
    assert -(-3 * MAX_RANK // launch.shrink_block_r) <= MAX_RANK_BLOCKS
    lens = np.array([0, 1, 0, 17, 64, 0, 65, 0])
    spans = np.stack((np.cumsum(lens) - lens, lens), axis=1)
    tiles, _ = cut_tiles(spans, np.arange(len(lens)), launch)
    assert tiles[:, 1].min() > 0, "programs end at the first empty tile"
    assert tiles[:, 1].sum() == lens.sum()


def test_a_batch_of_base_rows_is_left_alone() -> None:
    check("o", [], 4, torch.float32, ROWS)


def test_segments_are_cut_into_tiles() -> None:
    weights = adapter({"q_proj": 1}, torch.float32, 0)
    segments = [LoraSegment(start=2, end=7, weights=weights), LoraSegment(start=9, end=10, weights=weights)]
    spans, tables = cut_tiles(*arrays(segments), replace(BLOCKS, block_m=2))
    assert spans.tolist() == [[2, 2], [4, 2], [6, 1], [9, 1]]
    assert set(tables.tolist()) == {weights.table_LM.data_ptr()}
    assert cut_tiles(*arrays(segments), ROWS)[0].tolist() == [[2, 1], [3, 1], [4, 1], [5, 1], [6, 1], [9, 1]]
