"""Which engine a cost model is about: measured on one machine, it says nothing of another."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loraplex.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """`machine`: processors and how many cores of them. `model`: of which shape (`shape_key`); what an engine
    costs depends on shapes, not on weights, so fine-tunes of one base share a profile."""

    machine: str
    device: str
    model: str
    dtype: str
    num_layers: int

    @property
    def file_name(self) -> str:
        """The same for the same subject, and readable."""
        parts = (self.machine, self.device, self.model, self.dtype)
        return "--".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".json"

    def differences(self, other: Subject) -> list[str]:
        """Fields that are not the same, in words."""
        return [
            f"{name} {getattr(self, name)!r} instead of {getattr(other, name)!r}"
            for name in ("machine", "device", "model", "dtype", "num_layers")
            if getattr(self, name) != getattr(other, name)
        ]


def shape_key(shape: ModelShape) -> str:
    """All that decides what a model costs, but for the length of its context."""
    return (
        f"{shape.family}-{shape.num_layers}x{shape.hidden_size}-mlp{shape.intermediate_size}"
        f"-heads{shape.num_heads}.{shape.num_kv_heads}x{shape.head_dim}-vocab{shape.vocab_size}"
    )
