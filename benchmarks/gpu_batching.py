"""Measure merging, swapping and batching policies on one GPU.

    python -m benchmarks.gpu_batching                     all sections, eight minutes on an H200
    python -m benchmarks.gpu_batching merge swap          these; the others keep their results

Writes results/gpu_batching.json. Random weights of Llama-2-7B in bfloat16; each engine has a process of its
own. Policies decide by the machine's profile (`loraplex profile`), or by the shipped one of such a machine.

merge   writing an adapter's merged weights, until the next step may run
switch  decode where merged and unmerged steps take turns, beside each alone
steps   decode and prompts on merged weights, beside the base model and the same adapter unmerged
swap    keys and values of 1,000 tokens to the host and back beside a plain copy of as many bytes, and decode
        while such copies go to and fro without a pause
hot, queue, skew
        loads of `benchmarks.batching` by policy, served in real time: one hot adapter, many requests at once,
        and dLoRA's skew
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks import sources
from benchmarks.batching import BOUND, MAF_SHARES, OUR_RPS, Requests, burst, skewed, stream
from benchmarks.gpu_engine import (
    ALL,
    PROMPT_REPEATS,
    PROMPT_TOKENS,
    QKV,
    SHAPE,
    VOCAB_SIZE,
    here,
    in_process,
    register,
    rounded,
)
from loraplex.bench.distribution import Distribution
from loraplex.core.batching import Batching
from loraplex.engine.core import Engine
from loraplex.scheduling.batching.policy import ALL as ALL_REQUESTS
from loraplex.scheduling.batching.policy import StepBatch, View, merged_batch

if TYPE_CHECKING:
    import torch

    from loraplex.engine.cuda.kv_swap import KVSwap
    from loraplex.scheduling.plan import BlockCopy

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "gpu_batching.json"
MERGES: Final = (
    # rank, modules
    (64, QKV),
    (64, ALL),
    (128, ALL),
)
MERGE_REPEATS: Final = 20
SWITCH_BATCH: Final = 16
STEPS: Final = (
    # batch, rank, modules
    (32, 64, QKV),
    (32, 128, ALL),
    (256, 128, ALL),
)
STEP_TOKENS: Final = 128
PROMPTS: Final = (512, 2048)
SWAPPED_TOKENS: Final = 1000
SWAP_REPEATS: Final = 20
SWAP_BATCH, SWAP_STEPS, SWAP_ROUNDS = 32, 200, 4
_BLOCK_TOKENS: Final = 16


def merge() -> list[dict[str, Any]]:
    return in_process(_merge)  # type: ignore[no-any-return]


def _merge() -> list[dict[str, Any]]:
    from loraplex.bench.profile_merges import merge_times

    engine, found = _engine(Batching.FCFS), []
    for rank, modules in MERGES:
        (version,) = register(engine, f"merge-{rank}-{modules}", 1, (rank,), modules, prepared=False)
        seconds, num_bytes = merge_times(
            engine, version, vocab_size=VOCAB_SIZE, repeats=MERGE_REPEATS, report=lambda share: None
        )
        row = {
            "rank": rank,
            "modules": modules,
            "merged_mb": round(num_bytes / 1e6),
            "merge_ms": round(median(seconds) * 1e3, 3),
            "worst_merge_ms": round(max(seconds) * 1e3, 3),
            "tb_per_s": round(2 * num_bytes / median(seconds) / 1e12, 2),
        }
        print(row, flush=True)
        found.append(row)
    engine.close()
    return found


def switch() -> dict[str, Any]:
    return in_process(_switch)  # type: ignore[no-any-return]


def _switch() -> dict[str, Any]:
    """Measure decode where steps are merged, unmerged, and one or the other in turns."""
    from loraplex.bench.engine_scenarios import Load, measure_decode

    engine = _engine(Batching.MERGED)
    load = Load(
        batch=SWITCH_BATCH,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=STEP_TOKENS,
        adapters=register(engine, "switch", 1, (64,), ALL),
        vocab_size=VOCAB_SIZE,
    )
    itl_ms = {}
    for name, turns in (("merged", (True,)), ("unmerged", (False,)), ("in turns", (True, False))):
        engine._scheduler.batcher._policy = _Turns(turns)
        itl_ms[name] = rounded(measure_decode(engine, load, 2))
    engine.close()
    switch_ms = itl_ms["in turns"]["mean"] - (itl_ms["merged"]["mean"] + itl_ms["unmerged"]["mean"]) / 2
    found = {"batch": SWITCH_BATCH, "itl_ms": itl_ms, "switch_ms": round(switch_ms, 4)}
    print(found, flush=True)
    return found


class _Turns:
    """A policy that runs the adapter of the oldest request merged, or all unmerged, by turns."""

    displaces = False

    def __init__(self, turns: Sequence[bool]) -> None:
        self._turns = cycle(turns)

    def choose(self, view: View) -> StepBatch:
        version = view.requests[0].adapter if view.requests else None
        is_merged = next(self._turns) and version is not None and view.can_merge(version)
        return merged_batch(version) if is_merged and version is not None else ALL_REQUESTS

    def ran(self, batch: StepBatch) -> None:
        """Do nothing: nothing is recorded."""

    def forget(self, version: str) -> None:
        """Do nothing: nothing is recorded."""


def steps() -> list[dict[str, Any]]:
    rows = [in_process(_steps, batching) for batching in (Batching.FCFS, Batching.MERGED)]
    found = [{**unmerged, **merged} for unmerged, merged in zip(*rows, strict=True)]
    for row in found:
        print(row, flush=True)
    return found


def _steps(batching: Batching) -> list[dict[str, Any]]:
    """Measure the base model and an adapter, all of whose requests are on it; merged if the policy does."""
    from loraplex.bench.engine_scenarios import Load, measure_decode, measure_prefill

    engine, found = _engine(batching), []
    key = "merged" if batching.merges else "unmerged"
    adapters = {
        (rank, modules): register(engine, f"steps-{rank}-{modules}", 1, (rank,), modules)
        for rank, modules in dict.fromkeys((rank, modules) for _, rank, modules in STEPS)
    }
    for batch, rank, modules in STEPS:
        row: dict[str, Any] = {"what": "decode", "batch": batch, "rank": rank, "modules": modules}
        for who, versions in (("base", ()), ("adapter", adapters[rank, modules])):
            load = Load(
                batch=batch,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=STEP_TOKENS,
                adapters=versions,
                vocab_size=VOCAB_SIZE,
            )
            row[f"{key}_{who}_ms"] = rounded(measure_decode(engine, load, 1))
        found.append(row)
    for num_tokens in PROMPTS:
        for (rank, modules), version in adapters.items():
            row = {"what": "prompt", "tokens": num_tokens, "rank": rank, "modules": modules}
            for who, versions in (("base", ()), ("adapter", version)):
                load = Load(
                    batch=1,
                    prompt_tokens=num_tokens,
                    output_tokens=1,
                    adapters=versions,
                    vocab_size=VOCAB_SIZE,
                    seed=zlib.crc32(f"{num_tokens} {rank} {modules} {who}".encode()),  # nothing is cached
                )
                row[f"{key}_{who}_ms"] = rounded(measure_prefill(engine, load, PROMPT_REPEATS))
            found.append(row)
    num_merged_steps = engine.stats().num_merged_steps
    assert (num_merged_steps > 0) == batching.merges, "steps ran on other weights than they should"
    engine.close()
    return found


def swap() -> dict[str, Any]:
    return in_process(_swap)  # type: ignore[no-any-return]


def _swap() -> dict[str, Any]:
    import torch

    from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
    from loraplex.engine.cuda.kv_swap import KVSwap
    from loraplex.model.shapes import config_of_shape
    from loraplex.scheduling.plan import BlockCopy

    shape, dtype, device = config_of_shape(SHAPE).shape, torch.bfloat16, torch.device("cuda")
    num_blocks = -(-SWAPPED_TOKENS // _BLOCK_TOKENS)
    arena = DeviceArena(shape, num_pages=4 * num_blocks, block_size=_BLOCK_TOKENS, dtype=dtype, device=device)
    block_bytes = page_bytes(shape, _BLOCK_TOKENS, dtype)
    kv_swap = KVSwap(arena, num_blocks=2 * num_blocks, block_bytes=block_bytes, device=device)
    # Blocks of a request lie anywhere.
    copies = [BlockCopy(3 * index + 1, 2 * index) for index in range(num_blocks)]
    host = torch.empty(num_blocks * block_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    num_bytes = num_blocks * block_bytes
    directions: dict[str, Any] = {}
    for name, outs, ins, target, source in (
        ("out", copies, [], host, on_device),
        ("in", [], copies, on_device, host),
    ):
        plain_s = median(_copy_seconds(target, source) for _ in range(SWAP_REPEATS))
        swap_s = median(_swap_seconds(kv_swap, outs, ins) for _ in range(SWAP_REPEATS))
        directions[name] = {
            "plain_ms": round(plain_s * 1e3, 3),
            "swap_ms": round(swap_s * 1e3, 3),
            "gb_per_s": round(num_bytes / swap_s / 1e9, 1),
            "over_plain": round(swap_s / plain_s, 3),
        }
        print(name, directions[name], flush=True)
    engine = _engine(Batching.FCFS)
    both = {"outs": copies, "ins": [BlockCopy(3 * index + 2, 2 * index + 1) for index in range(num_blocks)]}
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * SWAP_ROUNDS + 1):
        name = "with" if number % 2 else "without"
        found = _decode_beside(engine, kv_swap, both if number % 2 else None, seed=number)
        gaps[name] += found if number > 0 else []
    engine.close()
    kv_swap.close()
    decode = {name: rounded(Distribution.of(found)) for name, found in gaps.items()}  # type: ignore[arg-type]
    print(decode, flush=True)
    return {"mb": round(num_bytes / 1e6), "blocks": num_blocks, **directions, "decode_ms": decode}


def hot() -> list[dict[str, Any]]:
    return _serve_all((HOT,), (Batching.FCFS, Batching.AUTO))


def queue() -> list[dict[str, Any]]:
    return _serve_all(QUEUES, (Batching.FCFS, Batching.AUTO))  # auto merges nothing there: it groups


def skew() -> list[dict[str, Any]]:
    policies = (Batching.FCFS, Batching.MERGED, Batching.DYNAMIC, Batching.AUTO)
    return _serve_all(SKEWS, policies, max_running=16)


def _serve_all(
    cases: Sequence[_Case], policies: Sequence[Batching], *, max_running: int = 256
) -> list[dict[str, Any]]:
    runs: dict[str, dict[str, _Served]] = {}
    for batching in policies:
        for name, served in in_process(_serve, batching, max_running, cases).items():
            runs.setdefault(name, {}).update(served)
    return [
        {"what": name, "policy": policy, **_figures(served, by_policy["fcfs"])}
        for name, by_policy in runs.items()
        for policy, served in by_policy.items()
    ]


class _Case(NamedTuple):
    """A load. `adapters`: how many, their rank and modules."""

    name: str
    requests: Requests
    adapters: tuple[int, int, str]


class _Served(NamedTuple):
    """Outcome of a load: for each request the seconds to its first token and to its end, and its output
    tokens; and how far counters of the engine went."""

    ttft_s: list[float]
    e2e_s: list[float]
    output_tokens: list[int]
    duration_s: float
    counts: dict[str, int]


QUEUES: Final = tuple(
    _Case(f"1,000 requests, {count} of rank {rank} on {what}", burst(0, count, num_requests=1000), adapters)
    for count, rank, what, adapters in (
        (200, 64, "q, k and v", (200, 64, QKV)),
        (256, 16, "all linears", (256, 16, ALL)),
    )
)
HOT: Final = _Case(
    "90% on one of rank 128, all linears, 60 requests/s",
    stream(0, 60.0, [0.9, *[0.1 / 7] * 7], 1200),
    (8, 128, ALL),
)
SKEWS: Final = tuple(
    _Case(
        f"{number} functions each, 8 of rank 8, 16 at a time",
        skewed(0, OUR_RPS, number, 160),
        (8, 8, QKV),
    )
    for number in MAF_SHARES
)
_COUNTS: Final = ("num_steps", "num_merged_steps", "num_merges", "num_pauses", "num_step_adapters")


def _serve(batching: Batching, max_running: int, cases: Sequence[_Case]) -> dict[str, dict[str, _Served]]:
    """Serve loads by one policy; first come, first served also on the base model alone."""
    engine = _engine(batching, max_running=max_running)
    versions = {}
    for case in cases:
        count, rank, modules = case.adapters
        versions[case.name] = register(engine, case.name, count, (rank,), modules, prepared=False)
    engine.warm_up()
    found: dict[str, dict[str, _Served]] = {}
    for case in cases:
        mine = found[case.name] = {}
        if batching is Batching.FCFS:
            mine["base model"] = _serve_one(engine, case.requests, ())
        mine[str(batching)] = _serve_one(engine, case.requests, versions[case.name])
        for name, served in mine.items():
            print(case.name, name, f"{sum(served.output_tokens) / served.duration_s:,.0f} tok/s", flush=True)
    engine.close()
    return found


def _serve_one(engine: Engine, requests: Requests, versions: Sequence[str]) -> _Served:
    from loraplex.bench.engine_scenarios import bring_in, replay

    bring_in(engine, versions, VOCAB_SIZE)
    before = engine.stats()
    records = replay(engine, requests, versions, VOCAB_SIZE)
    after = engine.stats()
    assert all(each.ok for each in records), "a request failed"
    return _Served(
        ttft_s=[each.token_times_s[0] - each.arrival_s for each in records],
        e2e_s=[each.finish_s - each.arrival_s for each in records],
        output_tokens=[each.output_tokens for each in records],
        duration_s=max(each.finish_s for each in records),
        counts={name: getattr(after, name) - getattr(before, name) for name in _COUNTS},
    )


def _figures(served: _Served, beside: _Served) -> dict[str, Any]:
    """Return the figures of a run. `beside`: the same requests, first come, first served."""
    num_tokens = sum(served.output_tokens)
    delays = [
        one - other - BOUND.allowed_s(other) for one, other in zip(served.ttft_s, beside.ttft_s, strict=True)
    ]
    e2e_s = sorted(served.e2e_s)
    return {
        "output_tok_s": round(num_tokens / served.duration_s),
        "s_per_token": round(sum(e2e_s) / num_tokens, 5),
        "ttft_mean_s": round(fmean(served.ttft_s), 4),
        "ttft_worst_s": round(max(served.ttft_s), 3),
        "beyond_bound_s": round(max(delays), 3),
        "e2e_mean_s": round(fmean(e2e_s), 3),
        "e2e_p90_s": round(e2e_s[int(0.9 * len(e2e_s))], 3),
        "e2e_max_s": round(e2e_s[-1], 3),
        **served.counts,
    }


def _engine(batching: Batching, *, max_running: int = 256) -> Engine:
    import torch

    from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine

    return build_random_engine(
        RandomEngineOptions(
            shape=SHAPE, device="cuda", dtype=torch.bfloat16, batching=batching, max_running=max_running
        )
    )


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    import torch

    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def _swap_seconds(kv_swap: KVSwap, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> float:
    import torch

    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    _start(kv_swap, outs, ins)
    while kv_swap.num_pending:
        assert all(event.error is None for event in kv_swap.poll())
    return time.perf_counter() - begin_s


def _start(kv_swap: KVSwap, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> None:
    import torch

    from loraplex.engine.cuda.streams import Moment

    kv_swap.start(outs, ins, after=Moment(torch.device("cuda")))


def _decode_beside(
    engine: Engine, kv_swap: KVSwap, copies: dict[str, list[BlockCopy]] | None, seed: int
) -> list[float]:
    """Return the milliseconds between tokens of a full batch, with copies in both directions all the time
    if there are any to make."""
    from loraplex.bench.engine_scenarios import new_request, run_dry

    engine.warm_up()
    for index in range(SWAP_BATCH):
        request_id = f"{seed}-{index}"
        engine.add_request(
            new_request(
                request_id, PROMPT_TOKENS, SWAP_STEPS, None, vocab_size=VOCAB_SIZE, seed=1000 * seed + index
            )
        )
    full_s: list[float] = []
    while engine.has_work():
        if copies is not None:
            kv_swap.poll()
            if kv_swap.num_pending == 0:
                _start(kv_swap, **copies)
        if len(engine.step()) == SWAP_BATCH:
            full_s.append(time.perf_counter())
    run_dry(engine)
    while kv_swap.num_pending:
        kv_swap.poll()
    return [(later - sooner) * 1e3 for sooner, later in pairwise(full_s)][SWAP_BATCH:]


SECTIONS: Final[dict[str, Callable[[], Any]]] = {
    "merge": merge,
    "switch": switch,
    "steps": steps,
    "swap": swap,
    "hot": hot,
    "queue": queue,
    "skew": skew,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; on a CPU, try `python -m benchmarks.batching`")
    document = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.sections:
        started = time.perf_counter()
        found = SECTIONS[name]()
        document[name] = in_process(here) | {
            "sources": sources.fingerprints(FILE, name),
            "shape": SHAPE,
            "results": found,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
