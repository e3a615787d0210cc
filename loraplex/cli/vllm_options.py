"""Options of `vllm serve` that have another name here, or none, and what to use instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import typer

_ALWAYS: Final = "leave it out: what it switches on is always on"
_ALWAYS_OFF: Final = "leave it out: what it switches off is always on here"
_UNNEEDED: Final = "leave it out: there is nothing to choose here"
_LORA: Final = {
    "--enable-lora": _ALWAYS,
    "--lora-modules": "give --adapter NAME=PATH, or --adapters FOLDER for all of its subfolders",
    "--max-loras": "leave it out: adapters take the memory that their own ranks and modules need",
    "--max-lora-rank": "leave it out: every adapter has its own rank",
    "--max-cpu-loras": "give --host-adapter-memory, in bytes, such as 32GiB",
    "--fully-sharded-loras": "leave it out: --tensor-parallel shards every adapter fully",
}
_MODEL: Final = {
    "--quantization": "leave it out, and give a model that is not quantized: there is no quantization here",
    "--tokenizer": "leave it out: the tokenizer is the model's own",
    "--trust-remote-code": "leave it out: no code of a model's repository is run",
    "--revision": "leave it out, and give the folder of that revision as the model",
    "--download-dir": "leave it out, and set HF_HOME in the environment",
    "--hf-token": "leave it out, and set HF_TOKEN in the environment",
    "--load-format": "leave it out: weights are read from safetensors files",
    "--hf-overrides": "leave it out, and change config.json in the model's folder",
    "--generation-config": "leave it out: options of requests have OpenAI's defaults",
    "--chat-template": "leave it out, and put the template into the model's folder as chat_template.jinja",
    "--seed": "leave it out: requests have their own `seed`",
    "--max-logprobs": "leave it out: requests may ask for up to 20",
    "--limit-mm-per-prompt": "leave it out: only text is served",
}
_MEMORY: Final = {
    "--gpu-memory-utilization": "give --memory-fraction",
    "--swap-space": "give --kv-swap-memory, in bytes, such as 16GiB",
    "--kv-cache-memory-bytes": "give --memory-fraction, or --kv-memory on a CPU",
    "--num-gpu-blocks-override": "give --memory-fraction, or --kv-memory on a CPU",
    "--kv-cache-dtype": "leave it out: the KV cache has the type of --dtype",
    "--enable-prefix-caching": _ALWAYS,
    "--cpu-offload-gb": "leave it out: weights stay on the device; --tensor-parallel divides them",
    "--kv-transfer-config": "leave it out: engines do not exchange KV caches",
}
_STEPS: Final = {
    "--enable-chunked-prefill": _ALWAYS,
    "--async-scheduling": _ALWAYS,
    "--max-num-seqs": "leave it out: up to 256 requests run at a time, as memory allows",
    "--max-num-batched-tokens": "leave it out: the engine chooses how much a step computes",
    "--scheduling-policy": "give --batching",
    "--speculative-config": "leave it out: there is no speculative decoding here",
    "--guided-decoding-backend": "leave it out: llguidance does it",
    "--structured-outputs-config": "leave it out: llguidance does it",
    "--logits-processors": "leave it out: requests have `logit_bias`, `bad_words` and structured output",
}
_PARALLEL: Final = {
    "--tensor-parallel-size": "give --tensor-parallel",
    "--data-parallel-size": "run `loraplex fleet serve --replicas N`",
    "--pipeline-parallel-size": "give --tensor-parallel, or run `loraplex fleet serve --replicas N`",
    "--enable-expert-parallel": "leave it out: models with experts are not served",
    "--distributed-executor-backend": "leave it out; `loraplex fleet serve --ray` places replicas by Ray",
}
_FRONT: Final = {
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-reasoning": _ALWAYS,
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-log-requests": _ALWAYS,
    "--disable-log-requests": "give --log-level warning",
    "--tool-parser-plugin": "give --tool-call-parser one of the formats in its help",
    "--return-tokens-as-token-ids": "leave it out: requests ask for `return_token_ids`",
    "--enable-force-include-usage": "leave it out: requests ask for it by `stream_options`",
    "--uvicorn-log-level": "give --log-level",
    "--log-config-file": "give --log-level and --log-format",
    "--otlp-traces-endpoint": "give --otlp-endpoint, the collector's URL without /v1/traces",
    "--collect-detailed-traces": "give --otlp-endpoint: spans show the queue, loads, prompts and answers",
    "--ssl-keyfile": "leave it out, and let a reverse proxy in front do TLS",
    "--ssl-certfile": "leave it out, and let a reverse proxy in front do TLS",
    "--root-path": "leave it out, and let the reverse proxy in front remove the path",
    "--middleware": "leave it out: the server runs no code but its own",
    "--uds": "give --host and --port",
}
_WITHOUT_CHOICE: Final = (
    *("--lora-dtype", "--lora-extra-vocab-size", "--long-lora-scaling-factors", "--enable-lora-bias"),
    *("--default-mm-loras", "--block-size", "--enforce-eager", "--compilation-config", "--attention-backend"),
    *("--cuda-graph-sizes", "--max-seq-len-to-capture", "--disable-custom-all-reduce", "--tokenizer-mode"),
    *("--config-format", "--model-impl", "--task", "--runner", "--preemption-mode", "--num-scheduler-steps"),
    *("--scheduler-delay-factor", "--use-v2-block-manager", "--disable-async-output-proc"),
    *("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
    *("--prefix-caching-hash-algo", "--disable-hybrid-kv-cache-manager", "--disable-sliding-window"),
    *("--chat-template-content-format", "--response-role", "--api-server-count", "--max-log-len"),
    *("--disable-frontend-multiprocessing", "--disable-fastapi-docs", "--disable-log-stats"),
    *("--disable-uvicorn-access-log", "--allow-credentials", "--allowed-methods", "--allowed-headers"),
)
_INSTEAD: Final = {
    **_LORA,
    **_MODEL,
    **_MEMORY,
    **_STEPS,
    **_PARALLEL,
    **_FRONT,
    **dict.fromkeys(_WITHOUT_CHOICE, _UNNEEDED),
}
_SAME: Final = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-O": "--compilation-config",
    "-sc": "--speculative-config",
    "--speculative-model": "--speculative-config",
    "--num-speculative-tokens": "--speculative-config",
    "--override-generation-config": "--generation-config",
    "--tokenizer-revision": "--revision",
    "--rope-scaling": "--hf-overrides",
    "--rope-theta": "--hf-overrides",
}
"""Other names of these options."""
_NAME: Final = re.compile(r"-O(?=\d)|[^=.]+")
"""The name in an argument: vLLM takes `-O3`, and `--compilation-config.mode 3` for a part of an option."""


def refuse_vllm_options(args: Sequence[str], known: Collection[str], context: Any) -> None:
    """Raise a usage error for an option that only vLLM has, with what to give instead. `known`: the options
    of the command being run, `context`: typer's."""
    for arg in args:
        name = found[0] if (found := _NAME.match(arg)) else ""
        if name not in known and (instead := _instead_of(name)) is not None:
            raise typer.BadParameter(
                f"it is an option of vLLM; {instead} (docs/operations.md#coming-from-vllm)",
                ctx=context,
                param_hint=name,
            )


def _instead_of(name: str) -> str | None:
    """Return what to do without this option of vLLM, which takes underscores too, and `--no-` to switch an
    option off."""
    if not name.startswith("-"):
        return None
    dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    positive = dashed.replace("--no-", "--", 1)
    instead = _INSTEAD.get(_SAME.get(positive, positive))
    return _ALWAYS_OFF if instead == _ALWAYS and positive != dashed else instead
