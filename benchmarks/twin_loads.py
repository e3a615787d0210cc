"""The engines and workloads on which the twin is compared with our own engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.engine_scenarios import new_request, run_dry
from loraplex.bench.random_engine import random_specs
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape
from loraplex.workload.jsonl import WorkloadRequest

RANKS: Final = (8, 16, 32, 64)
_LARGEST_SIZE: Final = 500


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine and its workload. `median_tokens`: of prompts and of outputs, which are spread log-normally.
    `duration_s`: of the arrivals."""

    device: str
    shape: str
    dtype: torch.dtype
    num_adapters: int
    median_tokens: int
    max_tokens: int
    duration_s: float


SETTINGS: Final = {
    "cuda": Setting(
        device="cuda",
        shape="llama-2-7b",
        dtype=torch.bfloat16,
        num_adapters=64,
        median_tokens=120,
        max_tokens=1000,
        duration_s=25.0,
    ),
    "cpu": Setting(
        device="cpu",
        shape="tiny",
        dtype=torch.float32,
        num_adapters=16,
        median_tokens=30,
        max_tokens=120,
        duration_s=20.0,
    ),
}


def specs_of(name: str, setting: Setting) -> list[AdapterSpec]:
    return random_specs(name, setting.shape, num_adapters=setting.num_adapters, ranks=RANKS, modules="q,k,v")


def vocab_size_of(setting: Setting) -> int:
    return config_of_shape(setting.shape).shape.vocab_size


def requests(setting: Setting, per_s: float, seed: int) -> Iterator[WorkloadRequest]:
    """Yield Poisson arrivals, with all adapters equally likely."""
    rng, now_s = random.Random(seed), 0.0

    def length() -> int:
        drawn = setting.median_tokens * rng.lognormvariate(0.0, 0.7)
        return min(max(round(drawn), 2), setting.max_tokens)

    while (now_s := now_s + rng.expovariate(per_s)) < setting.duration_s:
        yield WorkloadRequest(
            arrival_s=now_s,
            prompt_tokens=length(),
            output_tokens=length(),
            adapter=rng.randrange(setting.num_adapters),
        )


def see_sizes(engine: Engine, versions: Sequence[str], vocab_size: int) -> None:
    """Run every number of rows once, as a CPU's products are compiled when a number first occurs."""
    for num_rows in range(2, _LARGEST_SIZE):
        version = versions[num_rows % len(versions)]
        engine.add_request(
            new_request(f"size-{num_rows}", num_rows, 1, version, vocab_size=vocab_size, seed=num_rows)
        )
        run_dry(engine)
