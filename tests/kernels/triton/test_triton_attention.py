"""Decode and prefill attention over a paged cache against softmax in float64.

Whatever no row may see is NaN: cache beyond the contexts, padding of block tables, the splits' scratch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from loraplex.kernels.triton.decode_attention import DecodeScratch, choose_num_splits, decode_attention
from loraplex.kernels.triton.prefill_attention import prefill_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, kw_only=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


GQA = Heads(num_heads=6, num_kv_heads=2, head_dim=32)
MHA = Heads(num_heads=2, num_kv_heads=2, head_dim=80)
WIDE = Heads(num_heads=4, num_kv_heads=1, head_dim=128)
HEADS = pytest.mark.parametrize("heads", [GQA, MHA, WIDE], ids=["gqa", "mha of 80", "mqa of 128"])


class Paged:
    """Contexts of random tokens in the second of three layers that share an arena, page by page."""

    def __init__(self, heads: Heads, contexts: list[int], dtype: torch.dtype) -> None:
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        size = (sum(counts) + 1, 3, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
        arena = torch.full(size, math.nan, dtype=dtype, device=DEVICE)
        self.k_cache, self.v_cache = arena[:, 1, 0], arena[:, 1, 1]
        # Block 0 belongs to nobody, and is what tables are padded with.
        order = (torch.randperm(sum(counts)) + 1).split(counts)
        self.tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int64, device=DEVICE)
        self.k_LND, self.v_LND = [], []
        for table, blocks, context in zip(self.tables, order, contexts, strict=True):
            table[: len(blocks)] = blocks
            tokens = torch.arange(context, device=DEVICE)
            at = (table[tokens // BLOCK_SIZE], slice(None), tokens % BLOCK_SIZE)
            for cache, kept in ((self.k_cache, self.k_LND), (self.v_cache, self.v_LND)):
                kept.append(torch.randn(context, heads.num_kv_heads, heads.head_dim).to(DEVICE, dtype))
                cache[at] = kept[-1]


def new_qkv(heads: Heads, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return torch.randn(num_rows, columns).to(DEVICE, dtype)


def put_kv(heads: Heads, qkv: torch.Tensor, start: int, k_LND: torch.Tensor, v_LND: torch.Tensor) -> None:
    """Write new rows' keys and values beside their queries, as the cache has them."""
    columns = heads.num_heads * heads.head_dim
    qkv[start : start + len(k_LND), columns:] = torch.cat((k_LND.flatten(1), v_LND.flatten(1)), dim=1)


def attended(heads: Heads, q_TO: torch.Tensor, k_LND: torch.Tensor, v_LND: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T tokens of a context, in float64."""
    num_rows, context = q_TO.shape[0], k_LND.shape[0]
    group = heads.num_heads // heads.num_kv_heads
    q = q_TO[:, : heads.num_heads * heads.head_dim].double().view(num_rows, heads.num_heads, heads.head_dim)
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k_LND, v_LND))
    scores = torch.einsum("tnd,lnd->ntl", q, k) / math.sqrt(heads.head_dim)
    unseen = torch.ones(num_rows, context, dtype=torch.bool, device=DEVICE).triu(context - num_rows + 1)
    weights = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
    return torch.einsum("ntl,lnd->tnd", weights, v).flatten(1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def empty_out(heads: Heads, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_rows, heads.num_heads * heads.head_dim), math.nan, dtype=dtype, device=DEVICE)


def scratch_for(heads: Heads, num_sms: int = 132) -> DecodeScratch:
    scratch = DecodeScratch.empty(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        num_sms=num_sms,
        device=DEVICE,
    )
    scratch.values_PH.fill_(math.nan)
    scratch.weights_P.fill_(math.nan)
    return scratch


@DTYPES
@HEADS
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_decode_equals_softmax(heads: Heads, num_splits: int, dtype: torch.dtype) -> None:
    contexts = [1, 16, 131, 17]
    paged, qkv = Paged(heads, contexts, dtype), new_qkv(heads, 6, dtype)
    out, rows = empty_out(heads, 6, dtype), torch.tensor([5, 0, 3, 2], device=DEVICE)
    decode_attention(
        qkv,
        rows,
        torch.tensor(contexts, device=DEVICE),
        paged.tables,
        paged.k_cache,
        paged.v_cache,
        out,
        num_splits,
        scratch_for(heads),
    )
    for row, k, v in zip(rows.tolist(), paged.k_LND, paged.v_LND, strict=True):
        assert_close(out[row : row + 1], attended(heads, qkv[row : row + 1], k, v))
    assert out[[1, 4]].isnan().all(), "rows of other sequences are left alone"


@pytest.mark.parametrize("heads", [MHA, WIDE], ids=["mha of 80", "mqa of 128"])
def test_decode_by_many_small_programs_equals_softmax(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.kernels.triton.decode_attention._MANY_PROGRAMS", 1)
    test_decode_equals_softmax(heads, 1, torch.float16)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_nothing_is_written_for_padding_decodes(num_splits: int) -> None:
    """They name row 0, which is another one's."""
    contexts = [40, 0, 0]
    paged, qkv = Paged(GQA, contexts, torch.float16), new_qkv(GQA, 3, torch.float16)
    out = empty_out(GQA, 3, torch.float16)
    decode_attention(
        qkv,
        torch.zeros(3, dtype=torch.int64, device=DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        paged.tables.int(),
        paged.k_cache,
        paged.v_cache,
        out,
        num_splits,
        scratch_for(GQA),
    )
    assert_close(out[:1], attended(GQA, qkv[:1], paged.k_LND[0], paged.v_LND[0]))
    assert out[1:].isnan().all()


def test_decode_of_large_scores_does_not_overflow() -> None:
    paged, qkv = Paged(GQA, [150], torch.float32), 200 * new_qkv(GQA, 1, torch.float32)
    out, row, contexts = (empty_out(GQA, 1, torch.float32), *torch.tensor([[0], [150]], device=DEVICE))
    decode_attention(qkv, row, contexts, paged.tables, paged.k_cache, paged.v_cache, out, 2, scratch_for(GQA))
    expected = attended(GQA, qkv, paged.k_LND[0], paged.v_LND[0])
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@DTYPES
@HEADS
def test_prefill_equals_softmax(heads: Heads, dtype: torch.dtype) -> None:
    """Spans with and without a prefix, of one row, of many, of none, and rows of others between them."""
    lens, contexts, starts = [21, 1, 70, 0, 6], [21, 145, 203, 0, 6], [0, 21, 24, 94, 94]
    paged, qkv = Paged(heads, contexts, dtype), new_qkv(heads, 101, dtype)
    qkv[[22, 23, 100]] = math.nan
    for start, length, k, v in zip(starts, lens, paged.k_LND, paged.v_LND, strict=True):
        put_kv(heads, qkv, start, k[len(k) - length :], v[len(v) - length :])
    out = empty_out(heads, 101, dtype)
    prefill_attention(
        qkv,
        torch.tensor(starts, device=DEVICE),
        torch.tensor(lens, device=DEVICE),
        torch.tensor(contexts, device=DEVICE),
        paged.tables,
        paged.k_cache,
        paged.v_cache,
        out,
        max(lens),
    )
    for start, length, k, v in zip(starts, lens, paged.k_LND, paged.v_LND, strict=True):
        span = slice(start, start + length)
        assert_close(out[span], attended(heads, qkv[span], k, v))
    assert out[[22, 23, 100]].isnan().all()


@pytest.mark.parametrize("trial", range(6))
def test_prefill_of_random_spans(trial: int) -> None:
    generator = torch.Generator().manual_seed(trial)
    lens = torch.randint(1, 90, (2,), generator=generator)
    prefixes = torch.randint(0, 150, (2,), generator=generator)
    contexts, starts = lens + prefixes, torch.tensor([0, int(lens[0])])
    paged, num_rows = Paged(GQA, contexts.tolist(), torch.float32), int(lens.sum())
    qkv, out = new_qkv(GQA, num_rows, torch.float32), empty_out(GQA, num_rows, torch.float32)
    for start, length, k, v in zip(starts.tolist(), lens.tolist(), paged.k_LND, paged.v_LND, strict=True):
        put_kv(GQA, qkv, start, k[-length:], v[-length:])
    tables = (x.to(DEVICE, torch.int32) for x in (starts, lens, contexts))
    # The bound may be larger than any span.
    prefill_attention(qkv, *tables, paged.tables.int(), paged.k_cache, paged.v_cache, out, 100)
    for span, k, v in zip(out.split(lens.tolist()), paged.k_LND, paged.v_LND, strict=True):
        start = span.storage_offset() // out.shape[1]
        assert_close(span, attended(GQA, qkv[start : start + len(span)], k, v))


@DTYPES
def test_prefill_is_the_same_however_a_prompt_is_cut(dtype: torch.dtype) -> None:
    """Also where a tile of keys is partly cached and partly new."""
    context = 150
    paged, qkv = Paged(GQA, [context], dtype), new_qkv(GQA, context, dtype)
    put_kv(GQA, qkv, 0, paged.k_LND[0], paged.v_LND[0])

    def last_rows(cached: int) -> torch.Tensor:
        rows, out = qkv[cached:].contiguous(), empty_out(GQA, context - cached, dtype)
        start, length, whole = torch.tensor([[0], [context - cached], [context]], device=DEVICE)
        prefill_attention(
            rows, start, length, whole, paged.tables, paged.k_cache, paged.v_cache, out, len(rows)
        )
        return out

    at_once = last_rows(0)
    for cached in (16, 64, 80, 128, 144):
        assert torch.equal(last_rows(cached), at_once[cached:])


def test_caches_may_be_larger_than_32_bits_of_elements() -> None:
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=16)
    block_stride = 2**30 + 16
    memory = torch.empty(3 * block_stride, dtype=torch.float16, device=DEVICE)  # mostly never touched
    size, strides = (3, 1, BLOCK_SIZE, 16), (block_stride, BLOCK_SIZE * 16, 16, 1)
    k_cache, v_cache = memory.as_strided(size, strides), memory[1024:].as_strided(size, strides)
    k_cache[2], v_cache[2] = torch.randn(2, 1, BLOCK_SIZE, 16).to(DEVICE, torch.float16)
    k_LND, v_LND = k_cache[2].transpose(0, 1), v_cache[2].transpose(0, 1)
    qkv, tables = new_qkv(heads, 16, torch.float16), torch.tensor([[2]], device=DEVICE)
    out, start, context = (empty_out(heads, 16, torch.float16), *torch.tensor([[0], [16]], device=DEVICE))
    decode_attention(qkv, start, context, tables, k_cache, v_cache, out, 1, None)
    assert_close(out[:1], attended(heads, qkv[:1], k_LND, v_LND))
    put_kv(heads, qkv, 0, k_LND, v_LND)
    prefill_attention(qkv, start, context, context, tables, k_cache, v_cache, out, 16)
    assert_close(out, attended(heads, qkv, k_LND, v_LND))


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "num_splits"),
    [(1, 8, 16), (4, 8, 16), (8, 8, 8), (32, 8, 2), (64, 8, 1), (512, 8, 1), (1, 1, 16), (0, 8, 16)],
)
def test_few_rows_are_split_until_the_device_is_full(
    num_rows: int, num_kv_heads: int, num_splits: int
) -> None:
    assert choose_num_splits(num_rows, num_kv_heads, num_sms=132) == num_splits


def test_one_scratch_is_enough_for_every_number_of_rows() -> None:
    num_parts = scratch_for(GQA).weights_P.shape[0]
    for num_rows in range(1, 700):
        num_splits = choose_num_splits(num_rows, GQA.num_kv_heads, num_sms=132)
        assert num_splits == 1 or num_rows * GQA.num_heads * num_splits <= num_parts
