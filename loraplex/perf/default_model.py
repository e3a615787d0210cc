"""A cost model for a machine without a profile: cautious guesses, which drift then corrects.

Cautious means slow: a load that is predicted too slow starts early, one that is predicted too fast makes
requests wait. The figures were chosen, not measured: an order of magnitude to start with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex.core.shape import ModelShape
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CAUTIOUS_MERGE, CostModel
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line
from loraplex.perf.step_cost import RowCurve, StepCost, StepTerms
from loraplex.perf.subject import Subject


@dataclass(frozen=True, kw_only=True, slots=True)
class _Speeds:
    """Speeds of a device or of one core: memory, arithmetic, and a step's fixed overhead."""

    bytes_per_s: float
    flops_per_s: float
    step_overhead_s: float


_GPU: Final = _Speeds(bytes_per_s=300e9, flops_per_s=20e12, step_overhead_s=2e-3)
_CORE: Final = _Speeds(bytes_per_s=5e9, flops_per_s=10e9, step_overhead_s=2e-3)
_BUS: Final = Bus(copy=Line(latency_s=30e-6, unit_s=1 / 6e9), launch_s=10e-6)
_READ: Final = Line(latency_s=100e-6, unit_s=1 / 1e9)
_DISK: Final = Line(latency_s=5e-3, unit_s=1 / 100e6)
_GPU_MERGE_LATENCY_S: Final = 1e-3
_ROUND_TRIP_S: Final = 100e-6
_ADAPTER_S: Final = 10e-6
_CURVE_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def default_cost_model(subject: Subject, shape: ModelShape, *, num_cores: int) -> CostModel:
    """Return the default model of a machine with so many cores."""
    on_gpu, element_bytes = subject.device == "cuda", subject.element_bytes
    speeds = _GPU if on_gpu else _times(_CORE, num_cores)
    step = _step_cost(shape, speeds, element_bytes)
    return CostModel(
        subject=subject,
        measured=False,
        bus=_BUS if on_gpu else None,
        read=_READ,
        disk=_DISK,
        step=step,
        merge=default_merge(subject.device, step),
        assist=AssistCost(
            round_trip_s=_ROUND_TRIP_S if on_gpu else 0.0,
            token_s=element_bytes * (shape.hidden_size + shape.q_size + 2 * shape.kv_size) * _BUS.copy.unit_s
            if on_gpu
            else 0.0,
            call_s=20e-6,
            weight_s=element_bytes / _CORE.bytes_per_s,
            row_s=2 / _CORE.flops_per_s,
        ),
    )


def default_merge(device: str, step: StepCost) -> Line:
    """Return a guess of merging an adapter where steps cost as given: on a GPU the weights are read once and
    written once, each at the speed at which steps read adapters."""
    if device == "cuda":
        return Line(latency_s=_GPU_MERGE_LATENCY_S, unit_s=2 * step.terms.adapter_byte_s)
    return CAUTIOUS_MERGE


def _times(core: _Speeds, num_cores: int) -> _Speeds:
    return _Speeds(
        bytes_per_s=core.bytes_per_s * num_cores,
        flops_per_s=core.flops_per_s * num_cores,
        step_overhead_s=core.step_overhead_s,
    )


def _step_cost(shape: ModelShape, speeds: _Speeds, element_bytes: int) -> StepCost:
    """Return the cost of reading the weights and then computing with them: an upper bound on either alone."""
    num_weights = shape.linear_flops / 2 + shape.vocab_size * shape.hidden_size
    fixed_s = speeds.step_overhead_s + num_weights * element_bytes / speeds.bytes_per_s
    row_s = 2 * num_weights / speeds.flops_per_s
    position_bytes = 2 * shape.num_layers * shape.kv_size * element_bytes
    curve = RowCurve(rows=_CURVE_ROWS, seconds_at=tuple(fixed_s + rows * row_s for rows in _CURVE_ROWS))
    return StepCost(
        decodes=curve,
        prompts=curve,
        terms=StepTerms(
            decode_position_s=max(
                position_bytes / speeds.bytes_per_s, shape.attention_flops / speeds.flops_per_s
            ),
            prompt_pair_s=shape.attention_flops / speeds.flops_per_s,
            lora_s=shape.num_layers * _ADAPTER_S,
            adapter_s=_ADAPTER_S,
            adapter_byte_s=1 / speeds.bytes_per_s,
            row_adapter_byte_s=2 / element_bytes / speeds.flops_per_s,
        ),
    )
