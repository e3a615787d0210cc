"""One measurement of a running server under the benchmark's fixed traffic, and the median of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loraplex.bench.client import BenchRequest, CompletionClient
from loraplex.bench.load import closed_loop
from loraplex.bench.prompts import PromptSource, uniform_requests
from loraplex.bench.report import Report, summarize

# Figures to take medians of; every run's full report is kept beside them.
MEDIAN_OF = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "ttft_ms.mean",
    "ttft_ms.p99",
    "tpot_ms.mean",
    "tpot_ms.p99",
    "itl_ms.p99",
    "e2e_ms.mean",
)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The closed loop of a published table. Requests of the warm-up may have shorter answers."""

    num_requests: int = 48
    concurrency: int = 16
    prompt_tokens: int = 64
    output_tokens: int = 32
    warmup_requests: int = 32
    warmup_output_tokens: int = 32

    def warmup(self, models: Sequence[str], *, seed: int) -> list[BenchRequest]:
        shorter = replace(self, output_tokens=self.warmup_output_tokens)
        return shorter.requests(models, seed=seed, num_requests=self.warmup_requests)

    def requests(
        self, models: Sequence[str], *, seed: int, num_requests: int | None = None
    ) -> list[BenchRequest]:
        return uniform_requests(
            PromptSource(seed=seed),
            num_requests=self.num_requests if num_requests is None else num_requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            models=models,
        )


async def measure(
    base_url: str, requests: Sequence[BenchRequest], *, concurrency: int, keep_alive: bool = True
) -> Report:
    async with CompletionClient(base_url, keep_alive=keep_alive) as client:
        return summarize(await closed_loop(client, requests, concurrency=concurrency))


async def base_model(base_url: str) -> str:
    async with CompletionClient(base_url) as client:
        return await client.base_model()


def with_median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all runs, and medians over them of the figures worth quoting (failures are summed)."""
    return {
        "num_failed": sum(run["num_failed"] for run in runs),
        "median": {name: round(statistics.median(_pick(run, name) for run in runs), 3) for name in MEDIAN_OF},
        "runs": list(runs),
    }


def _pick(run: dict[str, Any], dotted: str) -> float:
    value: Any = run
    for key in dotted.split("."):
        value = None if value is None else value[key]
    # A run in which everything failed has no latencies, but must count in the median.
    return float("inf") if value is None else float(value)
