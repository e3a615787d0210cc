"""The table of where a step's time goes, from step_profile.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.markdown import table

_COLUMNS: Final = {
    "matrix products": ("matrix products",),
    "attention": ("attention, decode", "attention, prompts"),
    "LoRA shrink": ("LoRA shrink",),
    "LoRA expand": ("LoRA expand",),
}
"""Heading -> the kinds of kernels that it adds up."""


def profile_table(result: Mapping[str, Any]) -> str:
    headings = ("shape", "step", "ms", *_COLUMNS, "other kernels", "nothing runs")
    return table(headings, [_line(row) for row in result["results"]])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    by_kind: Mapping[str, float] = row["by_kind_ms"]
    shown = [sum(by_kind.get(kind, 0.0) for kind in kinds) for kinds in _COLUMNS.values()]
    is_prompt = row["name"].startswith("prompt")
    size = f"{row['tokens']:,} tokens" if is_prompt else f"batch {row['batch']}"
    return (
        row["shape"],
        f"{row['name']}, {size}",
        f"{row['step_ms']:.2f}",
        *(f"{ms:.2f}" if ms else "-" for ms in shown),
        f"{sum(by_kind.values()) - sum(shown):.2f}",
        f"{row['idle_ms']:.2f}",
    )


def profile_note(result: Mapping[str, Any]) -> str:
    packages = result["packages"]
    return (
        f"Measured {result['date'][:10]} on one {result['machine']['gpu']}, torch {packages['torch']}, "
        f"triton {packages['triton']}, commit {result['git_commit']}. Contexts grow from the prompt's "
        "length; adapters are on q, k and v unless said.\n"
    )
