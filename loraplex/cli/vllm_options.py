"""Options of `vllm serve` that have another name here, or none, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import typer

_ALWAYS: Final = "leave it out: what it switches on is always on"
_INSTEAD: Final = {
    "--enable-lora": _ALWAYS,
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--lora-modules": "give --adapter NAME=PATH, or --adapters FOLDER for all of its subfolders",
    "--max-loras": "leave it out: adapters take the memory that their own ranks and modules need",
    "--max-lora-rank": "leave it out: every adapter has its own rank",
    "--max-cpu-loras": "give --host-adapter-memory, in bytes, such as 32GiB",
    "--gpu-memory-utilization": "give --memory-fraction",
    "--swap-space": "give --kv-swap-memory, in bytes, such as 16GiB",
    "--tensor-parallel-size": "give --tensor-parallel",
    "--max-num-seqs": "leave it out: up to 256 requests run at a time, as memory allows",
    "--max-num-batched-tokens": "leave it out: the engine chooses how much a step computes",
    "--uvicorn-log-level": "give --log-level",
}


def refuse_vllm_options(args: Sequence[str], known: Collection[str], context: Any) -> None:
    """Raise a usage error for an option that only vLLM has, with what to give instead. `known`: the options
    of the command being run, `context`: typer's."""
    for arg in args:
        name = arg.partition("=")[0]
        if name in _INSTEAD and name not in known:
            raise typer.BadParameter(
                f"it is an option of vLLM; {_INSTEAD[name]} (docs/operations.md#coming-from-vllm)",
                ctx=context,
                param_hint=name,
            )
