"""The planner's numbers: surrogates on recorded runs, times to plan, plans that hold, and GPUs they take.

    python -m benchmarks.planner --data FOLDER                 all sections, hours without cached datasets
    python -m benchmarks.planner plan_speed own                these; the others keep their figures

Writes results/planner.json.

surrogates  throughput and starvation on recorded runs of vLLM that no profile was fitted to; time to train
rows        the same for ever more rows to train on
rules       the same for one tree of at most 32 rules; nanoseconds of a prediction
plan_speed  seconds to plan 1,280 adapters on four GPUs, by the accurate surrogate and by the small tree
scenarios   the paper's scenarios with Llama: GPUs by packer, and whether the plan starves any by other seeds
scenarios_qwen   the same with Qwen
recorded    single GPUs with the settings of recorded runs: whether they are predicted to serve what is asked
own         10,000 adapters on GPUs with our own engine: GPUs against a lower bound, checked by the twin

`--data` is the folder with the recorded runs of the authors of the digital twin (agullo_*.csv.gz), which
`surrogates`, `rows`, `rules` and `recorded` need.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.planner_data import MODELS, NUM_ROWS, Asked
from benchmarks.planner_packing import in_scenarios, own, plan_speed
from benchmarks.planner_surrogates import recorded, rows, rules, surrogates
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.errors import UserError
from loraplex.core.whole_file import write_whole

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "planner.json"

SECTIONS: Final[dict[str, Callable[[Asked], dict[str, Any]]]] = {
    "surrogates": surrogates,
    "rows": rows,
    "rules": rules,
    "plan_speed": plan_speed,
    "recorded": recorded,
    "scenarios": partial(in_scenarios, MODELS[0]),
    "scenarios_qwen": partial(in_scenarios, MODELS[1]),
    "own": own,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/measurements"))
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help="simulated runs to train surrogates on")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that simulate plans")
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    for name in args.sections:
        # Taken first: the code may be edited while this runs.
        here = {
            **environment(("loraplex", "numpy", "numba", "scikit-learn")),
            "sources": fingerprints(FILE, name),
            "num_rows": args.rows,
        }
        try:
            found = SECTIONS[name](Asked(args.data, args.rows, args.workers))
        except UserError as error:
            sys.exit(f"{name}: {error}")
        result = json.loads(args.out.read_text()) if args.out.is_file() else {}
        result[name] = {**here, **found}
        write_whole(args.out, json.dumps(result, indent=1) + "\n")
        print(f"{name} is done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
