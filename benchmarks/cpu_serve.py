"""Measure loraplex and its peers on this machine's CPU, and add the measurement to those in results/.

    benchmarks/peers/setup_vllm_cpu.sh build/vllm-venv
    python -m benchmarks.cpu_serve --vllm-venv build/vllm-venv --repeats 5
    python -m benchmarks.cpu_serve --shape 0.5b --engines loraplex,vllm,vllm-lora,llama.cpp \
        --vllm-venv build/vllm-venv --llama-server build/llama.cpp/llama-server
    python -m benchmarks.make_tables

Suites:  serve          base model and 16 adapters, every engine, repeats interleaved A, B, A, B
         many-adapters  loraplex, 1,000 adapters registered, host memory for 100 of them
         bystanders     loraplex, with and without 64 idle clients and 16 slow readers

Run it on a quiet machine. Engines run one at a time, each from a cold start in every repeat, so that noise of
the machine affects all of them alike; compare figures only within one measurement. Earlier measurements stay
in the file, and the tables show the range over all of them. The file is written after every repeat of `serve`
and after every other suite.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import engines, scenarios, sources
from benchmarks.cpu_models import MODELS, CpuModel
from benchmarks.engines import BASE, Engine
from benchmarks.make_checkpoint import SERVED, Checkpoint, Size, adapter_name, write_adapters, write_base
from benchmarks.measure import Traffic, base_model, measure, with_median
from benchmarks.peer_setups import BEST, SETUPS
from benchmarks.peers import to_gguf
from benchmarks.servers import RunningServer, running
from loraplex.bench.environment import environment
from loraplex.bench.load import run
from loraplex.core.whole_file import write_whole

RESULTS = Path(__file__).parent / "results"
NUM_ADAPTERS = 16
PACKAGES = ("loraplex", "torch", "numpy", "numba", "aiohttp", "uvloop", "transformers", "safetensors")
SUITES = ("serve", "many-adapters", "bystanders")
_WARMUP_SEED = 1_000_003


def measure_serve(
    chosen: Sequence[Engine], traffic: Traffic, *, repeats: int, logs: Path
) -> Iterator[list[dict[str, Any]]]:
    """Measure every engine in turn, `repeats` times; yield one row per engine and kind of traffic after each
    repeat, with all runs so far."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    start_s: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats):
        for engine in chosen:
            with running(engine.command, log_path=logs / f"{engine.name}-{repeat}.log") as server:
                start_s[engine.name].append(round(server.start_s, 2))
                for kind in engine.traffic:
                    report = _one_run(server, engine, kind, traffic, seed=repeat)
                    runs[engine.name, kind].append(report)
                    _say(f"repeat {repeat}  {engine.name:10}  {kind:9}", report)
        yield [
            _about(engine)
            | {"traffic": kind, "start_s": [*start_s[engine.name]], **with_median(runs[engine.name, kind])}
            for engine in chosen
            for kind in engine.traffic
        ]


def _about(engine: Engine) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "label": engine.label,
        "version": engine.version,
        "command": shown_command(engine),
        "env": {name: without_folders(value) for name, value in engine.command.env.items()},
    }


def _one_run(
    server: RunningServer, engine: Engine, kind: str, traffic: Traffic, *, seed: int
) -> dict[str, Any]:
    if kind == BASE:
        models = [run(base_model(server.base_url))]
    else:
        models = [adapter_name(index) for index in range(NUM_ADAPTERS)]
    # Prompts are new in every repeat and the same for every engine: no prefix cache hits.
    warmup = traffic.warmup(models, seed=_WARMUP_SEED + seed)
    measured = traffic.requests(models, seed=seed)
    reports = [
        run(
            measure(
                server.base_url,
                engine.prepare(requests),
                concurrency=traffic.concurrency,
                keep_alive=engine.keep_alive,
            )
        )
        for requests in (warmup, measured)
    ]
    warmed, report = reports
    if warmed.num_failed:
        raise SystemExit(f"{engine.name}: warm-up failed: {warmed.errors}")
    return report.as_json()


def shown_command(engine: Engine) -> str:
    """Return the command for publication: names of programs and files without this machine's folders."""
    args = engine.command.args
    for many in ("--lora-modules", "--lora"):  # a name and a path for each adapter: too long to show
        if many in args:
            args = (*args[: args.index(many) + 1], "...")
    return " ".join(without_folders(arg) for arg in args)


def without_folders(value: str) -> str:
    """Return the names of the files in it, for a value that may be a list of them."""
    return ":".join(Path(part).name if part.startswith("/") else part for part in value.split(":"))


def checkpoint(root: Path, *, num_adapters: int, size: Size = SERVED) -> Checkpoint:
    """Return the random checkpoint, written once per work directory."""
    done = root / f"complete-{num_adapters}"
    found = Checkpoint(root=root, num_adapters=num_adapters)
    if not done.exists():
        print(f"writing a checkpoint with {num_adapters} adapters ...", flush=True)
        write_base(found.base, seed=0, size=size)
        write_adapters(found.adapters, base=found.base, num_adapters=num_adapters, seed=1, size=size)
        done.touch()
    return found


def make_engine(
    name: str, args: argparse.Namespace, served: Checkpoint, scratch: Path, num_slots: int
) -> Engine:
    engine, _, named = name.partition(":")
    if engine == "loraplex":
        return engines.loraplex(served, state_dir=scratch / "state", program=args.loraplex)
    setup = named or BEST[args.shape][engine]
    if engine == "llama.cpp":
        gguf_dir = scratch / "gguf"
        if not gguf_dir.exists():
            to_gguf.convert(served.root, gguf_dir)
        return engines.llama_cpp(
            served,
            program=args.llama_server,
            gguf_dir=gguf_dir,
            num_slots=num_slots,
            setup=setup,
            named=bool(named),
        )
    lora = engine == "vllm-lora"
    return engines.vllm(served, venv=args.vllm_venv, lora=lora, setup=setup, named=bool(named))


def main() -> None:
    args = _arguments()
    # Otherwise SIGTERM would leave the running server behind.
    signal.signal(signal.SIGTERM, _raise_exit)
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    model = MODELS[args.shape]
    traffic = replace(model.traffic, num_requests=args.requests or model.traffic.num_requests)
    earlier = measurements_in(args.out)
    result = environment(PACKAGES) | {
        "sources": sources.fingerprints(model.file),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "parameters": {
            "traffic": asdict(traffic),
            "repeats": args.repeats,
            "adapters": NUM_ADAPTERS,
            "shape": args.shape,
            "model": model.description,
        },
    }
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        for suite in args.suites:
            print(f"== {suite}", flush=True)
            # Written as it goes: a failure must not lose an hour's run.
            for found in _run_suite(suite, args, model, traffic, Path(scratch)):
                result[suite] = found
                if suite == "serve":
                    result["parameters"]["repeats"] = len(found[0]["runs"])
                document = {"measurements": [*earlier, result]}
                write_whole(args.out, json.dumps(document, indent=1) + "\n")
    print(f"wrote {args.out}")
    if num_failed := _count_failed(result):
        sys.exit(f"{num_failed} requests failed")


def measurements_in(path: Path) -> list[dict[str, Any]]:
    """Return the measurements in the file, which are never replaced."""
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if "measurements" not in document:
        sys.exit(f"{path} holds no measurements of this script; give another file with --out")
    return list(document["measurements"])


def _run_suite(
    suite: str, args: argparse.Namespace, model: CpuModel, traffic: Traffic, scratch: Path
) -> Iterator[Any]:
    """Yield the suite's results: `serve` those so far after every repeat, the others once."""
    num_adapters = 1000 if suite == "many-adapters" else NUM_ADAPTERS
    folder = args.work_dir / f"checkpoint-{num_adapters}{model.suffix}"
    served = checkpoint(folder, num_adapters=num_adapters, size=model.size)
    if suite == "serve":
        chosen = [make_engine(name, args, served, scratch, traffic.concurrency) for name in args.engines]
        yield from measure_serve(chosen, traffic, repeats=args.repeats, logs=args.work_dir)
        return
    scenario = scenarios.many_adapters if suite == "many-adapters" else scenarios.with_bystanders
    yield scenario(
        served, traffic, repeats=args.repeats, scratch=scratch, logs=args.work_dir, program=args.loraplex
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = f"{', '.join(engines.NAMES)}; ENGINE:SETUP for one of its set-ups in peer_setups.py"
    default_engines = ["loraplex", "vllm", "vllm-lora"]
    parser.add_argument("--shape", choices=MODELS, default="28m", help="the model (28m)")
    parser.add_argument("--suites", type=_suite_names, help=f"of {', '.join(SUITES)} (all; 0.5b: serve)")
    parser.add_argument("--engines", type=_engine_names, default=default_engines, help=f"of {known}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, help="fewer than the model's traffic has, for trials")
    parser.add_argument(
        "--vllm-venv", type=Path, default=Path(os.environ.get("VLLM_VENV", "build/vllm-venv"))
    )
    parser.add_argument("--llama-server", type=Path, help="the llama-server program")
    parser.add_argument("--loraplex", help="the loraplex program (default: beside this Python)")
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"), help="checkpoints, logs")
    parser.add_argument("--out", type=Path, help="the result file (that of the model in results/)")
    args = parser.parse_args()
    args.out = args.out or RESULTS / MODELS[args.shape].file
    args.suites = args.suites or (list(SUITES) if args.shape == "28m" else ["serve"])
    if args.shape != "28m" and args.suites != ["serve"]:
        parser.error("the other suites are of the 28M model")
    if any(name.startswith("llama.cpp") for name in args.engines) and args.llama_server is None:
        parser.error("llama.cpp needs --llama-server")
    return args


def _suite_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SUITES]:
        raise argparse.ArgumentTypeError(f"unknown suite {unknown[0]}")
    return names


def _engine_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        engine, _, setup = name.partition(":")
        if engine not in engines.NAMES or (setup and setup not in SETUPS.get(engine, {})):
            raise argparse.ArgumentTypeError(f"unknown engine {name}")
    return names


def _say(what: str, report: dict[str, Any]) -> None:
    ttft, tpot = report["ttft_ms"], report["tpot_ms"]
    latency = f"TTFT {ttft['mean']:8.1f} ms  TPOT {tpot['mean']:6.1f} ms" if ttft and tpot else "no latencies"
    failed = f"  FAILED {report['num_failed']}: {list(report['errors'])[:2]}" if report["num_failed"] else ""
    print(f"{what}  {report['output_tokens_per_s']:7.1f} tok/s  {latency}{failed}", flush=True)


def _count_failed(value: Any) -> int:
    """Return the failed requests anywhere in the result (`num_failed` beside `runs` is already their sum)."""
    if isinstance(value, dict):
        own = value.get("num_failed", 0)
        return int(own) if own else sum(_count_failed(item) for item in value.values())
    return sum(_count_failed(item) for item in value) if isinstance(value, list) else 0


def _raise_exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
