"""Measurements of `loraplex profile` of merging an adapter into the second set of weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loraplex.bench.profile_host import Report
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.core import Engine
from loraplex.perf.line import Line


def measure_merges(
    engine: Engine, version: str, *, vocab_size: int, repeats: int, report: Report
) -> Line | None:
    """Return the cost of merging by the bytes that are written, from merges of one adapter; None if the
    engine cannot merge it. The fastest of a few counts: pauses of the machine only add."""
    with _request_on(engine, version, vocab_size):
        best_s, num_bytes = float("inf"), None
        for number in range(repeats + 1):
            begin_s = _now_s()
            num_bytes = engine.merge_once(version)
            if num_bytes is None:
                return None
            if number > 0:
                best_s = min(best_s, _now_s() - begin_s)
            report(number / repeats)
    assert num_bytes is not None
    return Line(latency_s=0.0, unit_s=best_s / num_bytes)


def _now_s() -> float:
    """Return the time when everything launched so far has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _request_on(engine: Engine, version: str, vocab_size: int) -> Iterator[None]:
    """Have a request on a version in the engine, so that its weights are there and stay."""
    engine.add_request(
        EngineRequest(
            request_id="merge",
            prompt_token_ids=[vocab_size // 2],
            params=SamplingParams(max_tokens=8, ignore_eos=True),
            adapter=version,
        )
    )
    try:
        while not engine.step():  # until its first token
            pass
        yield
    finally:
        engine.cancel("merge")
        while engine.has_work():
            engine.step()
