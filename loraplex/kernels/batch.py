"""One step's batch as the kernels see it: T tokens of S sequences, concatenated.

Sequences with the same adapter are adjacent, so that the tokens of an adapter are one segment and its weights
are read once. If the kernels need decoding rows first, this holds separately for those and for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBatch:
    """Tensors of one step, all of int64.

    token_ids_T, positions_T: each row's token, and its position in its sequence.
    slots_T: the KV slot (block * block_size + offset) each row is written to.
    decode_rows_D: rows of sequences with exactly one token, in any order (the engine's is longest context
    first, which is fastest); decode_context_D their context lengths (this token included); decode_blocks_DB
    their block tables, padded with zeros.
    span_*: the other sequences, S of them: first row, number of rows, context length (these rows included),
    block table. max_span_len: the longest of them, 0 if there is none.
    lora: what `Kernels.prepare_lora` made of the step's segments, opaque to all but the kernels. gate: where
    the kernels wait for weights that are still being copied, if they may have to. logit_rows_L: the rows
    whose logits are needed.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    decode_rows_D: torch.Tensor
    decode_context_D: torch.Tensor
    decode_blocks_DB: torch.Tensor
    span_starts_S: torch.Tensor
    span_lens_S: torch.Tensor
    span_context_S: torch.Tensor
    span_blocks_SB: torch.Tensor
    max_span_len: int
    lora: Any
    logit_rows_L: torch.Tensor
    gate: Any = None
