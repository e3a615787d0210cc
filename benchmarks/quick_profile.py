"""Measure how long `loraplex profile --quick` takes, and how closely its profile fits.

    python -m benchmarks.quick_profile            # two or three minutes on a quiet machine

The command runs as a process, from its start to its end, for the model of `make demo` (which is fetched if it
is not there). Its kernels are compiled already if the demo has run here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.sources import fingerprints
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.core.whole_file import write_whole
from loraplex.demo.base import ensure_demo_base
from loraplex.perf.profile_json import read_profile

FILE: Final = "quick_profile.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE


def measured(program: str, model: Path) -> dict[str, Any]:
    """Return the command's duration, and how closely the profile fits steps that were not fitted."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        profile = Path(scratch) / "profile.json"
        begun_s = time.perf_counter()
        subprocess.run(
            [program, "profile", "--model", str(model), "--device", "cpu", "--quick", "--json", str(profile)],
            check=True,
        )
        duration_s = time.perf_counter() - begun_s
        found = read_profile(profile)
    assert found.held_out is not None
    return {
        "model": model.name,
        "duration_s": round(duration_s, 1),
        "decode": asdict(found.held_out.decode),
        "prefill": asdict(found.held_out.prefill),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--loraplex", help="the loraplex program (default: beside this Python)")
    args = parser.parse_args(argv)
    program = args.loraplex or str(Path(sys.executable).with_name("loraplex"))
    results = measured(program, ensure_demo_base())
    document = environment(ENGINE_PACKAGES) | {"sources": fingerprints(FILE), "results": results}
    write_whole(args.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
