"""Section `kernels`: decode and prefill attention over a paged cache, against softmax in float64.

Whatever no row may see is NaN: cache beyond the contexts, and blocks that are nobody's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.correctness.check import Check, Setting, holds, row_error, within
from benchmarks.correctness.kernel_batch import BLOCK_SIZE, kernel_batch
from loraplex.core.shape import ModelShape
from loraplex.kernels.reference import TorchKernels
from loraplex.kernels.triton.decode_attention import DecodeScratch, decode_attention
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.shapes import config_of_shape

TORCH = TorchKernels()


def attention_checks(shape_name: str, setting: Setting, tolerance: float) -> list[Check]:
    shape = config_of_shape(shape_name).shape
    longest = 70 if setting.tiny else 4000
    checks = [
        _decode(shape, count, longest, setting, tolerance)
        for count in ((1, 4) if setting.tiny else (1, 4, 33, 64, 128))
    ]
    checks += [
        _split(shape, splits, longest, setting, tolerance)
        for splits in ((1, 4) if setting.tiny else (1, 2, 4, 8, 16))
    ]
    # (rows, context): a prompt of its own, one over a long prefix, one row, none, one that ends a page.
    spans = ((5, 5), (9, 40), (0, 0), (1, 33)) if setting.tiny else (
        (700, 700), (512, 4000), (1, 3000), (0, 0), (16, 32), (130, 1000), (1, 1),
    )  # fmt: skip
    checks += [
        _prefill(shape, spans, setting, tolerance),
        _mixed(shape, longest, spans, setting, tolerance),
    ]
    return [replace(check, name=f"{shape_name}: {check.name}") for check in checks]


class _Paged:
    """Contexts of random tokens in one of three layers that share an arena, pages in random order."""

    def __init__(self, shape: ModelShape, contexts: Sequence[int], setting: Setting) -> None:
        device = setting.torch_device
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        size = (sum(counts) + 1, 3, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        arena = torch.full(size, math.nan, dtype=setting.kernel_dtype, device=device)
        self.k_cache, self.v_cache = arena[:, 1, 0], arena[:, 1, 1]
        # Block 0 belongs to nobody, and is what tables are padded with.
        order = torch.split(torch.randperm(sum(counts)) + 1, counts)
        self.tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int64, device=device)
        for table, blocks, context in zip(self.tables, order, contexts, strict=True):
            table[: len(blocks)] = blocks
            at = self.slots(table, torch.arange(context, device=device))
            for cache in (self.k_cache, self.v_cache):
                drawn = torch.randn(context, shape.num_kv_heads, shape.head_dim, device=device)
                cache[at] = drawn.to(cache.dtype)

    def slots(self, table: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, slice, torch.Tensor]:
        return table[tokens // BLOCK_SIZE], slice(None), tokens % BLOCK_SIZE

    def rows(self, shape: ModelShape, table: torch.Tensor, num_rows: int, context: int) -> torch.Tensor:
        """The last rows of a context as a step brings them: random queries, and what is in the cache."""
        at = self.slots(table, torch.arange(context - num_rows, context, device=table.device))
        q = torch.randn(num_rows, shape.q_size, device=table.device).to(self.k_cache.dtype)
        return torch.cat((q, self.k_cache[at].flatten(1), self.v_cache[at].flatten(1)), dim=1)


def _contexts(num_rows: int, longest: int) -> list[int]:
    """Return context lengths from one token to the longest, page borders among them."""
    special = [longest, 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1]
    drawn = torch.randint(1, longest + 1, (num_rows,)).tolist()
    return [*special, *drawn][:num_rows]


def _decode(shape: ModelShape, num_rows: int, longest: int, setting: Setting, tolerance: float) -> Check:
    """Through the interface, which splits contexts as the engine does."""
    device, contexts = setting.torch_device, _contexts(num_rows, longest)
    paged = _Paged(shape, contexts, setting)
    qkv = torch.cat([paged.rows(shape, t, 1, c) for t, c in zip(paged.tables, contexts, strict=True)])
    batch = kernel_batch(
        device,
        decode_rows_D=torch.arange(num_rows, device=device),
        decode_context_D=torch.tensor(contexts, device=device),
        decode_blocks_DB=paged.tables,
    )
    found = TritonKernels(shape, device).attention(qkv, batch, paged.k_cache, paged.v_cache)
    expected = TORCH.attention(qkv.double(), batch, paged.k_cache.double(), paged.v_cache.double())
    return within(
        f"decode attention of {num_rows} rows",
        f"contexts of 1 to {longest}, head by head against float64",
        _head_error(shape, found, expected),
        tolerance,
    )


def _split(shape: ModelShape, num_splits: int, longest: int, setting: Setting, tolerance: float) -> Check:
    """A number of splits of our own, scratch full of NaN, and a padding decode, for which nothing may be
    written: it names a row of another."""
    device, contexts = setting.torch_device, [longest, 1, BLOCK_SIZE + 1, longest // 2, 0]
    paged = _Paged(shape, contexts, setting)
    rows = [paged.rows(shape, t, 1, c) for t, c in zip(paged.tables[:4], contexts, strict=False)]
    qkv = torch.cat((*rows, rows[0]))
    out = torch.full((5, shape.q_size), math.nan, dtype=qkv.dtype, device=device)
    parts = 5 * shape.num_heads * num_splits
    scratch = DecodeScratch(
        values_PH=torch.full((parts, shape.head_dim), math.nan, device=device),
        weights_P=torch.full((parts,), math.nan, device=device),
    )
    at, lengths = torch.tensor([0, 1, 2, 3, 0], device=device), torch.tensor(contexts, device=device)
    decode_attention(qkv, at, lengths, paged.tables, paged.k_cache, paged.v_cache, out, num_splits, scratch)
    batch = kernel_batch(
        device,
        decode_rows_D=torch.arange(4, device=device),
        decode_context_D=lengths[:4],
        decode_blocks_DB=paged.tables[:4],
    )
    expected = TORCH.attention(qkv.double(), batch, paged.k_cache.double(), paged.v_cache.double())
    name = f"decode attention in {num_splits} splits"
    if not bool(out[4].isnan().all()):
        return holds(name, "a padding decode writes nothing", False)
    error = _head_error(shape, out[:4], expected[:4])
    return within(name, "every context split, head by head against float64", error, tolerance)


def _prefill(
    shape: ModelShape, spans: Sequence[tuple[int, int]], setting: Setting, tolerance: float
) -> Check:
    return _step(shape, [], spans, setting, tolerance, "prefill attention")


def _mixed(
    shape: ModelShape, longest: int, spans: Sequence[tuple[int, int]], setting: Setting, tolerance: float
) -> Check:
    contexts = _contexts(3 if setting.tiny else 40, longest)
    return _step(
        shape, contexts, spans, setting, tolerance, f"attention of {len(contexts)} decodes and prompts"
    )


def _step(
    shape: ModelShape,
    decodes: Sequence[int],
    spans: Sequence[tuple[int, int]],
    setting: Setting,
    tolerance: float,
    name: str,
) -> Check:
    """One row for each of the decodes' contexts, then the spans' rows."""
    device, num_decodes = setting.torch_device, len(decodes)
    lens, contexts = [1] * num_decodes + [n for n, _ in spans], [*decodes, *(c for _, c in spans)]
    paged = _Paged(shape, contexts, setting)
    rows = zip(paged.tables, lens, contexts, strict=True)
    qkv = torch.cat([paged.rows(shape, table, length, context) for table, length, context in rows])
    starts = torch.tensor([0, *lens], device=device).cumsum(0)[:-1]
    lengths, sizes = torch.tensor(contexts, device=device), torch.tensor(lens, device=device)
    batch = kernel_batch(
        device,
        decode_rows_D=starts[:num_decodes],
        decode_context_D=lengths[:num_decodes],
        decode_blocks_DB=paged.tables[:num_decodes],
        span_starts_S=starts[num_decodes:],
        span_lens_S=sizes[num_decodes:],
        span_context_S=lengths[num_decodes:],
        span_blocks_SB=paged.tables[num_decodes:],
        max_span_len=max(length for length, _ in spans),
    )
    found = TritonKernels(shape, device).attention(qkv, batch, paged.k_cache, paged.v_cache)
    # The reference takes no span without rows.
    kept = sizes[num_decodes:] > 0
    without_empty = replace(
        batch,
        span_starts_S=batch.span_starts_S[kept],
        span_lens_S=batch.span_lens_S[kept],
        span_context_S=batch.span_context_S[kept],
        span_blocks_SB=batch.span_blocks_SB[kept],
    )
    expected = TORCH.attention(qkv.double(), without_empty, paged.k_cache.double(), paged.v_cache.double())
    described = ", ".join(f"{length} of {context}" for length, context in spans)
    return within(
        name,
        f"last rows of paged contexts ({described}), head by head against float64",
        _head_error(shape, found, expected),
        tolerance,
    )


def _head_error(shape: ModelShape, found: torch.Tensor, expected: torch.Tensor) -> float:
    heads = (found.shape[0], -1, shape.head_dim)
    return row_error(found.view(heads), expected.view(heads))
