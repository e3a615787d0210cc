"""Compare servers over HTTP on one GPU, one at a time, with the same load and client (`vllm bench serve`).

    python -m benchmarks.http_compare loraplex vllm vllm-lora starts --vllm-site FOLDER --work-dir /dev/shm/h

Sections:  loraplex   our server
           vllm       vLLM without LoRA: the base model only
           vllm-lora  vLLM with LoRA, set to what this load needs
           starts     loraplex from empty and from used caches, and its first three runs after each

Loads:     steady, saturated             20 requests/s, and 256 at a time; with 0, 1, 8, 32, 100 adapters
           high-rate                     60 requests/s; base model and 100 adapters
           prompt-2048, -3800, -8000     prompts of so many tokens, one at a time; base model, 100 adapters

`benchmarks.http_plan` says which server has which loads. Each run is printed and written to the result file
when it ends. Runs are added to those that the file already holds of the same code and settings; `--missing`
skips those that it holds and `--loads` runs only some, so that a comparison can be made in several calls.
`--seconds` stops in time if a command may only take so long. Models of another shape have their own sections:

    python -m benchmarks.http_compare loraplex vllm vllm-lora --shape llama-3-8b --adapters 0,100 \
        --loads saturated,prompt-2048,prompt-3800,prompt-8000 --vllm-site FOLDER --work-dir /dev/shm/h
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from benchmarks import sources
from benchmarks.http_checkpoint import HttpCheckpoint
from benchmarks.http_client import BenchClient, ClientFailedError, Load
from benchmarks.http_plan import (
    DEFAULT_SHAPE,
    HIGH_RATE,
    SATURATED,
    STEADY,
    Plan,
    choose,
    prompt_load,
    section_of,
)
from benchmarks.http_servers import Servers, shown_command
from benchmarks.http_tables import LABELS
from benchmarks.servers import RunningServer, ServerFailedError, running
from loraplex import __version__
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole

FILE: Final = "http_compare.json"
RESULTS: Final = Path(__file__).parent / "results"
SECTIONS: Final = (*LABELS, "starts")
CACHES: Final = ("empty", "used")
PACKAGES: Final = ("loraplex", "torch", "triton", "transformers", "vllm")
_STARTS_RUNS: Final = 3
_WARMUP_REQUESTS: Final = 100
_START_S, _RUN_S = 180.0, 60.0
"""Seconds that a start and a run may take; `--seconds` starts none with less time left."""


class OutOfTimeError(Exception):
    """`--seconds` leaves no time for the next step."""


class ResultFile:
    """The result file, rewritten after every run. `here`: the environment of all measurements."""

    def __init__(self, path: Path, here: dict[str, Any]) -> None:
        self._path = path
        self._here = here
        self._document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def open_section(self, name: str) -> dict[str, Any]:
        """Return the section to add to: the one in the file if it has the same code and settings."""
        here = self._here | {"sources": sources.fingerprints(FILE, name)}
        found: dict[str, Any] | None = self._document.get(name)
        same = ("sources", "versions", "parameters", "machine")
        if found is None or any(found.get(key) != here.get(key) for key in same):
            found = {**here, "start_s": [], "runs": []}
            self._document[name] = found
        return found

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, json.dumps(self._document, indent=1) + "\n")


@dataclass(kw_only=True)
class Comparison:
    """Runs sections. `deadline_s`: time on `time.monotonic` by which the command must have ended."""

    servers: Servers
    client: BenchClient
    plan: Plan
    shape: str = DEFAULT_SHAPE
    result: ResultFile
    work_dir: Path
    only_missing: bool
    deadline_s: float

    def run_section(self, name: str) -> None:
        section = self.result.open_section(section_of(name, self.shape))
        if name == "starts":
            self._starts(section)
        else:
            self._sweep(name, section)

    def _sweep(self, name: str, section: dict[str, Any]) -> None:
        """Load one server with everything that the plan has for it."""
        cells = [
            (adapters, load)
            for adapters, load in self.plan.cells(name)
            if not (self.only_missing and _runs_of(section, adapters, load.name))
        ]
        if not cells:
            print(f"{name}: nothing is missing", flush=True)
            return
        command = self.servers.command(name)
        section["command"] = shown_command(command)
        self._check_time(_START_S)
        with running(command, log_path=self.work_dir / f"{name}.log", timeout_s=_START_S * 2) as server:
            self._started(name, section, server)
            steady = self.plan.load(STEADY)
            most = max(adapters for adapters, _ in cells)
            warmup = Load(name="warm-up", num_requests=_WARMUP_REQUESTS, requests_per_s=steady.requests_per_s)
            self._measure(name, server, warmup, most, repeat=len(section["start_s"]))
            for adapters, load in cells:
                repeat = len(_runs_of(section, adapters, load.name))
                section["runs"].append(self._measure(name, server, load, adapters, repeat=repeat))
                self.result.save()

    def _starts(self, section: dict[str, Any]) -> None:
        """Start loraplex with empty caches, then with those left by that start; three runs after each."""
        if self.only_missing and len(section["runs"]) == len(CACHES) * _STARTS_RUNS:
            print("starts: nothing is missing", flush=True)
            return
        home, load = self.work_dir / "home", self.plan.load(STEADY)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        section["start_s"], section["runs"] = [], []
        for caches in CACHES:
            self._check_time(_START_S)
            command = self.servers.command("loraplex", home=home)
            with running(command, log_path=self.work_dir / f"starts-{caches}.log") as server:
                self._started(f"starts, {caches} caches", section, server)
                for place in range(1, _STARTS_RUNS + 1):
                    what, repeat = f"starts, {caches} caches, run {place}", f"{caches} {place}"
                    run = self._measure(what, server, load, max(self.plan.adapters), repeat=repeat)
                    section["runs"].append(run | {"caches": caches, "place": place})
                    self.result.save()

    def _started(self, what: str, section: dict[str, Any], server: RunningServer) -> None:
        section["start_s"].append(round(server.start_s, 1))
        self.result.save()
        print(f"{what}: healthy after {server.start_s:.1f} s", flush=True)

    def _measure(
        self, what: str, server: RunningServer, load: Load, num_adapters: int, *, repeat: int | str
    ) -> dict[str, Any]:
        self._check_time(_RUN_S)
        # Equal for every server and new for every run of it: no prefix cache hits.
        seed = zlib.crc32(f"{load.name} {num_adapters} {repeat}".encode())
        names = self.servers.checkpoint.adapter_names[:num_adapters]
        found = self.client.run(server.base_url, load, names, seed=seed)
        print(f"{what}: {num_adapters} adapters, {load.name}: {_brief(found)}", flush=True)
        return {"adapters": num_adapters, "load": load.name, "seed": seed, **found}

    def _check_time(self, needed_s: float) -> None:
        if time.monotonic() + needed_s > self.deadline_s:
            raise OutOfTimeError


def _here() -> dict[str, Any]:
    import torch  # noqa: F401 -- environment() names the GPU only where torch is in use

    return environment(PACKAGES)


def _in_process(function: Callable[[], Any]) -> Any:
    """Call it in a separate process: this one must take no GPU memory from the servers."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function)


def _runs_of(section: dict[str, Any], adapters: int, load: str) -> list[dict[str, Any]]:
    return [run for run in section["runs"] if (run["adapters"], run["load"]) == (adapters, load)]


def _brief(found: dict[str, Any]) -> str:
    failed = f", {found['failed']} FAILED" if found["failed"] else ""
    return (
        f"{found['output_tokens_per_s']:,.0f} tok/s, TTFT mean {found['ttft_ms_mean']:.1f} ms, p95 "
        f"{found['ttft_ms_p95']:.1f} ms, TPOT {found['tpot_ms_mean']:.2f} ms, ITL p99 "
        f"{found['itl_ms_p99']:.1f} ms, E2E {found['e2e_ms_mean']:.0f} ms{failed}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    work_dir: Path = args.work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        adapters=args.adapters,
        num_adapters=args.num_adapters,
        loads=_loads(args),
        selected=args.loads,
    )
    checkpoint = HttpCheckpoint(
        root=work_dir / "checkpoint", shape=args.shape, num_adapters=args.num_adapters, rank=args.rank
    )
    started_s = time.monotonic()
    _in_process(checkpoint.ensure)
    servers = Servers(
        checkpoint=checkpoint,
        state_dir=work_dir / "state",
        device=args.device,
        dtype=args.dtype,
        vllm_python=args.vllm_python,
        vllm_site=args.vllm_site,
    )
    parameters = {
        "shape": args.shape,
        "dtype": args.dtype,
        "adapters_served": args.num_adapters,
        "rank": args.rank,
        "loads": {load.name: asdict(load) for load in plan.loads},
    }
    here = {
        **_in_process(_here),
        "versions": {"loraplex": __version__, "vllm": _vllm_version(servers)},
        "parameters": parameters,
    }
    with BenchClient(
        python=servers.vllm_python,
        tokenizer=checkpoint.base,
        scratch=work_dir,
        env=servers.vllm_env,
    ) as client:
        comparison = Comparison(
            servers=servers,
            client=client,
            plan=plan,
            shape=args.shape,
            result=ResultFile(args.out, here),
            work_dir=work_dir,
            only_missing=args.missing,
            deadline_s=started_s + (args.seconds or float("inf")),
        )
        return _run(comparison, args.sections)


def _run(comparison: Comparison, sections: Sequence[str]) -> int:
    try:
        for name in sections:
            comparison.run_section(name)
    except OutOfTimeError:
        print("stopped: --seconds leaves too little time for the next step; go on with --missing")
    except (ServerFailedError, ClientFailedError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def _vllm_version(servers: Servers) -> str:
    """Return the version of the vLLM that is both client and peer."""
    done = subprocess.run(
        [servers.vllm_python, "-c", "from importlib.metadata import version; print(version('vllm'))"],
        env={**os.environ, **servers.vllm_env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"vLLM is not installed here:\n{done.stderr[-2000:]}\nGive the folder that holds it and its "
            "dependencies with --vllm-site, or the Python that has it with --vllm-python"
        )
    return done.stdout.strip()


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    return (
        Load(name=STEADY, num_requests=args.steady_requests, requests_per_s=args.rate),
        Load(name=HIGH_RATE, num_requests=args.high_rate_requests, requests_per_s=args.high_rate),
        Load(name=SATURATED, num_requests=args.saturated_requests, concurrency=args.concurrency),
        *(prompt_load(tokens, args.prompt_requests) for tokens in args.prompt_tokens),
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    parser.add_argument("--work-dir", type=Path, default=Path("build/http"), help="checkpoint, logs")
    parser.add_argument("--vllm-site", type=Path, default=os.environ.get("VLLM_SITE"))
    parser.add_argument("--vllm-python", default=sys.executable, help="of vLLM's environment, if not this")
    parser.add_argument("--missing", action="store_true", help="only runs that the result file lacks")
    parser.add_argument("--seconds", type=float, help="stop before this command takes longer")
    parser.add_argument("--adapters", type=_numbers, default=(0, 1, 8, 32, 100), help="0,1,8,32,100")
    parser.add_argument("--loads", type=_words, help="names of loads, separated by commas (all)")
    parser.add_argument("--num-adapters", type=int, default=100, help="adapters that servers know (100)")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s of the steady load (20)")
    parser.add_argument("--steady-requests", type=int, default=300)
    parser.add_argument("--high-rate", type=float, default=60.0, help="requests/s of that load (60)")
    parser.add_argument("--high-rate-requests", type=int, default=900)
    parser.add_argument("--concurrency", type=int, default=256, help="of the saturated load (256)")
    parser.add_argument("--saturated-requests", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=_numbers, default=(2048, 3800, 8000), help="2048,3800,8000")
    parser.add_argument("--prompt-requests", type=int, default=16, help="prompts of each length (16)")
    parser.add_argument("--shape", default=DEFAULT_SHAPE)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    if max(args.adapters) > args.num_adapters:
        parser.error("--adapters asks for more than --num-adapters")
    try:
        args.loads = choose(args.loads, _loads(args))
    except ValueError as error:
        parser.error(str(error))
    if args.vllm_site is not None:
        args.vllm_site = Path(args.vllm_site).resolve()
    return args


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _raise_exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # Otherwise SIGTERM would leave the running server behind.
    signal.signal(signal.SIGTERM, _raise_exit)
    sys.exit(main())
