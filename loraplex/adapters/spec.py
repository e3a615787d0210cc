"""A validated adapter: the modules it changes, with rank and scale, and the folder of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraModule:
    """One targeted linear: delta(x) = scale * B (A x), A of (rank, in), B of (out, rank)."""

    layer: int
    module: str
    rank: int
    scale: float
    a_name: str
    b_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """An immutable adapter version. Made only by `adapters.peft_reader.read_adapter`.

    `version` is the content hash of config and weights. `modules` is sorted by (layer, module index).
    `num_params` counts the LoRA parameters that will be resident (A and B of every module).
    `fingerprint` is a cheap check that the files are still those that were hashed (adapters.fingerprint).
    """

    version: str
    path: Path
    modules: tuple[LoraModule, ...]
    num_params: int
    fingerprint: str = ""

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def weights_path(self) -> Path:
        return self.path / WEIGHTS_FILE
