"""One comparison and its verdict, and where the comparisons are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """device: cuda, or cpu, where kernels are interpreted and engines are the CPU's. tiny: sizes at which
    that is quick; they test the checks, not the engine."""

    device: str
    tiny: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def kernel_dtype(self) -> torch.dtype:
        """The interpreter's arithmetic knows no bfloat16."""
        return torch.bfloat16 if self.device == "cuda" else torch.float16

    @property
    def engine_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def large_shape(self) -> str:
        return "tiny" if self.tiny else "llama-2-7b"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """`compared`: what with what, in words. `worst_error` is in the units of `tolerance`."""

    name: str
    compared: str
    passed: bool
    worst_error: float | None = None
    tolerance: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON knows no NaN: an error that is none is told in words."""
        error: float | str | None = self.worst_error
        if self.worst_error is not None:
            error = float(f"{self.worst_error:.4g}") if math.isfinite(self.worst_error) else "not finite"
        found = {
            "name": self.name,
            "compared": self.compared,
            "worst_error": error,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }
        return {key: value for key, value in (found | self.details).items() if value is not None}


def within(name: str, compared: str, error: float, tolerance: float, **details: Any) -> Check:
    assert math.isfinite(tolerance), "a check that cannot fail"
    return Check(
        name=name,
        compared=compared,
        # Not `error > tolerance`: NaN must fail.
        passed=error <= tolerance,
        worst_error=error,
        tolerance=tolerance,
        details=details,
    )


def holds(name: str, compared: str, passed: bool, **details: Any) -> Check:
    """A check that has no number."""
    return Check(name=name, compared=compared, passed=passed, details=details)


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's distance from what was expected, in units of that row's own length."""
    expected = expected.double().flatten(0, -2)
    distance = (found.double().flatten(0, -2) - expected).norm(dim=-1)
    return float((distance / expected.norm(dim=-1).clamp_min(1e-30)).nan_to_num(nan=math.inf).max())
