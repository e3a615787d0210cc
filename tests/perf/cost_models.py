"""A cost model with the figures of a known machine, and noise as it comes with measurements."""

from __future__ import annotations

import random
from collections.abc import Callable

from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CostModel
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line, fit_line
from loraplex.perf.read_cost import ReadCost
from loraplex.perf.step_cost import RowCurve, StepCost, StepTerms
from loraplex.perf.subject import Subject

MIB = 1 << 20
H200_BUS = Bus(copy=Line(latency_s=10e-6, unit_s=1.93e-3 / (100 * MIB)), launch_s=3e-6)
"""100 MiB in 1.94 ms at once and 2.04 ms in 32 copies; 4 MiB in 0.085 ms."""
PREFILL_S = 7.5e-3
"""128 tokens of a 7B model of 32 layers."""
RANK_64_LAYERS = (3 * MIB + MIB // 8,) * 32
"""100 MiB: q, k and v of a 7B model."""

SUBJECT = Subject(
    machine="NVIDIA H200, 16 cores of Some CPU",
    device="cuda",
    model="llama-32x4096",
    dtype="bfloat16",
    num_layers=32,
)


def noisy(share: float, seed: int = 0) -> Callable[[float], float]:
    """Multiplies with up to `share` more or less."""
    generator = random.Random(seed)
    return lambda seconds: seconds * (1 + generator.uniform(-share, share))


def h200_model() -> CostModel:
    read_ms = {1: 21.0, 2: 9.6, 4: 4.2, 8: 2.9, 16: 1.9}
    return CostModel(
        subject=SUBJECT,
        measured=True,
        bus=H200_BUS,
        read=ReadCost(
            by_readers=tuple(
                (number, fit_line([(1e6, ms * 1e-5 + 20e-6), (1e8, ms * 1e-3)]))
                for number, ms in read_ms.items()
            )
        ),
        disk=Line(latency_s=1e-3, unit_s=1 / 2e9),
        step=StepCost(
            curve=RowCurve(rows=(1, 32, 64, 128, 2048), seconds_at=(4.3e-3, 5.4e-3, 6.4e-3, 7.4e-3, 60e-3)),
            terms=StepTerms(decode_position_s=1e-8, prompt_pair_s=1e-10, adapter_byte_s=1 / 4e12),
        ),
        assist=AssistCost(
            round_trip_s=20e-6, call_s=90e-6, weight_s=1e-11, serial_s=1.4e-12, shared_s=10.4e-12
        ),
    )
