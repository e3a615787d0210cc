"""Section `collective`: an engine whose partial sums go through a process group gives the texts of any other.

One process is all that one GPU can take part with: this shows that NCCL's operations can be captured in the
engine's graphs and replayed, not that several devices agree. Several processes are compared on a CPU, in the
tests.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.correctness.check import Check, Setting, holds
from benchmarks.correctness.driving import answers, greedy_request, random_prompt
from loraplex.engine.cuda.assemble import build_cuda_core
from loraplex.engine.cuda.options import CudaOptions
from loraplex.model.collective import SOLO, Collective, connect
from loraplex.model.shapes import config_of_shape, random_weights
from loraplex.model.sharding import WHOLE

SHAPE = "tiny"


def collective(setting: Setting) -> list[Check]:
    alone = _texts(setting, SOLO)
    device = torch.device("cuda", 0) if setting.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        group = connect(WHOLE, Path(folder) / "rendezvous", device)
        grouped = _texts(setting, group)
        group.close()
    return [
        holds(
            "texts",
            "greedy texts of an engine with a process group of one, and of an engine without",
            alone == grouped,
            texts=len(alone),
            backend="nccl" if setting.device == "cuda" else "gloo",
        )
    ]


def _texts(setting: Setting, collective: Collective) -> dict[str, list[int]]:
    config = config_of_shape(SHAPE)
    dtype = torch.float32
    options = CudaOptions(dtype=dtype, arena_bytes=1 << 22, max_step_tokens=64)
    weights = random_weights(config, dtype, setting.torch_device)
    engine = build_cuda_core(config, weights, options, collective=collective)
    num_requests, num_tokens = (2, 2) if setting.tiny else (16, 32)
    requests = [
        greedy_request(str(index), random_prompt(5 + 7 * index, config.shape.vocab_size, index), num_tokens)
        for index in range(num_requests)
    ]
    found = answers(engine, requests)
    engine.close()
    return {name: answer.token_ids for name, answer in found.items()}
