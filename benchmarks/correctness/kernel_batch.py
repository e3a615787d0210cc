"""Batches for kernels without an engine: what a check does not name is empty."""

from __future__ import annotations

from typing import Any, Final

import torch

from loraplex.kernels.batch import KernelBatch

BLOCK_SIZE: Final = 16


def kernel_batch(device: torch.device, **fields: Any) -> KernelBatch:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    table = torch.zeros(0, 0, dtype=torch.int64, device=device)
    empty = {name: table if name.endswith("B") else none for name in KernelBatch.__slots__}
    return KernelBatch(**{**empty, "max_span_len": 0, "lora": (), **fields})
