"""Merged weights by every device's kernels against float64: W + scale * B A, rounded once."""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate, pairwise

import pytest
import torch
from interpreting import patch_interpreter

from loraplex.adapters.merged_layout import distance_below_top, group_size, layout_bytes
from loraplex.core.modules import GROUPS, MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.kernels.cpu.numba_kernels import NumbaKernels
from loraplex.kernels.interface import Kernels
from loraplex.kernels.lora import LoraGroup, LoraPart, LoraWeights, host_weights
from loraplex.kernels.reference import TorchKernels

patch_interpreter()

SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=72,
    intermediate_size=200,
    num_heads=9,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=32,
    max_position=64,
)
LAYER = 1
RANKS: dict[str, dict[str, int]] = {
    "one": {"q_proj": 1},
    "mixed": {"q_proj": 7, "v_proj": 33, "up_proj": 5, "down_proj": 16},
    "all": dict.fromkeys(MODULES, 64),
    "apart": {"k_proj": 48, "o_proj": 19, "gate_proj": 2},
    "most": {"k_proj": 512, "o_proj": 512, "up_proj": 512, "down_proj": 512},
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ON_CPU = [("torch", dtype) for dtype in DTYPES] + [("numba", torch.float32)]
CASES = [*ON_CPU, *(("triton", dtype) for dtype in DTYPES)]


@cache
def kernels_of(kind: str) -> Kernels:
    if kind == "triton":
        from loraplex.kernels.triton.triton_kernels import TritonKernels

        return TritonKernels(SHAPE, torch.device("cpu"))
    return NumbaKernels(SHAPE.head_dim) if kind == "numba" else TorchKernels()


def adapter(ranks: dict[str, int], dtype: torch.dtype, *, relative: bool) -> LoraWeights:
    """Random weights in the second layer. `relative`: the table's addresses are, as on a GPU."""
    torch.manual_seed(len(ranks))
    groups: dict[str, LoraGroup] = {}
    for name, modules in GROUPS.items():
        starts = accumulate((SHAPE.out_features(module) for module in modules), initial=0)
        parts, rank = [], 0
        for module, out_start in zip(modules, starts, strict=False):
            if module not in ranks:
                continue
            out = SHAPE.out_features(module)
            parts.append(
                LoraPart(
                    module=module,
                    b_t_RO=torch.randn(ranks[module], out).to(dtype),
                    scale=0.1 * (1 + MODULE_INDEX[module]),
                    rank_start=rank,
                    rank_end=rank + ranks[module],
                    out_start=out_start,
                    out_end=out_start + out,
                )
            )
            rank += ranks[module]
        if parts:
            a_RI = torch.randn(rank, SHAPE.in_features(modules[0])).to(dtype)
            groups[name] = LoraGroup(a_RI=a_RI, parts=tuple(parts))
    weights = host_weights(({}, groups), max(ranks.values()))
    if relative:
        weights.table_LM[..., :2] -= weights.table_LM.data_ptr()
    return weights


def weight_of(group: str, dtype: torch.dtype) -> torch.Tensor:
    size = group_size(group, SHAPE)
    return torch.randn(size, generator=torch.Generator().manual_seed(7)).to(dtype)


def exact(weight_OI: torch.Tensor, group: LoraGroup | None) -> torch.Tensor:
    total_OI = weight_OI.double()
    for part in group.parts if group is not None else ():
        a_RI = group.a_RI[part.rank_start : part.rank_end].double() if group is not None else None
        total_OI[part.out_start : part.out_end] += part.scale * (part.b_t_RO.double().t() @ a_RI)
    return total_OI


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_merged_weights_are_the_exact_ones_rounded_once(name: str, kind: str, dtype: torch.dtype) -> None:
    kernels, weights = kernels_of(kind), adapter(RANKS[name], dtype, relative=kind == "triton")
    for group in weights.touched:
        weight_OI = weight_of(group, dtype)
        linear = kernels.pack_linear(weight_OI.clone(), None)
        merged = kernels.merge_linear(linear, LAYER, group, weights).weight()
        expected = exact(weight_OI, weights.groups[LAYER].get(group))
        assert merged.dtype is dtype
        # Half a unit in the last place of the result, and what float32 sums of large numbers lose.
        rounding = torch.finfo(dtype).eps * (0.5 if kind != "triton" or dtype is not torch.bfloat16 else 1)
        summing = 2e-6 * float(expected.abs().max())
        error = (merged.double() - expected).abs()
        assert bool((error <= rounding * expected.abs() * 1.01 + summing).all())
        assert torch.equal(linear.weight(), weight_OI), "the base model's weight changed"


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_modules_and_layers_that_are_not_touched_are_copied_bit_for_bit(
    kind: str, dtype: torch.dtype
) -> None:
    kernels = kernels_of(kind)
    weights = adapter({"q_proj": 5, "gate_proj": 3}, dtype, relative=kind == "triton")
    weight_OI = weight_of("qkv", dtype)
    weight_OI[-1, :3] = torch.tensor([-0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 2])
    linear = kernels.pack_linear(weight_OI.clone(), None)
    merged = kernels.merge_linear(linear, LAYER, "qkv", weights).weight()
    untouched = SHAPE.q_size
    assert not torch.equal(merged[:untouched], weight_OI[:untouched])
    assert bits(merged[untouched:]) == bits(weight_OI[untouched:])
    other_layer = kernels.merge_linear(linear, 0, "qkv", weights).weight()
    assert bits(other_layer) == bits(weight_OI)


def bits(weight_OI: torch.Tensor) -> list[int]:
    as_integers = weight_OI.contiguous().view({2: torch.int16, 4: torch.int32}[weight_OI.itemsize])
    found: list[int] = as_integers.flatten().tolist()
    return found


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rank", [1, 2, 15, 16, 17, 32, 33, 100, 512])
def test_tiles_of_any_rank(group: str, rank: int) -> None:
    kernels = kernels_of("triton")
    weights = adapter(dict.fromkeys(GROUPS[group], rank), torch.float32, relative=True)
    linear = kernels.pack_linear(weight_of(group, torch.float32), None)
    into_OI = torch.full(group_size(group, SHAPE), torch.nan)
    merged = kernels.merge_linear(linear, LAYER, group, weights, into_OI)
    assert merged.weight() is into_OI
    expected = exact(linear.weight(), weights.groups[LAYER][group])
    torch.testing.assert_close(into_OI.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_merged_linear_keeps_its_bias() -> None:
    for kind, dtype in CASES:
        if dtype is not torch.float32:
            continue
        kernels, weights = kernels_of(kind), adapter(RANKS["one"], dtype, relative=kind == "triton")
        bias_O = torch.randn(group_size("qkv", SHAPE)[0])
        linear = kernels.pack_linear(weight_of("qkv", dtype), bias_O)
        merged = kernels.merge_linear(linear, LAYER, "qkv", weights)
        x_TI = torch.zeros(3, SHAPE.hidden_size)
        torch.testing.assert_close(merged(x_TI), bias_O.expand(3, -1))


def test_packed_weights_come_back_bit_for_bit() -> None:
    kernels, rng = NumbaKernels(SHAPE.head_dim), random.Random(0)
    assert kernels.why_not_merged is None
    for _ in range(30):
        weight_OI = torch.randn(rng.randrange(1, 300), rng.randrange(1, 300))
        weight_OI[0, 0] = -0.0
        assert bits(kernels.pack_linear(weight_OI, None).weight()) == bits(weight_OI)


def test_weights_lie_below_the_top_without_overlap_the_first_groups_uppermost() -> None:
    for element_bytes in (2, 4):
        spans = []
        for group in GROUPS:
            out_features, in_features = group_size(group, SHAPE)
            for layer in range(SHAPE.num_layers):
                begin = -distance_below_top(layer, group, SHAPE, element_bytes)
                assert begin % 256 == 0
                spans.append((begin, begin + out_features * in_features * element_bytes, group))
                assert -begin <= layout_bytes({group}, SHAPE, element_bytes)
        spans.sort()
        assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(spans))
        assert spans[-1][1] <= 0
        assert [group for _, _, group in reversed(spans)] == [g for g in GROUPS for _ in range(2)]
        lowest = spans[0][0]
        assert layout_bytes(GROUPS, SHAPE, element_bytes) == layout_bytes({"down"}, SHAPE, element_bytes)
        assert layout_bytes(GROUPS, SHAPE, element_bytes) == -lowest
        assert layout_bytes((), SHAPE, element_bytes) == 0
