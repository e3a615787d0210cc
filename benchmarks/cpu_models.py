"""The models that the comparison on a CPU serves, each with its traffic and result file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.make_checkpoint import HALF_BILLION, SERVED, Size
from benchmarks.measure import Traffic


@dataclass(frozen=True, kw_only=True)
class CpuModel:
    """`suffix`: what its files and folders are named by, beside what they hold."""

    size: Size
    traffic: Traffic
    description: str
    suffix: str

    @property
    def file(self) -> str:
        return f"cpu_serve{self.suffix}.json"


MODELS: Final[Mapping[str, CpuModel]] = {
    "28m": CpuModel(
        size=SERVED,
        traffic=Traffic(),
        description="random Llama, 28M parameters, float32 (benchmarks/make_checkpoint.py)",
        suffix="",
    ),
    # Fewer requests at a time, shorter answers and a short warm-up: a repeat of all engines takes minutes.
    "0.5b": CpuModel(
        size=HALF_BILLION,
        traffic=Traffic(
            num_requests=16, concurrency=8, output_tokens=16, warmup_requests=8, warmup_output_tokens=2
        ),
        description="random Llama, 0.5B parameters in the layers of Qwen2.5-0.5B without biases and with "
        "65,536 tokens, float32 (benchmarks/make_checkpoint.py)",
        suffix="_05b",
    ),
}
