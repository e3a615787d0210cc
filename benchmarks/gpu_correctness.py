"""Check what a GPU computes: kernels, families, adapters, batches, long runs, bursts, merged weights,
swapped keys and values.

    python -m benchmarks.gpu_correctness                  # every section, six minutes on an H200
    python -m benchmarks.gpu_correctness kernels batch    # some of them

Writes results/gpu_correctness.json: for each section its environment, and for each check what was compared
with what, the worst error, the tolerance, and the verdict; sections that are not named keep their results.
The exit status is 1 if a check failed. Each section runs in its own process. `--tiny` runs everything at
sizes that a CPU can take, kernels interpreted: that tests the checks, and writes nothing without `--out`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import sources
from loraplex.core.whole_file import write_whole

if TYPE_CHECKING:
    from benchmarks.correctness.check import Check, Setting

RESULTS: Final = Path(__file__).parent / "results"
SECTIONS: Final = (
    "kernels", "families", "adapters", "batch", "graphs", "endurance", "burst", "cold", "bad_adapter",
    "collective", "merging", "swapping",
)  # fmt: skip
PACKAGES: Final = ("loraplex", "torch", "triton", "transformers", "peft", "numpy")


def run_section(name: str, *, tiny: bool) -> dict[str, Any]:
    """Return a section's findings, in the form of the results file."""
    import torch

    from benchmarks.correctness.check import Setting, holds
    from loraplex.bench.environment import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert tiny or device == "cuda", "full sizes need a GPU"
    code = sources.fingerprints("gpu_correctness.json", name)
    started = time.perf_counter()
    section: Callable[[Setting], list[Check]] = getattr(
        importlib.import_module(f"benchmarks.correctness.{name}"), name
    )
    try:
        checks = section(Setting(device=device, tiny=tiny))
    except Exception as error:
        # A section that breaks off has failed, and the others still run.
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        checks = [holds("the section itself", "runs to its end", False, error=reason[:2000])]
    return environment(PACKAGES) | {
        "sources": code,
        "sizes": "tiny" if tiny else "full",
        "device": device,
        "seconds": round(time.perf_counter() - started, 1),
        "passed": all(check.passed for check in checks),
        "checks": [check.as_json() for check in checks],
    }


def in_process(name: str, *, tiny: bool) -> dict[str, Any]:
    """Run a section in its own process, so that it shares no memory or compiled kernels with others."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(run_section, name, tiny=tiny).result()


def show(name: str, found: dict[str, Any]) -> None:
    failed = [check for check in found["checks"] if not check["passed"]]
    num_passed = len(found["checks"]) - len(failed)
    print(f"{name}: {num_passed} of {len(found['checks'])} checks passed, {found['seconds']} s", flush=True)
    for check in failed:
        print(f"  FAILED {json.dumps(check)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: tests the checks themselves")
    parser.add_argument("--out", type=Path, help="default: results/gpu_correctness.json, nothing if --tiny")
    args = parser.parse_args(argv)
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if find_spec("triton") is None:
        parser.error("Triton is not installed here: pip install triton, or the project with its extra [dev]")
    if not _has_gpu():
        if not args.tiny:
            parser.error("there is no CUDA device here; give --tiny to try the checks on the CPU")
        # Without a device kernels are interpreted, which must be set before triton is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    out = args.out or (None if args.tiny else RESULTS / "gpu_correctness.json")
    document = json.loads(out.read_text()) if out is not None and out.is_file() else {}
    passed = True
    for name in args.sections or SECTIONS:
        found = document[name] = in_process(name, tiny=args.tiny)
        show(name, found)
        passed = passed and found["passed"]
        if out is not None:
            write_whole(out, json.dumps(document, indent=1) + "\n")
    return 0 if passed else 1


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
