"""The load of the HTTP comparison: runs of `vllm bench serve` against a server, and their figures.

The client is vLLM's own for every server, so that we do not measure ourselves. vLLM is imported once for all
runs, which takes longer than a run, and each run is a separate process (`benchmarks.preloaded`).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from benchmarks import preloaded

VLLM: Final = "vllm.entrypoints.cli.main"
"""The module of vLLM's command line."""

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
"""Figures of the client's result file -> their names in ours."""


class ClientFailedError(Exception):
    """The client ended without a result; the message holds the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompts and answers of random length, uniform within `spread` (relative) of these means."""

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
class Load:
    """One kind of load: either `requests_per_s` (open loop) or `concurrency` (closed loop) is set."""

    name: str
    num_requests: int
    requests_per_s: float | None = None
    concurrency: int | None = None
    lengths: Lengths = field(default_factory=Lengths)

    def __post_init__(self) -> None:
        assert (self.requests_per_s is None) != (self.concurrency is None)

    @property
    def args(self) -> tuple[str, ...]:
        rate = "inf" if self.requests_per_s is None else f"{self.requests_per_s:g}"
        limit = () if self.concurrency is None else ("--max-concurrency", str(self.concurrency))
        return ("--request-rate", rate, "--num-prompts", str(self.num_requests), *limit, *self.lengths.args)


class BenchClient:
    """vLLM's client, with vLLM imported; a context manager that ends it."""

    def __init__(
        self,
        *,
        python: str,
        tokenizer: Path,
        scratch: Path,
        env: Mapping[str, str],
        timeout_s: float = 150.0,
    ) -> None:
        """`python`: the one that has vLLM. `env`: variables set in addition to this process's own."""
        self._tokenizer = tokenizer
        self._scratch = scratch
        self._timeout_s = timeout_s
        self._log = scratch / "client.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, preloaded.__file__, VLLM, "bench", "serve", "--help"],
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # its own process group, which is killed at the end
            )
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def args(
        self, base_url: str, load: Load, adapters: Sequence[str], *, seed: int, result: Path
    ) -> list[str]:
        """Return the arguments of one run; it writes `result`."""
        return [
            *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
            *("--base-url", base_url, "--model", str(self._tokenizer), "--served-model-name", "base"),
            *("--tokenizer", str(self._tokenizer), "--dataset-name", "random", "--ignore-eos"),
            *("--seed", str(seed), "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
            *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
            *load.args,
            *(("--lora-modules", *adapters) if adapters else ()),
        ]

    def run(self, base_url: str, load: Load, adapters: Sequence[str], *, seed: int) -> dict[str, Any]:
        """Load the server with requests for these adapters at random, or for the base model; return the
        figures."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True
        result, self._log = self._scratch / f"run-{seed}.json", self._scratch / "client-run.log"
        result.unlink(missing_ok=True)
        args = self.args(base_url, load, adapters, seed=seed, result=result)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"args": args, "log": str(self._log)}) + "\n")
        self._process.stdin.flush()
        if (status := self._answer()) != "0" or not result.is_file():
            raise ClientFailedError(f"the client ended with code {status}\n{self._tail()}")
        return figures(json.loads(result.read_text()), num_requests=load.num_requests)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._timeout_s):
                raise ClientFailedError(f"the client took more than {self._timeout_s:g} s\n{self._tail()}")
        if not (line := self._process.stdout.readline()):
            raise ClientFailedError(f"the client ended with code {self._process.wait()}\n{self._tail()}")
        return line.strip()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


def figures(saved: Mapping[str, Any], *, num_requests: int) -> dict[str, Any]:
    """Return the figures that are kept of a result file of `vllm bench serve`."""
    found = {ours: saved[theirs] for theirs, ours in _KEPT.items() if saved.get(theirs) is not None}
    # Older clients do not count failures, and the latencies do not include failed requests.
    found["failed"] = num_requests - int(found["completed"])
    return {name: round(value, 3) for name, value in found.items()}
