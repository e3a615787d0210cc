"""Writes adapters with random weights as PEFT saves them, for benchmarks that load from disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.shape import ModelShape

_BLOCK_OF = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}


def save_random_adapters(
    folder: Path, shape: ModelShape, dtype: torch.dtype, *, count: int, rank: int, modules: Sequence[str]
) -> list[AdapterSpec]:
    """Save adapters, each in its own folder and with one weight that differs from all others."""
    tensors = {}
    for layer in range(shape.num_layers):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.{_BLOCK_OF.get(module, 'mlp')}.{module}"
            sizes = {"A": (rank, shape.in_features(module)), "B": (shape.out_features(module), rank)}
            for side, size in sizes.items():
                tensors[f"{name}.lora_{side}.weight"] = torch.randn(size).mul_(0.02).to(dtype)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": list(modules),
    }  # fmt: skip
    specs = []
    for index in range(count):
        path = folder / f"adapter-{index:04d}"
        path.mkdir(parents=True)
        next(iter(tensors.values())).view(-1)[0] = index + 1.0
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
        specs.append(read_adapter(path, shape))
    return specs
