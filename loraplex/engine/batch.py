"""Lays a step plan out as tensors: rows of one adapter side by side, and where each row's logits go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.interface import Kernels
from loraplex.kernels.lora import LoraSegment, LoraWeights
from loraplex.scheduling.plan import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltBatch:
    """A batch, and which of its logit rows belong to whom.

    `sampling`: request id -> the logit row its next token is sampled from, in batch order.
    `rows_of`: request id -> the logit rows of its whole chunk, for those who asked for all rows.
    `chunks`: in the order of their rows.
    """

    chunks: tuple[Chunk, ...]
    batch: KernelBatch
    sampling: dict[str, int]
    rows_of: dict[str, slice]


class BatchBuilder:
    """Makes batches for one model on one device."""

    def __init__(self, kernels: Kernels, block_size: int) -> None:
        self._kernels = kernels
        self._block_size = block_size

    def build(
        self,
        chunks: Sequence[Chunk],
        adapters: Mapping[str, LoraWeights],
        all_rows_of: Collection[str] = (),
    ) -> BuiltBatch:
        """`all_rows_of`: requests that want logits for every row of their chunk."""
        ordered = sorted(chunks, key=self._place)
        starts = _starts(ordered)
        logit_rows, sampling, rows_of = self._choose_rows(ordered, starts, all_rows_of)
        placed = list(zip(ordered, starts, strict=True))
        decodes = [(chunk, start) for chunk, start in placed if chunk.num_tokens == 1]
        decodes.sort(key=lambda pair: pair[0].end, reverse=True)  # nobody waits for a long one begun last
        spans = [(chunk, start) for chunk, start in placed if chunk.num_tokens > 1]
        batch = KernelBatch(
            token_ids_T=torch.tensor([token for chunk in ordered for token in chunk.token_ids or (0,)]),
            positions_T=torch.from_numpy(np.concatenate([np.arange(c.start, c.end) for c in ordered])),
            slots_T=torch.from_numpy(np.concatenate([self._slots(c) for c in ordered])),
            decode_rows_D=torch.tensor([start for _, start in decodes], dtype=torch.int64),
            decode_context_D=torch.tensor([c.end for c, _ in decodes], dtype=torch.int64),
            decode_blocks_DB=_block_table([c.block_ids for c, _ in decodes]),
            span_starts_S=torch.tensor([start for _, start in spans], dtype=torch.int64),
            span_lens_S=torch.tensor([c.num_tokens for c, _ in spans], dtype=torch.int64),
            span_context_S=torch.tensor([c.end for c, _ in spans], dtype=torch.int64),
            span_blocks_SB=_block_table([c.block_ids for c, _ in spans]),
            max_span_len=max((c.num_tokens for c, _ in spans), default=0),
            lora=self._kernels.prepare_lora(self._segments(ordered, starts, adapters)),
            logit_rows_L=torch.tensor(logit_rows, dtype=torch.int64),
        )
        return BuiltBatch(chunks=tuple(ordered), batch=batch, sampling=sampling, rows_of=rows_of)

    def _place(self, chunk: Chunk) -> tuple[bool, str]:
        """Rows of one adapter side by side; where the kernels want it, decoding rows before prompts."""
        return self._kernels.decodes_first and chunk.num_tokens > 1, chunk.adapter or ""

    def _segments(
        self, ordered: Sequence[Chunk], starts: Sequence[int], adapters: Mapping[str, LoraWeights]
    ) -> list[LoraSegment]:
        segments = []
        pairs = zip(ordered, starts, strict=True)
        for _, run in groupby(pairs, key=lambda pair: self._place(pair[0])):
            members = list(run)
            (first_chunk, first_start), (last_chunk, last_start) = members[0], members[-1]
            if first_chunk.adapter is not None:
                segments.append(
                    LoraSegment(
                        start=first_start,
                        end=last_start + last_chunk.num_tokens,
                        weights=adapters[first_chunk.adapter],
                    )
                )
        return segments

    def _choose_rows(
        self, ordered: Sequence[Chunk], starts: Sequence[int], all_rows_of: Collection[str]
    ) -> tuple[list[int], dict[str, int], dict[str, slice]]:
        rows: list[int] = []
        sampling: dict[str, int] = {}
        rows_of: dict[str, slice] = {}
        for chunk, start in zip(ordered, starts, strict=True):
            end = start + chunk.num_tokens
            if chunk.request_id in all_rows_of:
                rows_of[chunk.request_id] = slice(len(rows), len(rows) + end - start)
                rows += range(start, end)
            elif chunk.samples:
                rows.append(end - 1)
            if chunk.samples:
                sampling[chunk.request_id] = len(rows) - 1
        return rows, sampling, rows_of

    def _slots(self, chunk: Chunk) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        positions = np.arange(chunk.start, chunk.end)
        blocks = np.asarray(chunk.block_ids, dtype=np.int64)[positions // self._block_size]
        slots: np.ndarray[tuple[int], np.dtype[np.int64]] = (
            blocks * self._block_size + positions % self._block_size
        )
        return slots


def _starts(ordered: Sequence[Chunk]) -> list[int]:
    starts, row = [], 0
    for chunk in ordered:
        starts.append(row)
        row += chunk.num_tokens
    return starts


def _block_table(block_ids: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max((len(blocks) for blocks in block_ids), default=0)
    table = np.zeros((len(block_ids), width), dtype=np.int64)
    for row, blocks in enumerate(block_ids):
        table[row, : len(blocks)] = blocks
    return torch.from_numpy(table)
