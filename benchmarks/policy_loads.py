"""The workloads of `benchmarks.policies`: what is asked of one GPU, and how much memory it has for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from loraplex.twin.leaping import ANY_TOKEN
from loraplex.workload.build import make_workload
from loraplex.workload.jsonl import WorkloadRequest
from loraplex.workload.popularity import zipf_shares
from loraplex.workload.recipe import ArrivalKind, PopularityKind, Recipe, Source

RANKS: Final = (8, 16, 32, 64, 128)
_MAF: Final = "traces/maf2019_1000fn_1day_sparse.csv.gz"
_DRIFT: Final = 7
"""The number of places that popularity moves at a time; not a multiple of the number of ranks."""
DURATION_S: Final = 60.0
_AZURE: Final = "traces/azure_llm_2023_code.csv.gz"


@dataclass(frozen=True, kw_only=True)
class Requests:
    """`prompts`: the tokens of each request, where contents count; None: nobody looks at them."""

    requests: Sequence[WorkloadRequest]
    prompts: Sequence[list[int]] | None = None


Draw = Callable[[int, float, Path | None], Requests]
"""Return the requests for a seed, at so many times the rate, from the folder of published data."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One workload. `resident`, `staged`: the shares of all adapters' bytes for which the device has memory
    beside `kv_tokens`, and the host. `warm_s`: the beginning, which is not counted. `gb_per_s`: copies to the
    device are no faster. `file`: of the published data, without which it cannot be drawn."""

    name: str
    what: str
    draw: Draw
    num_adapters: int
    kv_tokens: int
    warm_s: float = 15.0
    resident: float = 1 / 3
    staged: float = 1 / 2
    gb_per_s: float | None = None
    file: str | None = None

    def is_here(self, data: Path | None) -> bool:
        return self.file is None or (data is not None and (data / self.file).is_file())


def _zipf(num_adapters: int, rate: float, *, cv: float | None = None, drift_s: float | None = None) -> Draw:
    """`drift_s`: after so long other adapters are the popular ones."""

    def draw(seed: int, times: float, data: Path | None) -> Requests:
        recipe = Recipe(
            seed=seed,
            rate=rate * times,
            duration_s=DURATION_S,
            num_adapters=num_adapters,
            arrivals=None if cv is None else ArrivalKind.GAMMA,
            cv=cv,
            popularity=PopularityKind.ZIPF,
            prompt_tokens=200,
            output_tokens=120,
        )
        requests = list(make_workload(recipe))
        if drift_s is not None:
            requests = [_drifted(each, drift_s, num_adapters) for each in requests]
        return Requests(requests=requests)

    return draw


def _drifted(request: WorkloadRequest, every_s: float, num_adapters: int) -> WorkloadRequest:
    moved = request.adapter + _DRIFT * int(request.arrival_s / every_s)
    return replace(request, adapter=moved % num_adapters)


def _maf(num_adapters: int, rate: float) -> Draw:
    """Another part of the day and other functions for each seed."""

    def draw(seed: int, times: float, data: Path | None) -> Requests:
        assert data is not None
        recipe = Recipe(
            seed=seed,
            source=Source.MAF,
            trace=data / _MAF,
            start_s=3600.0 * ((6 + 4 * seed + seed // 6 / 2) % 24),
            rate=rate * times,
            duration_s=DURATION_S,
            num_adapters=num_adapters,
            prompt_tokens=200,
            output_tokens=120,
        )
        return Requests(requests=list(make_workload(recipe)))

    return draw


def _azure(num_adapters: int, rate: float) -> Draw:
    """Azure's requests for code, whose arrivals come in bursts; another part of the hour for each seed."""

    def draw(seed: int, times: float, data: Path | None) -> Requests:
        assert data is not None
        recipe = Recipe(
            seed=seed,
            source=Source.AZURE,
            trace=data / _AZURE,
            start_s=900.0 * (seed % 4) + 225.0 * (seed // 4 % 4),
            rate=rate * times,
            duration_s=DURATION_S,
            num_adapters=num_adapters,
            popularity=PopularityKind.ZIPF,
            max_prompt_tokens=3000,
            max_output_tokens=500,
        )
        return Requests(requests=list(make_workload(recipe)))

    return draw


_SYSTEM_TOKENS: Final = 192
"""The length of the prompt that all conversations with an adapter begin with."""
_TURNS: Final = 5
"""On the mean."""
_PAUSE_S: Final = 15.0
"""On the mean, from a turn to the next; those are at least 5 s apart."""


def _conversations(num_adapters: int, rate: float) -> Draw:
    """Conversations by turns: each prompt is all that was said before, and a question more. `rate`: of
    turns."""

    def draw(seed: int, times: float, data: Path | None) -> Requests:
        rng = np.random.default_rng(seed)
        shares = zipf_shares(num_adapters, 1.0)
        turns: list[tuple[WorkloadRequest, list[int]]] = []
        now_s, number = -_TURNS * _PAUSE_S, 0
        while (now_s := now_s + rng.exponential(_TURNS / (rate * times))) < DURATION_S:
            number += 1
            adapter = int(rng.choice(num_adapters, p=shares))
            turns += _turns(rng, now_s, adapter, number)
        kept = sorted((each for each in turns if 0 <= each[0].arrival_s < DURATION_S), key=_arrival_s)
        return Requests(requests=[each for each, _ in kept], prompts=[prompt for _, prompt in kept])

    return draw


def _turns(
    rng: np.random.Generator, now_s: float, adapter: int, number: int
) -> list[tuple[WorkloadRequest, list[int]]]:
    """One conversation. Answers are made of the token that the twin samples, so that they are found again."""
    said = [-1 - adapter] * _SYSTEM_TOKENS
    found = []
    for _ in range(int(rng.geometric(1 / _TURNS))):
        num_asked = int(np.clip(rng.lognormal(np.log(80), 0.8), 8, 600))
        num_output = int(np.clip(rng.lognormal(np.log(120), 0.7), 8, 400))
        said = [*said, *[ANY_TOKEN + number] * num_asked]
        if len(said) + num_output > 3500:
            break
        request = WorkloadRequest(
            arrival_s=now_s, prompt_tokens=len(said), output_tokens=num_output, adapter=adapter
        )
        found.append((request, said))
        said = [*said, *[ANY_TOKEN] * num_output]
        now_s += 5.0 + rng.exponential(_PAUSE_S - 5.0)
    return found


def _arrival_s(turn: tuple[WorkloadRequest, list[int]]) -> float:
    return turn[0].arrival_s


LOADS: Final = (
    Load(
        name="zipf-100",
        what="100 adapters, Zipf 1, Poisson arrivals",
        draw=_zipf(100, 21.0),
        num_adapters=100,
        kv_tokens=20_000,
    ),
    Load(
        name="drift-100",
        what="the same; every 10 s other adapters are the popular ones",
        draw=_zipf(100, 21.0, drift_s=10.0),
        num_adapters=100,
        kv_tokens=20_000,
    ),
    Load(
        name="slow-bus-100",
        what="100 adapters, Zipf 1, Poisson arrivals, copies at 6 GB/s, host memory for all adapters",
        draw=_zipf(100, 16.0),
        num_adapters=100,
        kv_tokens=20_000,
        staged=1.0,
        gb_per_s=6.0,
    ),
    Load(
        name="zipf-600",
        what="600 adapters, Zipf 1, Poisson arrivals",
        draw=_zipf(600, 27.0),
        num_adapters=600,
        kv_tokens=20_000,
    ),
    Load(
        name="bursts-600",
        what="600 adapters, Zipf 1, gamma arrivals with a CV of 4",
        draw=_zipf(600, 23.0, cv=4.0),
        num_adapters=600,
        kv_tokens=20_000,
    ),
    Load(
        name="maf-600",
        what="600 functions of the Azure Functions trace, another part of the day for each seed",
        draw=_maf(600, 24.0),
        num_adapters=600,
        kv_tokens=20_000,
        resident=0.1,
        staged=0.15,
        file=_MAF,
    ),
    Load(
        name="azure-code-100",
        what="Azure's requests for code, another part of the hour for each seed, 100 adapters, Zipf 1",
        draw=_azure(100, 8.0),
        num_adapters=100,
        kv_tokens=40_000,
        file=_AZURE,
    ),
    Load(
        name="conversations-100",
        what="conversations of 5 turns, one system prompt for each of 100 adapters, Zipf 1",
        draw=_conversations(100, 19.0),
        num_adapters=100,
        kv_tokens=60_000,
    ),
)
