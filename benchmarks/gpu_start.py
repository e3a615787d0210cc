"""Measure a start on a GPU by phase: on a new machine, and on one that has run the model before.

    python -m benchmarks.gpu_start --folder /dev/shm/start

Writes results/gpu_start.json. A checkpoint with random weights and some adapters is written to the folder
unless one is there. Every start is a fresh process. The first finds no compiled kernels, because its cache
folder is empty; the second finds those of the first. In each case the engine is started in-process, phase by
phase with the kernels compiled in each, and then `loraplex serve` is started and its health routes are
polled. `--tiny` tests the script itself on a CPU, and writes nothing without --out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.servers import ServerCommand, running
from loraplex.engine.start import begin_beside_imports

FILE: Final = "gpu_start.json"
RESULTS: Final = Path(__file__).parent / "results"
SHAPE: Final = "llama-2-7b"
NUM_ADAPTERS, RANK = 100, 64  # as in http_compare, so that both can use one checkpoint
KINDS: Final = ("engine", "server")
_RESULT: Final = "RESULT "
"""Prefix of a measured process's line that holds its JSON."""


class Phases:
    """Seconds by phase since a moment on the wall clock, and the kernels compiled in each."""

    def __init__(self, started_at: float) -> None:
        self._last_s = started_at
        self._started_s = started_at
        self._current = "interpreter"
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.compiled: Counter[str] = Counter()
        self.from_cache: Counter[str] = Counter()
        self.compile_seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, phase: str, fraction: float | None = None) -> None:
        """End the current phase and begin this one; also serves as an engine's progress callback."""
        now = time.time()
        self.seconds[self._current] += now - self._last_s
        self._current, self._last_s = phase, now

    def on_compilation(self, *, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Record a kernel that was compiled or read from the cache; called by Triton."""
        (self.from_cache if cache_hit else self.compiled)[self._current] += 1
        self.compile_seconds[self._current] += times.total / 1e6

    def as_json(self) -> dict[str, Any]:
        return {
            "phases": [
                {
                    "phase": phase,
                    "seconds": round(seconds, 2),
                    "kernels_compiled": self.compiled[phase],
                    "kernels_from_cache": self.from_cache[phase],
                    "compile_s": round(self.compile_seconds[phase], 2),
                }
                for phase, seconds in self.seconds.items()
            ],
            "total_s": round(time.time() - self._started_s, 2),
        }


def measure_engine(model: Path, adapters: Path, device: str, started_at: float) -> dict[str, Any]:
    """Measure from the start of this process until the engine has nothing left to prepare."""
    phases = Phases(started_at)
    if device == "cuda":  # as an engine process does (`loraplex.engine.start`)
        begin_beside_imports()
    phases.begin("import torch")
    import torch

    phases.begin("start CUDA")
    if device == "cuda":
        torch.zeros(1, device=device)
        from triton import knobs

        knobs.compilation.listener = phases.on_compilation
    phases.begin("import the engine")
    from loraplex.adapters.peft_reader import read_adapters
    from loraplex.adapters.spec import AdapterSpec
    from loraplex.bench.engine_scenarios import bring_in
    from loraplex.engine.build import build_core
    from loraplex.engine.options import EngineOptions
    from loraplex.model.config import load_config

    phases.begin("begin to build")
    engine = build_core(EngineOptions(model=str(model), device=device), phases.begin)
    shape = load_config(model).shape
    phases.begin("add adapters")
    versions = []
    for spec in read_adapters(sorted(adapters.iterdir()), shape):
        assert isinstance(spec, AdapterSpec), spec
        engine.add_adapter(spec)
        versions.append(spec.version)
    free_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    num_required = engine.num_required
    phases.begin("capturing graphs")
    engine.get_ready()
    ready = phases.as_json()
    phases.begin("first token")
    bring_in(engine, versions[:1], shape.vocab_size)
    phases.begin("when idle")
    num_prepared = 0
    while engine.prepare():
        num_prepared += 1
    if device == "cuda":
        torch.cuda.synchronize()
        free_bytes -= torch.cuda.mem_get_info()[0]
    phases.begin("end")
    engine.close()
    return phases.as_json() | {
        "ready_s": ready["total_s"],
        "graphs_required": num_required,
        "prepared_when_idle": num_prepared,
        "graphs_gb": round(free_bytes / 1e9, 2),
    }


def measure_server(model: Path, adapters: Path, device: str, cache: Path) -> dict[str, Any]:
    """Measure until `loraplex serve` is ready; `live` is the status of its liveness route then."""
    args = (
        sys.executable, "-m", "loraplex.cli.main", "serve", "--model", str(model),
        "--adapters", str(adapters), "--device", device, "--port", "{port}",
        "--state-dir", str(cache / "state"),
    )  # fmt: skip
    log = cache / "server.log"
    command = ServerCommand(args=args, env=_cache_env(cache), health_path="/health")
    with running(command, log_path=log) as server:
        live = _get(f"{server.base_url}/health/live")
    said = next(line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("loaded "))
    return {"ready_s": round(server.start_s, 2), "live": live, "said": said.split(" in ")[-1]}


def _get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def measure_starts(
    folder: Path, device: str, kinds: Sequence[str] = KINDS, num_starts: int = 2
) -> dict[str, Any]:
    """Measure consecutive starts over one cache folder that is empty at first."""
    found: dict[str, Any] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            cache = Path(directory)
            starts = found[kind] = []
            for index in range(num_starts):
                if kind == "engine":
                    starts.append(_in_new_process(folder, device, cache))
                else:
                    starts.append(measure_server(folder / "base", folder / "adapters", device, cache))
                starts[-1] = {"cache": "warm" if index else "empty"} | starts[-1]
                print(kind, json.dumps(starts[-1], indent=1), flush=True)
    return found


def _in_new_process(folder: Path, device: str, cache: Path) -> dict[str, Any]:
    args = [sys.executable, "-m", "benchmarks.gpu_start", "--folder", str(folder), "--device", device]
    result = subprocess.run(
        [*args, "--started-at", repr(time.time())],
        env={**os.environ, **_cache_env(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith(_RESULT))
    measured: dict[str, Any] = json.loads(line.removeprefix(_RESULT))
    return measured


def _cache_env(cache: Path) -> dict[str, str]:
    return {"LORAPLEX_CACHE": str(cache / "loraplex"), "TRITON_CACHE_DIR": str(cache / "triton")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or is written")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="engine, server; default: both")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: tries the script")
    parser.add_argument("--out", type=Path, help="default: results/gpu_start.json, nothing if --tiny")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no {', '.join(sorted(unknown))}; choose of {', '.join(KINDS)}")
    if args.started_at is not None:
        base, adapters = args.folder / "base", args.folder / "adapters"
        print(_RESULT + json.dumps(measure_engine(base, adapters, args.device, args.started_at)), flush=True)
        return
    # Not at the top: a measured process imports torch in a phase of its own.
    import torch

    from benchmarks import sources
    from benchmarks.http_checkpoint import HttpCheckpoint
    from loraplex.bench.environment import ENGINE_PACKAGES, environment

    if not args.tiny and not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; give --tiny to try the script on a CPU")
    device, shape = ("cpu", "tiny") if args.tiny else ("cuda", SHAPE)
    HttpCheckpoint(root=args.folder, shape=shape, num_adapters=NUM_ADAPTERS, rank=RANK).ensure()
    document = environment(ENGINE_PACKAGES) | {"sources": sources.fingerprints(FILE)}
    document |= {"shape": shape, "adapters": NUM_ADAPTERS, "rank": RANK}
    document |= measure_starts(args.folder, device, args.kinds or KINDS)
    out = args.out or (None if args.tiny else RESULTS / FILE)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
