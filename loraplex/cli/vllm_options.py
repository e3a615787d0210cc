"""Options of `vllm serve` that have another name here, or none, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import typer

_ALWAYS: Final = "leave it out: what it switches on is always on"
_ALWAYS_ON: Final = "leave it out: what it switches off is always on"
_UNNEEDED: Final = "leave it out: there is nothing to choose here"
_NO_QUANTIZATION: Final = (
    "leave it out, and give a model that is not quantized: weights are as --dtype has them"
)
_NO_SPECULATION: Final = "leave it out: there is no speculative decoding"
_ONE_TEXT_MODEL: Final = "leave it out: models read text and generate text"
_MODEL_FOLDER: Final = "leave it out, and give a folder as the model: its files are used as they are"
_LLGUIDANCE: Final = "leave it out: llguidance does it"
_PROXY: Final = "leave it out, and put a proxy in front that does it"
_OF_REQUESTS: Final = "leave it out: requests may set what they need, and have OpenAI's defaults"
_REPLICAS: Final = "run `loraplex fleet serve --replicas N`"
_LESS_LOG: Final = "give --log-level warning"

_INSTEAD: Final = {
    # LoRA
    "--enable-lora": _ALWAYS,
    "--lora-modules": "give --adapter NAME=PATH, or --adapters FOLDER for all of its subfolders",
    "--max-loras": "leave it out: adapters take the memory that their own ranks and modules need",
    "--max-lora-rank": "leave it out: every adapter has its own rank",
    "--max-cpu-loras": "give --host-adapter-memory, in bytes, such as 32GiB",
    "--lora-dtype": _UNNEEDED,
    "--lora-extra-vocab-size": _UNNEEDED,
    "--lora-target-modules": "leave it out: every adapter has its own modules",
    "--long-lora-scaling-factors": _UNNEEDED,
    "--fully-sharded-loras": "leave it out: --tensor-parallel shards every adapter fully",
    "--enable-lora-bias": _UNNEEDED,
    "--default-mm-loras": _ONE_TEXT_MODEL,
    # the model
    "--tokenizer": "leave it out: the tokenizer is the model's own",
    "--tokenizer-mode": _UNNEEDED,
    "--tokenizer-revision": _MODEL_FOLDER,
    "--revision": _MODEL_FOLDER,
    "--code-revision": _MODEL_FOLDER,
    "--hf-config-path": _MODEL_FOLDER,
    "--hf-overrides": _MODEL_FOLDER,
    "--hf-token": "leave it out, and set HF_TOKEN",
    "--download-dir": "leave it out, and set HF_HOME",
    "--config-format": _UNNEEDED,
    "--load-format": "leave it out: weights are read from safetensors",
    "--model-impl": _UNNEEDED,
    "--model-loader-extra-config": _UNNEEDED,
    "--rope-scaling": _MODEL_FOLDER,
    "--rope-theta": _MODEL_FOLDER,
    "--trust-remote-code": "leave it out: no code of a model's repository is run",
    "--quantization": _NO_QUANTIZATION,
    "-q": _NO_QUANTIZATION,
    "--kv-cache-dtype": "leave it out: keys and values are as --dtype has them",
    "--calculate-kv-scales": "leave it out: keys and values are as --dtype has them",
    "--task": _ONE_TEXT_MODEL,
    "--runner": _ONE_TEXT_MODEL,
    "--convert": _ONE_TEXT_MODEL,
    "--limit-mm-per-prompt": _ONE_TEXT_MODEL,
    "--mm-processor-kwargs": _ONE_TEXT_MODEL,
    "--speculative-config": _NO_SPECULATION,
    "--speculative-model": _NO_SPECULATION,
    "--num-speculative-tokens": _NO_SPECULATION,
    # memory and parallelism
    "--gpu-memory-utilization": "give --memory-fraction",
    "--swap-space": "give --kv-swap-memory, in bytes, such as 16GiB",
    "--cpu-offload-gb": "leave it out: the model's weights are on the device",
    "--kv-cache-memory-bytes": "give --memory-fraction, or --kv-memory on a CPU",
    "--kv-transfer-config": "leave it out: replicas of a fleet share no keys and values",
    "--num-gpu-blocks-override": "give --memory-fraction, or --kv-memory on a CPU",
    "--block-size": _UNNEEDED,
    "--data-parallel-size": _REPLICAS,
    "-dp": _REPLICAS,
    "--pipeline-parallel-size": f"give --tensor-parallel, or {_REPLICAS}",
    "-pp": f"give --tensor-parallel, or {_REPLICAS}",
    "--tensor-parallel-size": "give --tensor-parallel",
    "-tp": "give --tensor-parallel",
    "--distributed-executor-backend": "leave it out; `loraplex fleet serve --ray` runs replicas on Ray",
    "--enable-expert-parallel": "leave it out: models have no experts",
    "--disable-custom-all-reduce": _UNNEEDED,
    # steps
    "--enable-prefix-caching": _ALWAYS,
    "--prefix-caching-hash-algo": "leave it out: the prefix cache compares tokens, not hashes",
    "--enable-chunked-prefill": _ALWAYS,
    "--max-num-seqs": "leave it out: up to 256 requests run at a time, as memory allows",
    "--max-num-batched-tokens": "leave it out: the engine chooses how much a step computes",
    "--max-num-partial-prefills": "leave it out: the engine chooses how much a step computes",
    "--long-prefill-token-threshold": "leave it out: the engine chooses how much a step computes",
    "--num-scheduler-steps": _UNNEEDED,
    "--async-scheduling": _UNNEEDED,
    "--preemption-mode": "leave it out; --kv-swap-memory keeps what is preempted on the host",
    "--scheduling-policy": "give --batching",
    "--enforce-eager": _UNNEEDED,
    "--compilation-config": _UNNEEDED,
    "--cuda-graph-sizes": _UNNEEDED,
    "--max-seq-len-to-capture": _UNNEEDED,
    "--attention-backend": _UNNEEDED,
    "--disable-sliding-window": _UNNEEDED,
    # requests
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-reasoning": _ALWAYS,
    "--tool-parser-plugin": "leave it out: --tool-call-parser has the formats that are known",
    "--exclude-tools-when-tool-choice-none": _ALWAYS,
    "--guided-decoding-backend": _LLGUIDANCE,
    "--structured-outputs-config": _LLGUIDANCE,
    "--chat-template": "leave it out, and put the template into the model's folder as chat_template.jinja",
    "--chat-template-content-format": "leave it out: the parts of a message are joined",
    "--response-role": _UNNEEDED,
    "--generation-config": _OF_REQUESTS,
    "--override-generation-config": _OF_REQUESTS,
    "--logits-processors": "leave it out: requests have logit_bias, bad_words and structured output",
    "--max-logprobs": "leave it out: requests may have 20",
    "--seed": "leave it out: requests have a seed of their own",
    "--return-tokens-as-token-ids": "leave it out: requests have return_token_ids",
    "--enable-prompt-tokens-details": _ALWAYS,
    # the server
    "--api-server-count": _UNNEEDED,
    "--disable-frontend-multiprocessing": _UNNEEDED,
    "--root-path": _PROXY,
    "--uds": _PROXY,
    "--ssl-keyfile": _PROXY,
    "--ssl-certfile": _PROXY,
    "--ssl-ca-certs": _PROXY,
    "--middleware": _PROXY,
    "--allowed-methods": _UNNEEDED,
    "--allowed-headers": _UNNEEDED,
    "--allow-credentials": _UNNEEDED,
    "--enable-request-id-headers": _ALWAYS,
    "--disable-fastapi-docs": "leave it out: there is no page at /docs",
    "--otlp-traces-endpoint": "give --otlp-endpoint, the collector's URL without /v1/traces",
    "--collect-detailed-traces": "leave it out: traces always have their phases",
    "--uvicorn-log-level": "give --log-level",
    "--enable-log-requests": _ALWAYS,
    "--disable-log-requests": _LESS_LOG,
    "--no-enable-log-requests": _LESS_LOG,
    "--max-log-len": "leave it out: prompts are not logged",
    "--disable-log-stats": _UNNEEDED,
    "--disable-uvicorn-access-log": _UNNEEDED,
}


def refuse_vllm_options(args: Sequence[str], known: Collection[str], context: Any) -> None:
    """Raise a usage error for an option that only vLLM has, with what to give instead. `known`: the options
    of the command being run, `context`: typer's."""
    for arg in args:
        name = arg.partition("=")[0]
        instead = None if name in known else _instead(name)
        if instead is not None:
            raise typer.BadParameter(
                f"it is an option of vLLM; {instead} (docs/operations.md#coming-from-vllm)",
                ctx=context,
                param_hint=name,
            )


def _instead(name: str) -> str | None:
    """Return what to use instead of an option of vLLM; None for other options. vLLM takes names with
    underscores, too, and keys of its JSON values behind a dot."""
    if not name.startswith("-"):
        return None
    name = name.replace("_", "-").partition(".")[0]
    if name in _INSTEAD or not name.startswith("--no-"):
        return _INSTEAD.get(name)
    match _INSTEAD.get(name.replace("--no-", "--", 1)):
        case None:
            return None
        case switched_on if switched_on == _ALWAYS:
            return _ALWAYS_ON
        case _:
            return _UNNEEDED
