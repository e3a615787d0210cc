"""A base model and a handful of adapters to try loraplex with: `loraplex demo` needs nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DEMO_ADAPTERS_DIR = Path(__file__).resolve().parent / "adapters"


@dataclass(frozen=True, kw_only=True)
class DemoAdapter:
    """An adapter that ships with loraplex; its PEFT checkpoint is `DEMO_ADAPTERS_DIR / name`."""

    name: str
    description: str
    example_prompt: str


def demo_adapters() -> list[DemoAdapter]:
    """Return the adapters that ship with loraplex, in the order in which to show them."""
    manifest = json.loads((DEMO_ADAPTERS_DIR / "manifest.json").read_text(encoding="utf-8"))
    return [
        DemoAdapter(
            name=entry["name"], description=entry["description"], example_prompt=entry["example_prompt"]
        )
        for entry in manifest["adapters"]
    ]


__all__ = ["DEMO_ADAPTERS_DIR", "DemoAdapter", "demo_adapters"]
