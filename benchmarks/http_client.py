"""The load of the HTTP comparison: one run of `vllm bench serve` against a server, and its figures.

The client is vLLM's own, for every server: nobody measures themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_KEPT: Final = {
    "completed": "completed",
    "failed": "failed",
    "duration": "duration_s",
    "output_throughput": "output_tokens_per_s",
    "mean_ttft_ms": "ttft_ms_mean",
    "median_ttft_ms": "ttft_ms_p50",
    "p95_ttft_ms": "ttft_ms_p95",
    "p99_ttft_ms": "ttft_ms_p99",
    "mean_tpot_ms": "tpot_ms_mean",
    "p99_itl_ms": "itl_ms_p99",
    "mean_e2el_ms": "e2e_ms_mean",
    "p95_e2el_ms": "e2e_ms_p95",
}
"""Figures of the client's result file -> what they are called in ours."""


class ClientFailedError(Exception):
    """The client ended without a result; the message holds the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One kind of load: either `requests_per_s` (open loop) or `concurrency` (closed loop) is set."""

    name: str
    num_requests: int
    requests_per_s: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        assert (self.requests_per_s is None) != (self.concurrency is None)

    @property
    def args(self) -> tuple[str, ...]:
        rate = "inf" if self.requests_per_s is None else f"{self.requests_per_s:g}"
        limit = () if self.concurrency is None else ("--max-concurrency", str(self.concurrency))
        return ("--request-rate", rate, "--num-prompts", str(self.num_requests), *limit)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompts and answers of random length, uniform within `spread` of these means."""

    prompt_tokens: int = 128
    output_tokens: int = 160
    spread: float = 0.6

    @property
    def args(self) -> tuple[str, ...]:
        return (
            *("--random-input-len", str(self.prompt_tokens)),
            *("--random-output-len", str(self.output_tokens)),
            *("--random-range-ratio", str(self.spread)),
        )


@dataclass(frozen=True, kw_only=True)
class BenchClient:
    """`program`: what starts vLLM's command line. `env`: what is set for it beside this process's own."""

    program: tuple[str, ...]
    tokenizer: Path
    lengths: Lengths
    scratch: Path
    env: Mapping[str, str]
    timeout_s: float = 150.0

    def args(
        self, base_url: str, load: Load, adapters: Sequence[str], *, seed: int, result: Path
    ) -> list[str]:
        """Return the command of one run; it writes `result`."""
        return [
            *(*self.program, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
            *("--base-url", base_url, "--model", str(self.tokenizer), "--served-model-name", "base"),
            *("--tokenizer", str(self.tokenizer), "--dataset-name", "random", "--ignore-eos"),
            *("--seed", str(seed), "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
            *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
            *self.lengths.args,
            *load.args,
            *(("--lora-modules", *adapters) if adapters else ()),
        ]

    def run(self, base_url: str, load: Load, adapters: Sequence[str], *, seed: int) -> dict[str, Any]:
        """Load the server with requests for these adapters at random, or for the base model."""
        result = self.scratch / f"run-{seed}.json"
        result.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                self.args(base_url, load, adapters, seed=seed, result=result),
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=self.timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise ClientFailedError(f"the client took more than {self.timeout_s:g} s") from error
        if done.returncode or not result.is_file():
            tail = "\n".join(done.stdout.splitlines()[-30:])
            raise ClientFailedError(f"the client ended with code {done.returncode}\n{tail}")
        return figures(json.loads(result.read_text()), num_requests=load.num_requests)


def figures(saved: Mapping[str, Any], *, num_requests: int) -> dict[str, Any]:
    """Return what is kept of a result file of `vllm bench serve`."""
    found = {ours: saved[theirs] for theirs, ours in _KEPT.items() if saved.get(theirs) is not None}
    # Older clients do not count failures, and a request that failed is in none of the latencies.
    found["failed"] = num_requests - int(found["completed"])
    return {name: round(value, 3) for name, value in found.items()}


def vllm_program() -> tuple[str, ...]:
    """Return what starts vLLM's command line under this Python, with vLLM on its path."""
    return (sys.executable, "-m", "vllm.entrypoints.cli.main")
