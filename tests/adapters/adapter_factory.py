"""Makes small adapter folders, sound ones and broken ones, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.modules import module_path
from loraplex.core.shape import ModelShape

SHAPE = ModelShape(
    family="llama",
    num_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    max_position=128,
)

TARGETS = ("q_proj", "v_proj")

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Tensor name -> (safetensors dtype, shape, data)."""


def lora_name(layer: int, module: str, side: str) -> str:
    return f"base_model.model.{module_path(layer, module)}.lora_{side}.weight"


def make_config(**overrides: Any) -> dict[str, Any]:
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(TARGETS),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    return config | overrides


def encode(values: np.ndarray, dtype: str) -> tuple[str, list[int], bytes]:
    """An array of float32 as a tensor of the file; bfloat16 by dropping the lower half of the bits."""
    values = values.astype(np.float32)
    if dtype == "BF16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        data = values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8", "I32": "<i4"}[dtype]).tobytes()
    return dtype, list(values.shape), data


def make_tensors(
    *,
    shape: ModelShape = SHAPE,
    targets: tuple[str, ...] = TARGETS,
    rank: int = 4,
    dtype: str = "F32",
    seed: int = 0,
) -> Tensors:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(shape.num_layers):
        for module in targets:
            a_size, b_size = (rank, shape.in_features(module)), (shape.out_features(module), rank)
            tensors[lora_name(layer, module, "A")] = encode(rng.standard_normal(a_size), dtype)
            tensors[lora_name(layer, module, "B")] = encode(rng.standard_normal(b_size), dtype)
    return tensors


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_adapter(folder: Path, config: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(make_config() if config is None else config))
    write_safetensors(folder / WEIGHTS_FILE, make_tensors() if tensors is None else tensors)
    return folder
