"""Each compiled kernel against plain torch, on one thread and on several."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from kernel_batches import kernel_batch

from loraplex.core.modules import GROUPS
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.cpu.numba_kernels import NumbaKernels, PackedFloat32Linear, padded_rows
from loraplex.kernels.lora import LoraGroup, LoraPart, LoraSegment, LoraWeights, host_weights
from loraplex.kernels.reference import TorchKernels

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 24, 6, 2, 8, 30
CACHE = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
GROUP_SIZES = {"qkv": (40, (24, 16, 16)), "o": (24, (40,)), "gate_up": (40, (56, 56)), "down": (56, (40,))}
NUMBA, TORCH = NumbaKernels(HEAD_DIM), TorchKernels()


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def batch_of(
    num_rows: int,
    *,
    contexts: list[int] | None = None,
    segments: list[LoraSegment] | None = None,
    kernels=TORCH,
) -> KernelBatch:
    """A batch of decode rows; every row has a block table of its own."""
    contexts = contexts or [1] * num_rows
    width = max(-(-context // BLOCK_SIZE) for context in contexts)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
    tables = torch.stack([order.roll(7 * row)[:width] for row in range(num_rows)])
    positions = torch.tensor(contexts) - 1
    slots = tables[torch.arange(num_rows), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return kernel_batch(
        positions_T=positions,
        slots_T=slots,
        decode_rows_D=torch.arange(num_rows),
        decode_context_D=torch.tensor(contexts),
        decode_blocks_DB=tables.contiguous(),
        lora=kernels.prepare_lora(segments or []),
    )


@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("size", [24, 64, 513])
def test_rms_norm_equals_torch(generator: torch.Generator, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size, generator=generator), torch.randn(size, generator=generator)
    torch.testing.assert_close(NUMBA.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


def test_add_rms_norm_changes_the_residual_in_place(generator: torch.Generator) -> None:
    x, residual, weight = (torch.randn(shape, generator=generator) for shape in ((9, 48), (9, 48), (48,)))
    expected_residual = residual.clone()
    expected = TORCH.add_rms_norm(x, expected_residual, weight, 1e-6)
    torch.testing.assert_close(NUMBA.add_rms_norm(x, residual, weight, 1e-6), expected)
    torch.testing.assert_close(residual, expected_residual)


def test_rms_norm_takes_strided_heads(generator: torch.Generator) -> None:
    heads = torch.randn(7, 10, HEAD_DIM, generator=generator)
    weight = torch.randn(HEAD_DIM, generator=generator)
    part = heads[:, 2:5]
    torch.testing.assert_close(NUMBA.rms_norm(part, weight, 1e-6), TORCH.rms_norm(part, weight, 1e-6))


def test_silu_mul_equals_torch_over_the_whole_range() -> None:
    gate = torch.cat((torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30])))
    gate_up = torch.cat((gate, torch.full_like(gate, 0.75)))[None].repeat(6, 1)
    torch.testing.assert_close(NUMBA.silu_mul(gate_up), TORCH.silu_mul(gate_up), rtol=1e-6, atol=1e-30)


def test_rope_and_cache_equals_torch(generator: torch.Generator) -> None:
    size = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv, table = torch.randn(5, size, generator=generator), torch.randn(64, HEAD_DIM, generator=generator)
    batch = batch_of(5, contexts=[1, 9, 17, 30, 8])
    found_k, found_v = torch.zeros(CACHE), torch.zeros(CACHE)
    expected_k, expected_v = torch.zeros(CACHE), torch.zeros(CACHE)
    expected = qkv.clone()
    NUMBA.rope_and_cache(qkv, table, batch, found_k, found_v)
    TORCH.rope_and_cache(expected, table, batch, expected_k, expected_v)
    torch.testing.assert_close(qkv, expected)
    torch.testing.assert_close(found_k, expected_k)
    torch.testing.assert_close(found_v, expected_v)


@pytest.mark.parametrize("contexts", [[1], [8], [9, 1, 64, 33, 40], [50] * 20])
def test_decode_attention_equals_torch(generator: torch.Generator, contexts: list[int]) -> None:
    size = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = 3 * torch.randn(len(contexts), size, generator=generator)
    k, v = (3 * torch.randn(size, generator=generator) for size in (CACHE, CACHE))
    batch = batch_of(len(contexts), contexts=contexts)
    # The row's own key and value are in the cache by the time attention runs.
    TORCH.rope_and_cache(qkv, torch.ones(64, HEAD_DIM), batch, k, v)
    torch.testing.assert_close(
        NUMBA.attention(qkv, batch, k, v), TORCH.attention(qkv, batch, k, v), rtol=5e-5, atol=5e-5
    )


def test_prefill_over_a_cached_prefix_equals_one_row_at_a_time(generator: torch.Generator) -> None:
    size = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    k, v = (torch.randn(size, generator=generator) for size in (CACHE, CACHE))
    qkv = torch.randn(6, size, generator=generator)
    blocks = torch.tensor([4, 2, 9])
    prefill = kernel_batch(
        span_starts_S=torch.tensor([0]),
        span_lens_S=torch.tensor([6]),
        span_context_S=torch.tensor([20]),
        span_blocks_SB=blocks[None],
        max_span_len=6,
    )
    decode = kernel_batch(
        decode_rows_D=torch.arange(6),
        decode_context_D=torch.arange(15, 21),
        decode_blocks_DB=blocks.repeat(6, 1),
    )
    torch.testing.assert_close(
        NUMBA.attention(qkv, prefill, k, v), NUMBA.attention(qkv, decode, k, v), rtol=5e-5, atol=5e-5
    )


def lora_weights(generator: torch.Generator, ranks: dict[str, int]) -> LoraWeights:
    """One layer; `ranks` by module, absent ones are left alone."""
    groups = {}
    for name, (in_features, out_sizes) in GROUP_SIZES.items():
        parts, rank_start, out_start = [], 0, 0
        for module, out_features in zip(GROUPS[name], out_sizes, strict=True):
            rank = ranks.get(module, 0)
            if rank:
                parts.append(
                    LoraPart(
                        module=module,
                        b_t_RO=torch.randn(rank, out_features, generator=generator),
                        scale=0.3 + rank_start,
                        rank_start=rank_start,
                        rank_end=rank_start + rank,
                        out_start=out_start,
                        out_end=out_start + out_features,
                    )
                )
            rank_start, out_start = rank_start + rank, out_start + out_features
        if parts:
            a_RI = torch.randn(rank_start, in_features, generator=generator)
            groups[name] = LoraGroup(a_RI=a_RI, parts=tuple(parts))
    return host_weights((groups,), max(ranks.values()))


@pytest.mark.parametrize("has_blas", [True, False], ids=["own products", "torch's products"])
@pytest.mark.parametrize("many", [False, True], ids=["few segments", "many segments"])
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_lora_of_any_ranks_modules_and_segments_equals_torch(
    generator: torch.Generator, group: str, many: bool, has_blas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_blas:
        monkeypatch.setattr("loraplex.kernels.cpu.numba_kernels.sgemm_address", lambda: None)
    adapters = [
        lora_weights(generator, {"q_proj": 1, "v_proj": 3, "o_proj": 16, "gate_proj": 5, "down_proj": 64}),
        lora_weights(generator, {"k_proj": 17, "up_proj": 2}),
        lora_weights(generator, {module: 8 for name in GROUPS.values() for module in name}),
        lora_weights(generator, {"q_proj": 512}),
    ]
    # One row, a few rows, base rows in between (3..4, 12), many rows: every path, and the gaps.
    spans = [(0, 1), (1, 3), (5, 6), (6, 12), (13, 40)]
    if many:
        spans += [(40 + 2 * index, 42 + 2 * index) for index in range(8)]
    segments = [
        LoraSegment(start=start, end=end, weights=adapters[index % 4])
        for index, (start, end) in enumerate(spans)
    ]
    in_features, out_sizes = GROUP_SIZES[group]
    x = torch.randn(60, in_features, generator=generator)
    base = torch.randn(60, sum(out_sizes), generator=generator)
    found, expected = base.clone(), base.double()
    NUMBA.add_lora(found, x, batch_of(1, segments=segments, kernels=NUMBA), 0, group)
    for segment in segments:
        lora = segment.weights.groups[0].get(group)
        if lora is not None:
            for part in lora.parts:
                rows, columns = slice(segment.start, segment.end), slice(part.out_start, part.out_end)
                a = lora.a_RI[part.rank_start : part.rank_end].double()
                delta = x[rows].double() @ a.t() @ part.b_t_RO.double()
                expected[rows, columns] += part.scale * delta
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[3:5], base[3:5], rtol=0, atol=0)  # base rows are untouched
    reference = base.clone()
    TORCH.add_lora(reference, x, batch_of(1, segments=segments), 0, group)
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-3)


def test_a_batch_without_adapters_is_left_alone(generator: torch.Generator) -> None:
    y = torch.randn(4, 56, generator=generator)
    before = y.clone()
    NUMBA.add_lora(
        y, torch.randn(4, 40, generator=generator), batch_of(1, segments=[], kernels=NUMBA), 0, "qkv"
    )
    torch.testing.assert_close(y, before, rtol=0, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_torch(generator: torch.Generator, bias: bool) -> None:
    weight = torch.randn(56, 40, generator=generator)
    bias_O = torch.randn(56, generator=generator) if bias else None
    packed = NUMBA.pack_linear(weight, bias_O)
    for num_rows in (1, 3, 16, 33, 200, 257):
        x = torch.randn(num_rows, 40, generator=generator)
        expected = torch.nn.functional.linear(x, weight, bias_O)
        y = packed(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert y.is_contiguous()


def test_products_are_compiled_for_few_numbers_of_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN compiles a product for each number of rows, and keeps most of its memory."""
    packed = NUMBA.pack_linear(torch.zeros(24, 8), None)
    if not isinstance(packed, PackedFloat32Linear):
        pytest.skip("torch without oneDNN")
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for num_rows in range(1, 513):
            assert packed(torch.zeros(num_rows, 8)).shape == (num_rows, 24)
    products = re.findall(
        r"exec,cpu,(?:inner_product|matmul),.*?,(mb\d+\w*|\d+x\d+:\d+x\d+)", capfd.readouterr().out
    )
    assert len(products) == 512
    assert len(set(products)) == 32 + 4 * 16


def test_rows_are_padded_by_a_sixteenth_at_most() -> None:
    sizes = [padded_rows(num_rows) for num_rows in range(4097)]
    assert sizes[:33] == list(range(33)), "decode batches are computed as they are"
    assert all(rows <= size <= rows * 17 / 16 for rows, size in enumerate(sizes))
    assert all(padded_rows(size) == size for size in sizes)
