"""Options of `vllm serve` that have another name here, or none, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import typer

_ALWAYS: Final = "leave it out: what it switches on is always on"
_UNNEEDED: Final = "leave it out: there is nothing to choose here"
_INSTEAD: Final = {
    "--enable-lora": _ALWAYS,
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-reasoning": _ALWAYS,
    "--enable-log-requests": _ALWAYS,
    "--lora-modules": "give --adapter NAME=PATH, or --adapters FOLDER for all of its subfolders",
    "--max-loras": "leave it out: adapters take the memory that their own ranks and modules need",
    "--max-lora-rank": "leave it out: every adapter has its own rank",
    "--max-cpu-loras": "give --host-adapter-memory, in bytes, such as 32GiB",
    "--gpu-memory-utilization": "give --memory-fraction",
    "--lora-dtype": _UNNEEDED,
    "--lora-extra-vocab-size": _UNNEEDED,
    "--long-lora-scaling-factors": _UNNEEDED,
    "--fully-sharded-loras": "leave it out: --tensor-parallel shards every adapter fully",
    "--enable-lora-bias": _UNNEEDED,
    "--default-mm-loras": _UNNEEDED,
    "--swap-space": "give --kv-swap-memory, in bytes, such as 16GiB",
    "--kv-cache-memory-bytes": "give --memory-fraction, or --kv-memory on a CPU",
    "--block-size": _UNNEEDED,
    "--enforce-eager": _UNNEEDED,
    "--compilation-config": _UNNEEDED,
    "--guided-decoding-backend": "leave it out: llguidance does it",
    "--structured-outputs-config": "leave it out: llguidance does it",
    "--chat-template": "leave it out, and put the template into the model's folder as chat_template.jinja",
    "--tokenizer": "leave it out: the tokenizer is the model's own",
    "--generation-config": "leave it out: options of requests have OpenAI's defaults",
    "--trust-remote-code": "leave it out: no code of a model's repository is run",
    "--data-parallel-size": "run `loraplex fleet serve --replicas N`",
    "--pipeline-parallel-size": "give --tensor-parallel, or run `loraplex fleet serve --replicas N`",
    "--tensor-parallel-size": "give --tensor-parallel",
    "-tp": "give --tensor-parallel",
    "--max-num-seqs": "leave it out: up to 256 requests run at a time, as memory allows",
    "--max-num-batched-tokens": "leave it out: the engine chooses how much a step computes",
    "--scheduling-policy": "give --batching",
    "--otlp-traces-endpoint": "give --otlp-endpoint, the collector's URL without /v1/traces",
    "--uvicorn-log-level": "give --log-level",
    "--disable-log-requests": "give --log-level warning",
    "--disable-log-stats": _UNNEEDED,
    "--disable-uvicorn-access-log": _UNNEEDED,
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
