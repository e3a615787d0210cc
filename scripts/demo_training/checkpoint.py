"""A trained adapter as the PEFT checkpoint that ships: float16, no traces of where it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from demo_training.recipes import Recipe
from demo_training.training import BASE_MODEL_NAME

MANIFEST_NAME = "manifest.json"


def write_adapter(peft_model: Any, recipe: Recipe, folder: Path) -> int:
    """Write adapter_config.json and adapter_model.safetensors; return their size in bytes."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in get_peft_model_state_dict(peft_model).items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": BASE_MODEL_NAME,
        "inference_mode": True,
        "target_modules": list(recipe.target_modules),
        "auto_mapping": None,
        "revision": None,
    }
    _write_json(folder / "adapter_config.json", dict(sorted(config.items())))
    for path in folder.iterdir():
        path.chmod(0o644)
    return sum(path.stat().st_size for path in folder.iterdir())


def write_manifest(recipes: Sequence[Recipe], folder: Path) -> None:
    """Describe the adapters of `folder`, in the order of the recipes."""
    adapters = [
        {
            "name": recipe.name,
            "description": recipe.description,
            "example_prompt": recipe.example_prompt,
            "rank": recipe.rank,
            "target_modules": list(recipe.target_modules),
        }
        for recipe in recipes
        if (folder / recipe.name / "adapter_config.json").exists()
    ]
    _write_json(folder / MANIFEST_NAME, {"base_model": BASE_MODEL_NAME, "adapters": adapters})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    def plain(item: Any) -> Any:
        if isinstance(item, Enum):
            return item.value
        if isinstance(item, set):
            return sorted(item)
        raise TypeError(f"{type(item).__name__} has no place in {path.name}")

    text = json.dumps(value, indent=2, default=plain, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
