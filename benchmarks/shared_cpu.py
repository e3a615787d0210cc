"""Measure the CPU engine beside other programs: with all threads, one thread, and automatically chosen
threads.

    python -m benchmarks.shared_cpu --work-dir build/benchmarks

Writes results/shared_cpu.json. Runs in-process, on the checkpoint of cpu_serve, first alone and then beside
one busy program for each core. A run is a new engine that answers one request, so the figures include the
time it takes to notice the other programs. Ratios are within this run, with the kinds of engine in turn;
`load_before` says how busy the machine was before: near 0 on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.cpu_serve import PACKAGES, RESULTS, checkpoint
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.machine import num_cores
from loraplex.engine.options import EngineOptions

ALL, ONE, AUTO = "all threads", "one thread", "automatic"
PROMPT_TOKENS: Final = 64
KV_BYTES: Final = 1 << 28
_BUSY_LIMIT_S: Final = 600
_BUSY = f"import time\nend = time.monotonic() + {_BUSY_LIMIT_S}\nwhile time.monotonic() < end: pass"


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run programs that compute all the time, at our own priority; they end by themselves after ten
    minutes."""
    programs = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(model: Path, kind: str, *, output_tokens: int, limit_s: float) -> dict[str, float]:
    """Return tokens per second of one request on a new engine, and the number of threads of its last step."""
    import torch  # after loraplex, which configures how its threads wait

    num_threads = {ALL: num_cores(), ONE: 1, AUTO: None}[kind]
    torch.set_num_threads(num_threads or num_cores())
    engine = build_core(
        EngineOptions(model=str(model), device="cpu", kv_memory_bytes=KV_BYTES, num_threads=num_threads)
    )
    try:
        _answer(engine, "warm-up", output_tokens=2, limit_s=limit_s)
        seconds, num_tokens = _answer(engine, "measured", output_tokens=output_tokens, limit_s=limit_s)
        last_threads = torch.get_num_threads()
    finally:
        engine.close()
    return {"tokens_per_s": round(num_tokens / seconds, 2), "threads_at_end": last_threads}


def _answer(engine: Engine, request_id: str, *, output_tokens: int, limit_s: float) -> tuple[float, int]:
    """Return seconds and tokens of a request, which is cut off after `limit_s`."""
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(range(1, PROMPT_TOKENS + 1)),
        params=SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True),
    )
    engine.add_request(request)
    started, num_tokens = time.perf_counter(), 0
    while engine.has_work() and time.perf_counter() - started < limit_s:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    engine.cancel(request_id)
    return time.perf_counter() - started, num_tokens


def run(model: Path, *, num_busy: int, repeats: int, output_tokens: int, limit_s: float) -> dict[str, Any]:
    """Measure all kinds of engine in turn, `repeats` times."""
    kinds = (ALL, ONE, AUTO)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with busy_programs(num_busy):
        for _ in range(repeats):
            for kind in kinds:
                found = measure(model, kind, output_tokens=output_tokens, limit_s=limit_s)
                print(f"{num_busy} busy programs, {kind}: {found['tokens_per_s']} tokens/s", flush=True)
                runs[kind].append(found)
    speeds = {kind: statistics.median(each["tokens_per_s"] for each in runs[kind]) for kind in kinds}
    return {
        "runs": runs,
        "tokens_per_s": speeds,
        "automatic_over_all_threads": round(speeds[AUTO] / speeds[ALL], 2),
        "automatic_over_one_thread": round(speeds[AUTO] / speeds[ONE], 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--model", type=Path, help="another checkpoint folder, such as the demo's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--limit-s", type=float, default=10.0, help="seconds after which a run is cut off")
    parser.add_argument("--out", type=Path, default=RESULTS / "shared_cpu.json")
    args = parser.parse_args(argv)
    load = [round(value, 2) for value in os.getloadavg()]
    model = args.model or checkpoint(args.work_dir.resolve() / "checkpoint-16", num_adapters=16).base
    options = {"repeats": args.repeats, "output_tokens": args.output_tokens, "limit_s": args.limit_s}
    result = environment(PACKAGES) | {
        "sources": fingerprints("shared_cpu.json"),
        "load_before": load,
        "parameters": {"model": model.name, "prompt_tokens": PROMPT_TOKENS, "batch": 1, **options},
        "alone": run(model, num_busy=0, **options),
        "one_busy_program_per_core": run(model, num_busy=num_cores(), **options),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("alone", "one_busy_program_per_core")}, indent=1))


if __name__ == "__main__":
    main()
