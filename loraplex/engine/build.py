"""Builds an engine from options: chooses the device and the dtype."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Final

import torch

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import ModelError
from loraplex.engine.core import Engine
from loraplex.engine.machine import check_threads
from loraplex.engine.options import EngineOptions
from loraplex.engine.parallel.messages import Progress
from loraplex.engine.peers import Peers
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.source import resolve_model

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_core(
    options: EngineOptions, progress: Progress | None = None, peers: Peers | None = None
) -> Engine:
    """Load the model and allocate its memory. `peers`: other replicas that adapters may be copied from.

    Raises ModelError or CapacityError with the fix.
    """
    report = progress or (lambda phase, fraction: None)
    if options.tensor_parallel < 1:
        raise ModelError(f"--tensor-parallel must be at least 1, not {options.tensor_parallel}")
    device = choose_device(options)
    folder = resolve_model(options.model)
    config = load_config(folder)
    options = replace(options, model=str(folder))
    dtype = choose_dtype(options.dtype, device, config)
    # Each device's modules are imported only where it is used: Triton and numba are not installed everywhere.
    if device == "cuda":
        from loraplex.engine.cuda.build import build_cuda_engine

        engine = build_cuda_engine(options, config, dtype, report, peers)
    else:
        from loraplex.engine.cpu_build import build_cpu_engine

        engine = build_cpu_engine(options, config, dtype, report, peers)
    report("registering adapters", 0.0)
    return engine


def choose_device(options: EngineOptions) -> str:
    """Return "cpu" or "cuda". Raise ModelError if other options do not go with it."""
    device = options.device
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"unknown device {device!r}; choose auto, cpu or cuda")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and find_spec("triton") is not None else "cpu"
    if device == "cpu":
        if options.memory_fraction is not None:
            raise ModelError("--memory-fraction is for a GPU; on a CPU, give --kv-memory")
        if options.cold_start in (ColdStart.PIPELINED, ColdStart.CPU_ASSIST):
            raise ModelError(f"--cold-start {options.cold_start} needs a GPU; on a CPU, choose overlap")
        if options.cpu_workers is not None:
            raise ModelError("--cpu-workers compute beside a GPU; on a CPU, leave them out")
        if options.kv_swap_memory_bytes is not None:
            raise ModelError(
                "--kv-swap-memory is for a GPU; on a CPU, the KV cache is in host memory already: give it "
                "more by --kv-memory"
            )
        if options.num_threads is not None:
            check_threads(options.num_threads)
        return device
    if options.num_threads is not None:
        raise ModelError("--threads is for an engine on a CPU; leave it out, or start it with --device cpu")
    if not torch.cuda.is_available():
        raise ModelError("there is no CUDA device here; start it with --device cpu")
    if find_spec("triton") is None:
        raise ModelError("--device cuda needs Triton: pip install triton; or start it with --device cpu")
    if options.kv_memory_bytes is not None:
        raise ModelError(
            "on a GPU, KV cache and adapters share what --memory-fraction gives them; leave out --kv-memory"
        )
    if options.cpu_workers is not None and options.cold_start not in (ColdStart.CPU_ASSIST, ColdStart.AUTO):
        raise ModelError(
            "--cpu-workers are for --cold-start cpu-assist or auto; choose one of these, or leave them out"
        )
    if options.tensor_parallel > 1 and (options.cold_start is ColdStart.CPU_ASSIST or options.cpu_workers):
        raise ModelError(
            "CPU workers are for one GPU; with --tensor-parallel, leave out --cpu-workers and choose "
            "--cold-start auto or pipelined"
        )
    if options.tensor_parallel > 1 and options.kv_swap_memory_bytes is not None:
        raise ModelError("--kv-swap-memory is for one GPU; leave it out with --tensor-parallel")
    if options.tensor_parallel > torch.cuda.device_count():
        raise ModelError(
            f"--tensor-parallel {options.tensor_parallel} needs as many CUDA devices; "
            f"there are {torch.cuda.device_count()}"
        )
    return device


def choose_dtype(name: str, device: str, config: ModelConfig) -> torch.dtype:
    """Return the dtype. The default is float32 on a CPU, which has compiled kernels and is exact; on a GPU,
    float16 if the checkpoint has it, otherwise bfloat16."""
    if name == "auto" and device == "cpu":
        return torch.float32
    if name == "auto":
        return torch.float16 if config.checkpoint_dtype == "float16" else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]
