"""Which device an engine gets, and what its options have to do with it. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, ModelError
from loraplex.engine import build, cpu_build
from loraplex.engine.build import build_core
from loraplex.engine.cpu_build import plan_adapter_bytes, plan_cpu
from loraplex.engine.cuda.assemble import build_cuda_core
from loraplex.engine.cuda.device_arena import page_bytes
from loraplex.engine.cuda.options import CudaOptions
from loraplex.engine.options import EngineOptions
from loraplex.model.shapes import config_of_shape, random_weights


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'; choose auto, cpu or cuda"),
        ({"device": "cuda"}, "no CUDA device here; start it with --device cpu"),
        ({"device": "cpu", "memory_fraction": 0.5}, "on a CPU, give --kv-memory"),
        ({"tensor_parallel": 0}, "--tensor-parallel must be at least 1"),
        (
            {"device": "cpu", "cold_start": ColdStart.PIPELINED},
            "pipelined needs a GPU; on a CPU, choose overlap",
        ),
        ({"device": "cpu", "cold_start": ColdStart.CPU_ASSIST}, "cpu-assist needs a GPU"),
        ({"device": "cpu", "cpu_workers": 2}, "on a CPU, leave them out"),
    ],
)
def test_what_a_machine_without_a_gpu_cannot_do_is_said_before_anything_is_read(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=message):
        build_core(EngineOptions(model="nowhere", **options))


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory_bytes": 1 << 30}, "share what --memory-fraction gives them; leave out --kv-memory"),
        ({"device": "cuda", "tensor_parallel": 2}, "needs as many CUDA devices; there are 1"),
        (
            {"device": "cuda", "cpu_workers": 2, "cold_start": ColdStart.OVERLAP},
            "--cpu-workers are for --cold-start cpu-assist or auto",
        ),
        (
            {"device": "cuda", "tensor_parallel": 2, "cold_start": ColdStart.CPU_ASSIST},
            "are for one GPU; with --tensor-parallel, leave out --cpu-workers",
        ),
        ({"device": "cuda", "tensor_parallel": 2, "cpu_workers": 2}, "CPU workers are for one GPU"),
    ],
)
def test_options_that_do_not_go_with_a_gpu_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_core(EngineOptions(model="nowhere", **options))


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_without_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install triton"):
        build_core(EngineOptions(model="nowhere", device="cuda"))
    with pytest.raises(ModelError, match="nowhere"):  # auto takes the CPU, and goes on to the model
        build_core(EngineOptions(model=str(Path("/nowhere"))))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_pages": 2}, CapacityError, "raise --memory-fraction, or stop what else runs"),
        ({"num_pages": 5, "max_model_len": 100}, CapacityError, "64 tokens.*fewer than --max-model-len 100"),
        ({"num_pages": 99, "max_model_len": 1000}, ModelError, "beyond the model's own context of 512"),
    ],
)
def test_device_memory_that_does_not_do_is_told_in_tokens(
    options: dict[str, int], error: type[Exception], message: str
) -> None:
    config = config_of_shape("tiny")
    num_pages = options.pop("num_pages")
    cuda_options = CudaOptions(
        dtype=torch.float32, arena_bytes=num_pages * page_bytes(config.shape, 16, torch.float32), **options
    )
    with pytest.raises(error, match=message):
        build_cuda_core(config, random_weights(config, torch.float32, torch.device("cpu")), cuda_options)


def test_sizes_that_are_not_given_are_taken_of_the_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_build, "available_bytes", lambda: 1 << 24)
    config = config_of_shape("tiny")

    def sizes(**options: object) -> tuple[int, int]:
        asked = EngineOptions(model="", **options)  # type: ignore[arg-type]
        return plan_cpu(asked, config, torch.float32).num_blocks, plan_adapter_bytes(asked)

    num_blocks, adapter_bytes = sizes()
    assert sizes(memory_share=0.25) == (num_blocks // 4, adapter_bytes // 4)
    given = {"kv_memory_bytes": 1 << 20, "host_adapter_memory_bytes": 1 << 21}
    assert sizes(memory_share=0.25, **given) == sizes(**given)
