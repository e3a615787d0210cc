"""Section `kernels`: every Triton kernel at full size in half precision, against float64."""

from __future__ import annotations

import torch

from benchmarks.correctness.check import Check, Setting
from benchmarks.correctness.kernel_attention import attention_checks
from benchmarks.correctness.kernel_lora import lora_checks
from benchmarks.correctness.kernel_rows import row_checks
from benchmarks.device_memory import release

SHAPES = ("llama-2-7b", "llama-3-8b")
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""The largest error by dtype, as a share of a row's length. Rounding once to bfloat16 costs a row of random
numbers about 1.7e-3 of its length; kernels round twice or three times, each at random."""


def kernels(setting: Setting) -> list[Check]:
    checks: list[Check] = []
    for shape in ("tiny",) if setting.tiny else SHAPES:
        torch.manual_seed(0)
        tolerance = TOLERANCE[setting.kernel_dtype]
        for part in (row_checks, attention_checks, lora_checks):
            checks += part(shape, setting, tolerance)
            release()
    return checks
