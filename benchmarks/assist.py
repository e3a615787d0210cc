"""CPU LoRA workers: how long a signal takes there and back, and N of them against torch's own N threads.

    python -m benchmarks.assist --workers 8

Writes results/assist.json. Run it on a quiet machine with more cores than workers. `--tiny` tries the script
itself, and writes nothing unless --out says where.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import sources
from loraplex.bench.distribution import Distribution
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import AssistPart, AssistTask
from loraplex.engine.machine import spread_cores

RESULTS = Path(__file__).parent / "results"
SCALE: Final = 2.0
WARM_UP: Final = 5
READY_S: Final = 300.0
WAIT_S: Final = 60.0
PAUSE_S: Final = 100e-6
"""Seconds between two rounds: workers return to their loop meanwhile, and a GPU would be computing."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the cases. `layers`: numbers of sets of weights used in turn; one set stays in the caches,
    many do not."""

    hidden: int = 4096
    tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    layers: tuple[int, ...] = (1, 16)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    rounds: int = 60
    round_trips: int = 5000


TINY: Final = Sizes(hidden=64, tokens=(16,), ranks=(8,), layers=(2,), rounds=3, round_trips=10)


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    tokens: int
    rank: int
    layers: int

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.tokens} tokens, rank {self.rank}, {self.layers} sets of weights"


class Matrices:
    """One block with the weights of the largest case: A and transposed B for each layer."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        self._hidden = sizes.hidden
        self._elements = 2 * max(sizes.ranks) * sizes.hidden
        self.block = SharedBlock(max(sizes.layers) * self._elements * dtype.itemsize)
        self._values = self.block.memory.view(dtype).normal_(std=0.02)

    def part(self, layer: int, rank: int) -> AssistPart:
        itemsize = self._values.element_size()
        return AssistPart(
            weights=0,
            a_offset_bytes=layer * self._elements * itemsize,
            b_offset_bytes=(layer * self._elements + rank * self._hidden) * itemsize,
            rank=rank,
            scale=SCALE,
            out_start=0,
            out_features=self._hidden,
        )

    def a_and_b(self, layer: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        used = self._values[layer * self._elements :][: 2 * rank * self._hidden]
        a, b = used.view(2, rank, self._hidden)
        return a, b


def cases(sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for layers in sizes.layers:
        for rank in sizes.ranks:
            for tokens in sizes.tokens:
                yield Case(dtype=dtype, tokens=tokens, rank=rank, layers=layers)


def measure(work: Callable[[int], None], prepare: Callable[[int], None], rounds: int) -> list[float]:
    """Return the microseconds of every round except the first few. `prepare` is not timed."""
    times = []
    for index in range(WARM_UP + rounds):
        prepare(index)
        pause()
        started = time.perf_counter()
        work(index)
        times.append(1e6 * (time.perf_counter() - started))
    return times[WARM_UP:]


def pause() -> None:
    """Wait without sleeping, which would cost more than what is measured."""
    until = time.perf_counter() + PAUSE_S
    while time.perf_counter() < until:
        pass


@contextmanager
def off_worker_cores(num_workers: int) -> Iterator[None]:
    """Keep this thread, alone, off the workers' cores, if there are others."""
    cores = os.sched_getaffinity(0)
    others = cores - set(spread_cores(num_workers))
    torch.set_num_threads(1)  # threads that torch starts now would stay where this one is
    os.sched_setaffinity(0, others or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Workers:
    """A pool of workers, with the calls that are timed."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, num_workers: int) -> None:
        num_elements = max(sizes.tokens) * sizes.hidden
        self.pool = AssistPool(
            num_workers=num_workers,
            dtype=dtype,
            x_elements=num_elements,
            y_elements=num_elements,
            profiled=(sizes.hidden, sizes.hidden, max(sizes.ranks) // 4),
        )
        self._hidden = sizes.hidden
        self._ticket = 0
        assert self.pool.wait_ready(READY_S) == num_workers, "not all workers started"
        self.pool.x.normal_()

    def submit(self, num_rows: int, parts: tuple[AssistPart, ...]) -> None:
        self._ticket = self.pool.submit(
            AssistTask(
                num_rows=num_rows,
                in_features=self._hidden,
                x_start=0,
                x_stride=self._hidden,
                y_start=0,
                y_stride=self._hidden,
                parts=parts,
            )
        )

    def go(self) -> None:
        self.pool.start(self._ticket)
        assert self.pool.wait(self._ticket, WAIT_S)

    def round_trip_us(self, rounds: int) -> list[float]:
        """Return the microseconds to signal and wait, with nothing to compute."""
        return measure(lambda _: self.go(), lambda _: self.submit(1, ()), rounds)

    def product_us(self, case: Case, matrices: Matrices, rounds: int) -> list[float]:
        def submit(index: int) -> None:
            self.submit(case.tokens, (matrices.part(index % case.layers, case.rank),))

        times = measure(lambda _: self.go(), submit, rounds)
        self._check(case, matrices, (WARM_UP + rounds - 1) % case.layers)
        return times

    def _check(self, case: Case, matrices: Matrices, layer: int) -> None:
        a, b = (matrix.double() for matrix in matrices.a_and_b(layer, case.rank))
        x, y = (
            block[: case.tokens * self._hidden].view(case.tokens, -1) for block in (self.pool.x, self.pool.y)
        )
        expected = SCALE * (x.double() @ a.t()) @ b
        tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def torch_us(case: Case, matrices: Matrices, sizes: Sizes) -> list[float]:
    """Return the microseconds of the same product by torch, on as many threads as it is set to use."""
    x = torch.randn(case.tokens, sizes.hidden, dtype=case.dtype)
    y = torch.empty_like(x)

    def work(index: int) -> None:
        a, b = matrices.a_and_b(index % case.layers, case.rank)
        torch.addmm(y, x @ a.t(), b, beta=0, alpha=SCALE, out=y)

    return measure(work, lambda _: None, sizes.rounds)


def measure_dtype(sizes: Sizes, dtype: torch.dtype, num_workers: int) -> dict[str, Any]:
    matrices = Matrices(sizes, dtype)
    workers = Workers(sizes, dtype, num_workers)
    workers.pool.add_weights(matrices.block)
    with off_worker_cores(num_workers):
        round_trip = workers.round_trip_us(sizes.round_trips)
        rows_each = workers.pool.rows_each
        ours = {case: workers.product_us(case, matrices, sizes.rounds) for case in cases(sizes, dtype)}
    workers.pool.close()  # torch's threads get the cores to themselves
    torch.set_num_threads(num_workers)
    rows = []
    for case, times in ours.items():
        theirs = torch_us(case, matrices, sizes)
        medians = [statistics.median(samples) for samples in (times, theirs)]
        print(f"{case.name}: {medians[0]:.0f} us, torch {medians[1]:.0f} us", flush=True)
        row = {
            "tokens": case.tokens,
            "rank": case.rank,
            "layers": case.layers,
            "workers_us": rounded(times),
            "torch_us": rounded(theirs),
            "speedup": round(medians[1] / medians[0], 2),
        }
        rows.append(row)
    matrices.block.close()
    return {"round_trip_us": rounded(round_trip), "rows_each": rows_each, "products": rows}


def rounded(samples: list[float]) -> dict[str, float]:
    found = Distribution.of(samples)
    assert found is not None
    return {name: round(value, 1) for name, value in asdict(found).items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="sizes that try the script itself")
    parser.add_argument("--out", type=Path, help="default: results/assist.json, nothing if --tiny")
    args = parser.parse_args(arguments)
    sizes = TINY if args.tiny else Sizes()
    result = environment(ENGINE_PACKAGES) | {
        "sources": sources.fingerprints("assist.json"),
        "workers": args.workers,
        "hidden": sizes.hidden,
    }
    for name in sizes.dtypes:
        with torch.no_grad():
            result[name] = measure_dtype(sizes, getattr(torch, name), args.workers)
        print(f"{name}: signal and wait {result[name]['round_trip_us']} us", flush=True)
    out = args.out or (None if args.tiny else RESULTS / "assist.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
