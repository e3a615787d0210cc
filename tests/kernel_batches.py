"""Batches for tests of kernels: what a test does not name is empty."""

from __future__ import annotations

from typing import Any

import torch

from loraplex.kernels.batch import KernelBatch


def kernel_batch(**fields: Any) -> KernelBatch:
    none = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros(0, 0, dtype=torch.int64)
    empty = {name: table if name.endswith("B") else none for name in KernelBatch.__slots__}
    return KernelBatch(**{**empty, "max_span_len": 0, "lora": (), **fields})
