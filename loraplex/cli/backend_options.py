"""Options about engines that loraplex starts: none of them reaches servers behind `fleet serve --backend`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Final

import typer

_NAMES_IN_VLLM: Final[Mapping[str, str | None]] = {
    "device": None,
    "dtype": "--dtype",
    "kv_memory": None,
    "memory_fraction": "--gpu-memory-utilization",
    "host_adapter_memory": None,
    "kv_swap_memory": None,
    "max_model_len": "--max-model-len",
    "tensor_parallel": "--tensor-parallel-size",
    "cold_start": None,
    "cpu_workers": None,
    "load_popular": None,
    "batching": None,
    "max_delay_by_grouping": None,
    "max_borrowing": None,
    "threads": None,
    "shadow_twin_every": None,
}
"""The options by parameter name, with vLLM's own option for the same where there is one."""


def refuse_engine_options(given: Mapping[str, Any], source: Callable[..., Any]) -> None:
    """Raise a usage error for an option that would have no effect on servers behind `--backend`. `given`: the
    values of all options by parameter name; `source`: the function whose parameters have their defaults."""
    parameters = signature(source).parameters
    for name, in_vllm in _NAMES_IN_VLLM.items():
        if given.get(name, parameters[name].default) != parameters[name].default:
            to_vllm = "" if in_vllm is None else f" (to vLLM as {in_vllm})"
            raise typer.BadParameter(
                "it is about engines that loraplex starts, and servers behind --backend run already; leave "
                f"it out here, and give it to loraplex servers when they are started{to_vllm}",
                param_hint="--" + name.replace("_", "-"),
            )
