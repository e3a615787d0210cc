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
    seconds, num_bytes = merge_times(engine, version, vocab_size=vocab_size, repeats=repeats, report=report)
    return Line(latency_s=0.0, unit_s=min(seconds) / num_bytes) if seconds else None


def merge_times(
    engine: Engine, version: str, *, vocab_size: int, repeats: int, report: Report
) -> tuple[list[float], int]:
    """Return the seconds of merges of one adapter, until the next step may run, and the bytes that each
    writes; none if the engine cannot merge it. A first merge is not counted."""
    seconds, num_bytes = list[float](), 0
    with _request_on(engine, version, vocab_size):
        for number in range(repeats + 1):
            begin_s = _now_s()
            written = engine.merge_once(version)
            if written is None:
                return [], 0
            seconds.append(_now_s() - begin_s)
            num_bytes = written
            report(number / repeats)
    return seconds[1:], num_bytes


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
