"""A cost model with the figures of a known machine, and noise as it comes with measurements."""

from __future__ import annotations

import random
from collections.abc import Callable

from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CostModel
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.held_out import HeldOut
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.least_squares import quality_of
from loraplex.perf.line import Line, fit_line
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

H200_MEMORY = EngineMemory(
    step_tokens=1024,
    position_cost=4e-5,
    max_context=4096,
    token_bytes=32 * 2 * 4096 * 2,
    block_tokens=16,
    arena_bytes=100 << 30,
    kv_tokens=None,
    host_bytes=32 << 30,
    table_bytes=32 * 7 * 6 * 8,
    rank_bytes={
        module: 32 * 2 * width
        for module, width in (
            *((name, 8192) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *((name, 4096 + 11008) for name in ("gate_proj", "up_proj", "down_proj")),
        )
    },
)


def noisy(share: float, seed: int = 0) -> Callable[[float], float]:
    """Multiplies with up to `share` more or less."""
    generator = random.Random(seed)
    return lambda seconds: seconds * (1 + generator.uniform(-share, share))


def h200_model() -> CostModel:
    rows, seconds_at = (1, 32, 64, 128, 2048), (4.3e-3, 5.4e-3, 6.4e-3, 7.4e-3, 60e-3)
    curve = RowCurve(rows=rows, seconds_at=seconds_at, stepped=True)
    return CostModel(
        subject=SUBJECT,
        measured=True,
        bus=H200_BUS,
        read=fit_line([(1e6, 0.5e-3), (5e7, 6e-3), (1e8, 12e-3)]),
        disk=Line(latency_s=1e-3, unit_s=1 / 2e9),
        step=StepCost(
            decodes=curve,
            prompts=curve,
            terms=StepTerms(decode_position_s=1e-8, prompt_pair_s=1e-10, adapter_byte_s=1 / 4e12),
        ),
        assist=AssistCost(round_trip_s=20e-6, token_s=0.6e-6, call_s=30e-6, weight_s=1e-11, row_s=10e-12),
        held_out=HeldOut(
            decode=quality_of([1.0, 2.0], [1.1, 2.0]),
            prefill=quality_of([1.0, 2.0], [1.2, 2.0]),
            serving=quality_of([1.0, 2.0], [1.4, 2.0]),
            load=quality_of([1.0, 2.0], [1.3, 2.0]),
        ),
        memory=H200_MEMORY,
    )
