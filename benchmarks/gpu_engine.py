"""Measure every published figure of the GPU engine: decode, prompts alone, serving, many registered adapters,
kernels, attention by the order of contexts and of prompts beside other kernels, cold starts, the cost of
padding to the largest rank of a batch, costs of sets of requests by the ranks of their adapters, and the
host's cost of a step by the context of its requests.

    python -m benchmarks.gpu_engine decode prompts serve registered kernels attention prompt_attention \\
        decode_attention cold padded sets padded_sets tables --workloads DIR

Writes results/gpu_engine.json; sections that are not named keep their results. Each section runs in its own
process, so that it shares no memory or compiled kernels with others. Needs one GPU of 140 GB for the
published shapes; DIR holds the workload files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import sources
from loraplex.bench.distribution import Distribution
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.engine.core import Engine
from loraplex.perf.cost_model import KernelKind

RESULTS = Path(__file__).parent / "results"
SHAPE: Final = "llama-2-7b"
GQA_SHAPE: Final = "llama-3-8b"
"""A shape with four query heads to a key head."""
VOCAB_SIZE: Final = 32000
PROMPT_TOKENS, OUTPUT_TOKENS, REPEATS = 128, 256, 2
QKV, ALL = "q,k,v", "all"

DECODE: Final = {
    # shape -> name, batch, distinct adapters, rank, modules
    SHAPE: (
        ("base, batch 1", 1, 0, 64, QKV),
        ("base, batch 32", 32, 0, 64, QKV),
        ("base, batch 64", 64, 0, 64, QKV),
        ("base, batch 256", 256, 0, 64, QKV),
        ("32 distinct, rank 64", 32, 32, 64, QKV),
        ("64 distinct, rank 64", 64, 64, 64, QKV),
        ("32 distinct, rank 8", 32, 32, 8, QKV),
        ("32 on one, rank 64", 32, 1, 64, QKV),
        ("32 distinct, rank 64, all seven linears", 32, 32, 64, ALL),
    ),
    GQA_SHAPE: (
        ("base, batch 32", 32, 0, 64, QKV),
        ("base, batch 256", 256, 0, 64, QKV),
        ("256 distinct, rank 16, all seven linears", 256, 256, 16, ALL),
    ),
}
PROMPTS: Final = {SHAPE: (512, 1000, 2048, 3800), GQA_SHAPE: (512, 2048, 3800, 8000)}
PROMPT_REPEATS: Final = 10
SERVE: Final = (
    # workload, adapters, ranks
    ("poisson-9rps-30s", 0, (64,)),
    ("poisson-9rps-30s", 200, (64,)),
    ("poisson-20rps-25s", 0, (64,)),
    ("poisson-20rps-25s", 200, (64,)),
    ("poisson-60rps-20s", 200, (8, 16, 32, 64)),
)
REGISTERED: Final = (5, 100, 1000, 2000)
_SPREAD: Final = 7919
"""A prime: consecutive requests go to adapters far apart."""
PADDED: Final = (
    # name, requests on adapters of rank 8, of rank 64
    ("32 of rank 8", 32, 0),
    ("31 of rank 8, one of rank 64", 31, 1),
    ("32 of rank 64", 0, 32),
)


def decode(workloads: Path) -> list[dict[str, Any]]:
    return [row for shape in DECODE for row in in_process(_decode, shape)]


def _decode(shape: str) -> list[dict[str, Any]]:
    from loraplex.bench.engine_scenarios import Load, measure_decode

    engine, found = build(shape), []
    for name, batch, num_adapters, rank, modules in DECODE[shape]:
        versions = register(engine, f"{rank}-{modules}", num_adapters, (rank,), modules, shape=shape)
        load = Load(
            batch=batch,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            adapters=versions,
            vocab_size=VOCAB_SIZE,
        )
        itl = measure_decode(engine, load, REPEATS)
        print(f"{shape}, {name}: {itl.mean:.2f} ms", flush=True)
        found.append({"shape": shape, "name": name, "batch": batch, "itl_ms": rounded(itl)})
    return found


def prompts(workloads: Path) -> list[dict[str, Any]]:
    """Measure the time to the first token of a prompt that runs alone, with nothing of it cached."""
    return [row for shape in PROMPTS for row in in_process(_prompts, shape)]


def _prompts(shape: str) -> list[dict[str, Any]]:
    from loraplex.bench.engine_scenarios import Load, measure_prefill

    engine, found = build(shape), []
    adapter = register(engine, "one", 1, (64,), QKV, shape=shape)
    for num_tokens in PROMPTS[shape]:
        row: dict[str, Any] = {"shape": shape, "prompt_tokens": num_tokens}
        for key, versions in (("ttft_ms", ()), ("adapter_ttft_ms", adapter)):
            load = Load(
                batch=1,
                prompt_tokens=num_tokens,
                output_tokens=1,
                adapters=versions,
                vocab_size=VOCAB_SIZE,
                seed=num_tokens,
            )
            row[key] = rounded(measure_prefill(engine, load, PROMPT_REPEATS))
        print(row, flush=True)
        found.append(row)
    return found


def serve(workloads: Path) -> list[dict[str, Any]]:
    found = []
    for name, num_adapters, ranks in SERVE:
        found.append(in_process(_serve_one, workloads / f"{name}.jsonl", num_adapters, ranks))
    return found


def _serve_one(workload: Path, num_adapters: int, ranks: Sequence[int]) -> dict[str, Any]:
    from loraplex.bench.engine_scenarios import replay
    from loraplex.bench.report import summarize
    from loraplex.workload.jsonl import read_workload

    engine = build()
    versions = register(engine, "serve", num_adapters, ranks, QKV, prepared=False)
    started = time.perf_counter()
    engine.warm_up()
    warm_up_s = time.perf_counter() - started
    report = summarize(replay(engine, read_workload(workload), versions, VOCAB_SIZE)).as_json()
    print(workload.stem, num_adapters, report["ttft_ms"], report["tpt_ms"], report["e2e_ms"], flush=True)
    return {
        "workload": workload.stem,
        "adapters": num_adapters,
        "ranks": list(ranks),
        "warm_up_s": round(warm_up_s, 1),
        **report,
    }


def registered(workloads: Path) -> list[dict[str, Any]]:
    """Measure the throughput of one workload by the number of registered adapters; all of them are used, as
    far as there are enough requests."""
    from loraplex.bench.engine_scenarios import replay
    from loraplex.bench.report import summarize
    from loraplex.workload.jsonl import read_workload

    engine = build()
    found: list[dict[str, Any]] = []
    requests = read_workload(workloads / "poisson-20rps-25s.jsonl")
    for count in REGISTERED:
        versions = register(engine, f"of-{count}", count, (16,), QKV)
        if not found:
            engine.warm_up()
        spread = [replace(request, adapter=index * _SPREAD % count) for index, request in enumerate(requests)]
        report = summarize(replay(engine, spread, versions, VOCAB_SIZE)).as_json()
        print(count, report["output_tokens_per_s"], report["ttft_ms"], flush=True)
        found.append({"adapters": count, "rank": 16, **report})
        for version in versions:
            engine.remove_adapter(version)
        engine.take_removed_adapters()
    return found


def kernels(workloads: Path) -> dict[str, Any]:
    from loraplex.bench.kernel_scenarios import measure_kernels, measure_shared

    copy_tb_per_s, rows = measure_kernels(SHAPE, (16, 32, 64), (8, 16, 32, 64, 128))
    shared = measure_shared(SHAPE)
    for row in (*rows, *shared):
        print(row, flush=True)
    return {"copy_tb_per_s": copy_tb_per_s, "rows": rows, "shared": shared}


def attention(workloads: Path) -> list[dict[str, Any]]:
    from benchmarks.attention_order import measure_order

    return measure_order(SHAPE)


def prompt_attention(workloads: Path) -> list[dict[str, Any]]:
    from benchmarks.prompt_attention import measure_prompts

    return measure_prompts((SHAPE, GQA_SHAPE))


def decode_attention(workloads: Path) -> list[dict[str, Any]]:
    from benchmarks.decode_attention import measure_decodes

    return measure_decodes((SHAPE, GQA_SHAPE))


def cold(workloads: Path) -> dict[str, Any]:
    """Measure from the start of a process to its first token."""
    found: dict[str, Any] = in_process(_cold, time.time())
    return found


def _cold(started_at: float) -> dict[str, Any]:
    """Measure this process. `started_at`: when it was requested, on the wall clock."""
    import torch

    from loraplex.bench.engine_scenarios import bring_in

    engine = build()
    free_bytes, _ = torch.cuda.mem_get_info()
    bring_in(engine, register(engine, "cold", 1, (64,), QKV, prepared=False), VOCAB_SIZE)
    first_token_s = time.time() - started_at
    engine.warm_up()
    ready_s = time.time() - started_at
    graphs_gb = (free_bytes - torch.cuda.mem_get_info()[0]) / 1e9
    print(first_token_s, ready_s, graphs_gb, flush=True)
    return {
        "start_to_first_token_s": round(first_token_s, 2),
        "start_to_all_graphs_s": round(ready_s, 2),
        "graphs_gb": round(graphs_gb, 2),
    }


def padded(workloads: Path) -> list[dict[str, Any]]:
    """Measure decode with adapters as they are, and padded to the largest rank of the batch."""
    from benchmarks.device_memory import release
    from loraplex.bench.engine_scenarios import Load, measure_decode

    found: list[dict[str, Any]] = [{"name": name} for name, _, _ in PADDED]
    for padded_to, key in ((None, "itl_ms"), (64, "padded_itl_ms")):
        engine = build(padded_to=padded_to)
        small = register(engine, "small", 32, (8,), QKV)
        large = register(engine, "large", 32, (64,), QKV)
        for row, (name, num_small, num_large) in zip(found, PADDED, strict=True):
            load = Load(
                batch=num_small + num_large,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                adapters=small[:num_small] + large[:num_large],
                vocab_size=VOCAB_SIZE,
            )
            row[key] = rounded(measure_decode(engine, load, 1))
            print(name, key, row[key]["mean"], flush=True)
        engine.close()
        del engine
        release()
    return found


def sets(workloads: Path) -> dict[str, Any]:
    return _measure_sets(KernelKind.RANK)


def padded_sets(workloads: Path) -> dict[str, Any]:
    return _measure_sets(KernelKind.PADDED)


def _measure_sets(kernels: KernelKind) -> dict[str, Any]:
    from benchmarks import set_sweep

    is_padded = kernels is KernelKind.PADDED
    engine = build(padded_to=max(set_sweep.RANKS) if is_padded else None)
    by_rank = {
        rank: register(engine, f"rank-{rank}", count, (rank,), QKV, staged=False, prepared=False)
        for rank, count in (set_sweep.PADDED_ADAPTERS if is_padded else set_sweep.ADAPTERS).items()
    }
    rows = set_sweep.measure_sets(engine, by_rank, VOCAB_SIZE)
    engine.close()
    return {"sets": rows, "fit": set_sweep.fit(rows, kernels)}


def tables(workloads: Path) -> list[dict[str, Any]]:
    from benchmarks.table_steps import measure_tables

    found = measure_tables("cuda")
    for row in found:
        print(row, flush=True)
    return found


SECTIONS: Final[dict[str, Callable[[Path], Any]]] = {
    "decode": decode,
    "prompts": prompts,
    "serve": serve,
    "registered": registered,
    "kernels": kernels,
    "attention": attention,
    "prompt_attention": prompt_attention,
    "decode_attention": decode_attention,
    "cold": cold,
    "padded": padded,
    "sets": sets,
    "padded_sets": padded_sets,
    "tables": tables,
}


def build(shape: str = SHAPE, *, padded_to: int | None = None) -> Engine:
    import torch

    from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine

    return build_random_engine(
        RandomEngineOptions(shape=shape, device="cuda", dtype=torch.bfloat16, padded_to=padded_to)
    )


def register(
    engine: Engine,
    name: str,
    count: int,
    ranks: Sequence[int],
    modules: str,
    *,
    shape: str = SHAPE,
    staged: bool = True,
    prepared: bool = True,
) -> tuple[str, ...]:
    from loraplex.bench import random_engine

    specs = random_engine.random_specs(name, shape, num_adapters=count, ranks=ranks, modules=modules)
    return random_engine.register(engine, specs, staged=staged, prepared=prepared)


def rounded(distribution: Distribution) -> dict[str, float]:
    return {key: round(value, 3) for key, value in asdict(distribution).items()}


def here() -> dict[str, Any]:
    """Return the environment, including the GPU."""
    import torch

    assert torch.cuda.is_available(), "this benchmark needs a GPU"
    return environment(ENGINE_PACKAGES)


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=tuple(SECTIONS))
    parser.add_argument("--workloads", type=Path, default=Path("workloads"))
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_engine.json")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; on a CPU, try `loraplex bench engine`")
    document = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.sections:
        started = time.perf_counter()
        # These start their own processes, which a pool's worker may not.
        section = SECTIONS[name]
        starts_own = name in ("decode", "prompts", "serve", "cold")
        found = section(args.workloads) if starts_own else in_process(section, args.workloads)
        document[name] = in_process(here) | {
            "sources": sources.fingerprints("gpu_engine.json", name),
            "shape": SHAPE,
            "results": found,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
