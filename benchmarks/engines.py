"""The engines under comparison and how each is started.

A peer is named `engine` or `engine:setup`; the set-ups, and the best of them, are in peer_setups.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.make_checkpoint import MAX_POSITIONS, Checkpoint
from benchmarks.peer_setups import LLAMA_SETUPS, VLLM_SETUPS
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


def loraplex(
    checkpoint: Checkpoint,
    *,
    state_dir: Path,
    command: tuple[str, ...] = ("serve",),
    extra: tuple[str, ...] = (),
    program: str | None = None,
) -> Engine:
    args = (
        program or str(Path(sys.executable).with_name("loraplex")),
        *(*command, "--model", str(checkpoint.base)),
        *("--adapters", str(checkpoint.adapters)),
        *("--dtype", "float32", "--port", "{port}", "--state-dir", str(state_dir)),
        *extra,
    )
    return Engine(name="loraplex", label="loraplex", version=__version__, command=ServerCommand(args=args))


_TCMALLOC: Final = "libtcmalloc_minimal.so.4"
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


def vllm(checkpoint: Checkpoint, *, venv: Path, lora: bool, setup: str, named: bool = False) -> Engine:
    """Return a vLLM-cpu in this set-up. `named`: the engine's name and label show the set-up."""
    chosen = VLLM_SETUPS[setup]
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
    preloaded = [
        *([_TCMALLOC] if chosen.preload_tcmalloc else []),
        *([str(venv.resolve() / "lib" / "libiomp5.so")] if chosen.preload_openmp else []),
    ]
    if preloaded:
        env["LD_PRELOAD"] = ":".join(preloaded)
    name = "vllm-lora" if lora else "vllm"
    return Engine(
        name=f"{name}:{setup}" if named else name,
        label=f"vLLM-cpu, LoRA {'on' if lora else 'off'}" + (f", {setup}" if named else ""),
        version=_version_in(venv, "vllm-cpu"),
        command=ServerCommand(args=tuple(args), env=env),
        traffic=(BASE, ADAPTERS) if lora else (BASE,),
    )


def llama_cpp(
    checkpoint: Checkpoint, *, program: Path, gguf_dir: Path, num_slots: int, setup: str, named: bool = False
) -> Engine:
    """Return a llama-server, whose requests name their adapter by index in a separate field, `lora`.

    `named`: the engine's name and label show the set-up.
    """
    chosen = LLAMA_SETUPS[setup]
    program = program.with_name(program.name + chosen.build).resolve()
    num_slots = chosen.num_slots or num_slots
    adapters = [str(gguf_dir / f"{name}.gguf") for name in checkpoint.adapter_names]
    args = (
        *(str(program), "--model", str(gguf_dir / "base.gguf"), "--port", "{port}"),
        *("--parallel", str(num_slots), "--ctx-size", str(num_slots * 256)),
        *("--threads", str(chosen.num_threads), "--no-webui", *chosen.args),
        *("--lora-init-without-apply", "--lora", ",".join(adapters)),
    )
    shown = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return Engine(
        name=f"llama.cpp:{setup}" if named else "llama.cpp",
        label="llama.cpp" + (f", {setup}" if named else ""),
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
