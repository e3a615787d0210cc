"""The GPU's engine over the tiny shape on a CPU, its kernels interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_model

from loraplex.adapters.slab import SlabLayout
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.adapter_reads import ReadSlab
from loraplex.engine.core import Engine
from loraplex.engine.cuda.assemble import build_cuda_core
from loraplex.engine.cuda.device_arena import page_bytes
from loraplex.engine.cuda.graphs import Recorder, Run
from loraplex.engine.cuda.options import CudaOptions
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.grammars import Grammars
from loraplex.engine.peers import Peers
from loraplex.model.shapes import config_of_shape, random_weights
from loraplex.model.weights import ModelWeights

CONFIG = config_of_shape("tiny")
SHAPE = CONFIG.shape
BLOCK_SIZE = 16


def weights() -> ModelWeights:
    """Larger than those of benchmarks, so that the likeliest token is clear."""
    made = random_weights(CONFIG, torch.float32, torch.device("cpu"))
    for layer in made.layers:
        for linear in layer.linears.values():
            linear.mul_(8)
    return made


def fill_slab(spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(sum(map(ord, spec.version)))
    slab.copy_(torch.randn(slab.shape, generator=generator) * 0.3)


def interpreted(
    num_pages: int = 1000,
    padded_to: int | None = None,
    cold_start: ColdStart = ColdStart.OVERLAP,
    host_bytes: int = 1 << 18,
    read: ReadSlab | None = fill_slab,
    cpu_workers: int | None = None,
    peers: Peers | None = None,
    batching: Batching = Batching.FCFS,
    kv_swap_bytes: int = 0,
    grammars: Grammars | None = None,
) -> Engine:
    options = CudaOptions(
        cold_start=cold_start,
        host_bytes=host_bytes,
        cpu_workers=cpu_workers,
        padded_to=padded_to,
        dtype=torch.float32,
        arena_bytes=num_pages * page_bytes(SHAPE, BLOCK_SIZE, torch.float32),
        max_step_tokens=24,
        max_running=6,
        max_model_len=48,
        batching=batching,
        kv_swap_bytes=kv_swap_bytes,
    )
    return build_cuda_core(CONFIG, weights(), options, read=read, peers=peers, grammars=grammars)


def greedy(request_id: str, adapter: str | None = None, *, prompt: int = 6, tokens: int = 2) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[(7 * index + len(request_id)) % 256 for index in range(prompt)],
        params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )


def save_base(folder: Path) -> Path:
    """Write a checkpoint of the engines' shape, for adapters to be made for."""
    return save_model(
        folder,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        vocab_size=SHAPE.vocab_size,
    )


class RunAgain:
    """In place of graphs: what was recorded is run again, on the memory it was recorded with."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, run: Run, *, warm: bool) -> Run:
        self.num_recorded += 1
        if self.num_recorded == 1:
            assert not warm, "nothing was launched before"

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


def record_with(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    initialise = StepRunner.__init__
    monkeypatch.setattr(
        StepRunner, "__init__", lambda self, **options: initialise(self, **{**options, "recorder": recorder})
    )
