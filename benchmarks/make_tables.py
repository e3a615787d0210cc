"""Fill the tables of the docs from the committed results, so that no published number is typed by hand.

    python -m benchmarks.make_tables            rewrite the documents that have tables in place
    python -m benchmarks.make_tables --check    exit 1 if a table is not what the results say (`make test`)

A document marks the place of a table with a pair of markers; what is between them is replaced:

    <!-- table:cpu-serve -->
    <!-- /table:cpu-serve -->

Results carry fingerprints of the code they were measured on (`benchmarks.sources`). A correctness result that
is older than its code is not shown as passed. Speed results are shown with their commit, and the changes
since then are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from benchmarks import (
    batching_tables,
    cold_tables,
    cost_tables,
    cpu_tables,
    fairness_tables,
    fleet_tables,
    gpu_batching_tables,
    gpu_tables,
    http_tables,
    live_tables,
    load_tables,
    planner_tables,
    policy_tables,
    set_tables,
    slow_bus_tables,
    sources,
    step_tables,
    structured_tables,
    twin_tables,
)
from benchmarks.markdown import Result, TableError

RESULTS: Final = Path(__file__).parent / "results"
DOCUMENTS: Final = (
    Path("docs/benchmarks.md"),
    Path("docs/batching.md"),
    Path("docs/cold-start.md"),
    Path("docs/twin.md"),
    Path("docs/fairness.md"),
    Path("docs/fleet.md"),
    Path("docs/planner.md"),
    Path("README.md"),
)
_BLOCK: Final = re.compile(
    r"<!-- table:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- /table:(?P=name) -->",
    re.DOTALL,
)
SERVE, KERNELS, GPU = "cpu_serve.json", "cpu_kernels.json", "gpu_engine.json"
SERVE_05B, TUNING_05B = "cpu_serve_05b.json", "peer_tuning_05b.json"
CORRECTNESS, COLD, ASSIST = "gpu_correctness.json", "gpu_cold.json", "assist.json"
TWIN, HTTP = "twin_validation.json", "http_compare.json"
START: Final = "gpu_start.json"
QUEUE, SHARED, HOLDUPS = "waiting_queue.json", "shared_cpu.json", "holdups.json"
QUICK_PROFILE: Final = "quick_profile.json"
OVERLOAD, OVERLOAD_TENANTS, OVERLOAD_FLEET = (
    f"overload{setting}.json" for setting in ("", "_tenants", "_fleet")
)
FRONT, KILLS, LIVE, VLLM = "fleet_front.json", "fleet_kills.json", "fleet_live.json", "fleet_vllm.json"
VERSIONS: Final = "fleet_versions.json"
TWIN_CUDA, TWIN_CPU = "twin_engine_cuda.json", "twin_engine_cpu.json"
FLEET: Final = "fleet.json"
POLICIES: Final = "policies.json"
PLANNER = "planner.json"
BATCHING, GPU_BATCHING = "batching.json", "gpu_batching.json"
KV_SWAP: Final = "kv_swap.json"
SLOW_BUS, TWIN_SLOW_BUS = "slow_bus.json", "twin_slow_bus.json"
STEPS: Final = "step_profile.json"
FAIRNESS, QUOTAS = "fairness.json", "quotas.json"
STRUCTURED, STRUCTURED_STEPS = "structured_libraries.json", "structured_steps.json"
STRUCTURED_GPU = "structured_gpu.json"


@dataclass(frozen=True)
class Table:
    """A table made from the contents of `files`. `if_missing` takes its place if a file is missing; None if
    that is an error."""

    files: tuple[str, ...]
    make: Callable[..., str]
    if_missing: str | None = None


TABLES: Final[dict[str, Table]] = {
    "cpu-serve": Table((SERVE,), cpu_tables.serve_table),
    "cpu-startup": Table((SERVE,), cpu_tables.startup_table),
    "cpu-runs": Table((SERVE,), cpu_tables.runs_table),
    "cpu-many-adapters": Table((SERVE,), cpu_tables.many_adapters_table),
    "cpu-bystanders": Table((SERVE,), cpu_tables.bystanders_table),
    "cpu-machine": Table((SERVE,), cpu_tables.machine_note),
    "cpu-steps": Table((KERNELS,), cpu_tables.steps_table),
    "cpu-limits": Table((KERNELS,), cpu_tables.limits_table),
    "cpu-serve-05b": Table((SERVE_05B,), cpu_tables.serve_table, if_missing="Not measured yet.\n"),
    "cpu-startup-05b": Table((SERVE_05B,), cpu_tables.startup_table, if_missing="Not measured yet.\n"),
    "cpu-runs-05b": Table((SERVE_05B,), cpu_tables.runs_table, if_missing="Not measured yet.\n"),
    "cpu-machine-05b": Table((SERVE_05B,), cpu_tables.machine_note, if_missing=""),
    "cpu-tuning-05b": Table((TUNING_05B,), cpu_tables.serve_table, if_missing="Not measured yet.\n"),
    "cpu-tuning-machine-05b": Table((TUNING_05B,), cpu_tables.machine_note, if_missing=""),
    "waiting-queue": Table((QUEUE,), load_tables.queue_table),
    "waiting-queue-machine": Table((QUEUE,), load_tables.queue_note),
    "cpu-shared": Table((SHARED,), load_tables.shared_table),
    "cpu-shared-machine": Table((SHARED,), load_tables.shared_note),
    "holdups": Table((HOLDUPS,), load_tables.holdups_table, if_missing="Not measured yet.\n"),
    "holdups-machine": Table((HOLDUPS,), load_tables.holdups_note, if_missing=""),
    "quick-profile": Table(
        (QUICK_PROFILE,), load_tables.quick_profile_note, if_missing="Not measured yet.\n"
    ),
    "overload": Table((OVERLOAD,), load_tables.overload_table, if_missing="Not measured yet.\n"),
    "overload-machine": Table((OVERLOAD,), load_tables.overload_note, if_missing=""),
    "overload-tenants": Table(
        (OVERLOAD_TENANTS,), load_tables.overload_tenants_table, if_missing="Not measured yet.\n"
    ),
    "overload-tenants-machine": Table((OVERLOAD_TENANTS,), load_tables.overload_tenants_note, if_missing=""),
    "overload-fleet": Table((OVERLOAD_FLEET,), load_tables.overload_table, if_missing="Not measured yet.\n"),
    "overload-fleet-machine": Table((OVERLOAD_FLEET,), load_tables.overload_note, if_missing=""),
    "structured-libraries": Table((STRUCTURED,), structured_tables.libraries_table),
    "structured-slowest": Table((STRUCTURED,), structured_tables.slowest_masks),
    "structured-libraries-machine": Table((STRUCTURED,), structured_tables.note),
    "structured-steps": Table((STRUCTURED_STEPS,), structured_tables.steps_table),
    "structured-gpu": Table((STRUCTURED_GPU,), structured_tables.gpu_table),
    "structured-gpu-machine": Table((STRUCTURED_GPU,), structured_tables.gpu_note),
    "structured-steps-machine": Table((STRUCTURED_STEPS,), structured_tables.note),
    "gpu-machine": Table((GPU,), gpu_tables.machine_note),
    "gpu-decode": Table((GPU,), gpu_tables.decode_table),
    "gpu-prompts": Table((GPU,), gpu_tables.prompts_table),
    "gpu-prompt-attention": Table((GPU,), gpu_tables.prompt_attention_table),
    "gpu-serve": Table((GPU,), gpu_tables.serve_table),
    "gpu-registered": Table((GPU,), gpu_tables.registered_table),
    "gpu-block-tables": Table((GPU,), gpu_tables.block_tables_table),
    "gpu-kernels": Table((GPU,), gpu_tables.kernels_table),
    "gpu-shared-kernels": Table((GPU,), gpu_tables.shared_kernels_table),
    "gpu-steps": Table((STEPS,), step_tables.profile_table),
    "gpu-steps-machine": Table((STEPS,), step_tables.profile_note),
    "gpu-decode-attention": Table((GPU,), gpu_tables.decode_attention_table),
    "gpu-attention": Table((GPU,), gpu_tables.attention_table),
    "gpu-padded": Table((GPU,), gpu_tables.padded_table),
    "gpu-cold": Table((GPU,), gpu_tables.cold_table),
    "gpu-start": Table((START,), gpu_tables.start_table, if_missing="Not measured yet.\n"),
    "gpu-start-machine": Table((START,), gpu_tables.start_note, if_missing=""),
    "gpu-correctness": Table((CORRECTNESS,), gpu_tables.correctness_table),
    "http-summary": Table((HTTP,), http_tables.summary, if_missing=""),
    "http-compare": Table((HTTP,), http_tables.compare_table, if_missing="Not measured yet.\n"),
    "http-high-rate": Table((HTTP,), http_tables.high_rate_table, if_missing="Not measured yet.\n"),
    "http-prompts": Table((HTTP,), http_tables.prompts_table, if_missing="Not measured yet.\n"),
    "http-shapes": Table((HTTP,), http_tables.shapes_table, if_missing="Not measured yet.\n"),
    "http-starts": Table((HTTP,), http_tables.starts_table, if_missing="Not measured yet.\n"),
    "http-machine": Table((HTTP,), http_tables.machine_note, if_missing=""),
    **{
        f"planner-{name}": Table((PLANNER,), make, if_missing="Not measured yet.\n")
        for name, make in {
            "surrogates": planner_tables.surrogates_table,
            "rows": planner_tables.rows_table,
            "rules": planner_tables.rules_table,
            "speed": planner_tables.speed_table,
            "recorded": planner_tables.recorded_table,
            "scenarios": planner_tables.scenarios_table,
            "summary": planner_tables.scenarios_summary,
            "own": planner_tables.own_table,
        }.items()
    },
    "planner-note": Table((PLANNER,), planner_tables.note, if_missing=""),
    "batching-note": Table((BATCHING,), batching_tables.note, if_missing=""),
    "batching-queue": Table((BATCHING,), batching_tables.queue_table, if_missing="Not measured yet.\n"),
    "batching-skew": Table((BATCHING,), batching_tables.skew_table, if_missing="Not measured yet.\n"),
    "batching-factors": Table((BATCHING,), batching_tables.factors_table, if_missing="Not measured yet.\n"),
    "batching-hot": Table((BATCHING,), batching_tables.hot_table, if_missing="Not measured yet.\n"),
    "kv-swap": Table((KV_SWAP,), batching_tables.kv_swap_table, if_missing="Not measured yet.\n"),
    "gpu-batching-note": Table((GPU_BATCHING,), gpu_batching_tables.note),
    "gpu-merge": Table((GPU_BATCHING,), gpu_batching_tables.merge_table),
    "gpu-switch": Table((GPU_BATCHING,), gpu_batching_tables.switch_table),
    "gpu-merged-steps": Table((GPU_BATCHING,), gpu_batching_tables.steps_table),
    "gpu-swap": Table((GPU_BATCHING,), gpu_batching_tables.swap_table),
    "gpu-queue-steps": Table((GPU_BATCHING,), gpu_batching_tables.queue_steps_table),
    "gpu-served": Table((GPU_BATCHING,), gpu_batching_tables.served_table),
    "cold-machine": Table((COLD,), gpu_tables.machine_note),
    "cold-idle": Table((COLD,), cold_tables.idle_table),
    "cold-large": Table((COLD,), cost_tables.large_table),
    "cold-setups": Table((COLD,), cold_tables.setups_table),
    "cold-burst": Table((COLD,), cold_tables.burst_table),
    "cold-waits": Table((COLD,), cold_tables.waits_table),
    "cold-aims": Table((COLD, ASSIST), cost_tables.aims_table),
    "cold-fits": Table((COLD,), cost_tables.fits_table),
    "cold-predictions": Table((COLD, ASSIST), cost_tables.predictions_table),
    "slow-bus": Table((SLOW_BUS,), slow_bus_tables.ttft_table),
    "slow-bus-machine": Table((SLOW_BUS,), gpu_tables.machine_note),
    "slow-bus-twin": Table((SLOW_BUS, TWIN_SLOW_BUS), slow_bus_tables.twin_table),
    "slow-bus-twin-note": Table((TWIN_SLOW_BUS,), slow_bus_tables.twin_note),
    "workers-machine": Table((ASSIST,), cold_tables.workers_note),
    "workers": Table((ASSIST,), cold_tables.workers_table),
    "twin-machine": Table((TWIN,), twin_tables.validation_note),
    "twin-speed-machine": Table((TWIN,), twin_tables.speed_note),
    "twin-validation": Table((TWIN,), twin_tables.validation_table),
    "twin-speed": Table((TWIN,), twin_tables.speed_table),
    "set-costs": Table((GPU,), set_tables.set_costs_table),
    "set-costs-machine": Table((GPU,), set_tables.set_costs_note),
    "twin-fleet": Table((TWIN,), twin_tables.fleet_table),
    "twin-fleet-machine": Table((TWIN,), twin_tables.fleet_note),
    "fleet-front": Table((FRONT,), live_tables.front_table, if_missing="Not measured yet.\n"),
    "fleet-front-machine": Table((FRONT,), live_tables.front_note, if_missing=""),
    "fleet-kills": Table((KILLS,), live_tables.kills_table, if_missing="Not measured yet.\n"),
    "fleet-kills-machine": Table((KILLS,), live_tables.kills_note, if_missing=""),
    "fleet-versions": Table((VERSIONS,), live_tables.versions_table, if_missing="Not measured yet.\n"),
    "fleet-versions-machine": Table((VERSIONS,), live_tables.versions_note, if_missing=""),
    "fleet-live": Table((LIVE,), live_tables.live_table, if_missing="Not measured yet.\n"),
    "fleet-live-machine": Table((LIVE,), live_tables.note, if_missing=""),
    "fleet-vllm": Table((VLLM,), live_tables.vllm_table, if_missing="Not measured yet.\n"),
    "fleet-vllm-machine": Table((VLLM,), live_tables.note, if_missing=""),
    "fleet-decisions": Table((FLEET,), fleet_tables.decisions_table),
    "fleet-plans": Table((FLEET,), fleet_tables.plans_table),
    "fleet-decisions-machine": Table((FLEET,), fleet_tables.decisions_note),
    "fleet-bounds": Table((FLEET,), fleet_tables.bounds_table),
    "fleet-sixty": Table((FLEET,), fleet_tables.sixty_table),
    "fleet-loraserve": Table((FLEET,), fleet_tables.loraserve_table),
    "fleet-loraserve-storage": Table((FLEET,), fleet_tables.loraserve_storage_table),
    "fleet-dlora": Table((FLEET,), fleet_tables.dlora_table),
    "fleet-policies": Table((FLEET,), fleet_tables.policies_table),
    "fleet-auto": Table((FLEET,), fleet_tables.auto_table),
    "fleet-auto-figures": Table((FLEET,), fleet_tables.auto_figures_table),
    **{
        f"fleet-{section}-note": Table((FLEET,), partial(fleet_tables.simulated_note, section=section))
        for section in ("bounds", "sixty", "loraserve", "dlora", "auto")
    },
    "twin-engine-cuda": Table((TWIN_CUDA,), twin_tables.engine_table),
    "twin-engine-cuda-machine": Table((TWIN_CUDA,), twin_tables.engine_note),
    "twin-engine-cpu": Table((TWIN_CPU,), twin_tables.engine_table),
    "twin-engine-cpu-machine": Table((TWIN_CPU,), twin_tables.engine_note),
    "twin-engine-cpu-pace": Table((TWIN_CPU,), twin_tables.pace_note),
    "policies-loads": Table((POLICIES,), policy_tables.loads_table),
    "policies-changes": Table((POLICIES,), policy_tables.changes_table),
    "policies-ranges": Table((POLICIES,), policy_tables.ranges_table),
    "policies-starts": Table((POLICIES,), policy_tables.starts_table),
    "policies-memory": Table((POLICIES,), policy_tables.memory_table),
    "policies-admission": Table((POLICIES,), policy_tables.admission_table),
    "policies-victims": Table((POLICIES,), policy_tables.victims_table),
    "policies-note": Table((POLICIES,), policy_tables.note),
    "fairness-neighbours": Table((FAIRNESS,), fairness_tables.neighbours_table),
    "fairness-fleets": Table((FAIRNESS,), fairness_tables.fleets_table),
    "fairness-overload": Table((FAIRNESS,), fairness_tables.overload_note),
    "fairness-paces": Table((FAIRNESS,), fairness_tables.paces_table),
    "fairness-recorded": Table((FAIRNESS,), fairness_tables.recorded_table),
    "fairness-quotas": Table((QUOTAS,), fairness_tables.quotas_table, if_missing="Not measured yet.\n"),
    "fairness-quotas-machine": Table((QUOTAS,), fairness_tables.quotas_note, if_missing=""),
    "twin-profiles": Table((TWIN_CUDA, TWIN_CPU), twin_tables.profiles_table),
}
"""Every table by its name. A new result file also needs a line in `benchmarks.sources`."""


def fill(text: str, results: Path) -> str:
    """Return the document with the inside of every marked block made anew."""
    opened = re.findall(r"<!-- table:([\w-]+) -->", text)
    if not opened:
        raise TableError("no <!-- table:NAME --> marker in it")
    if unknown := [name for name in opened if name not in TABLES]:
        raise TableError(f"no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    if len(_BLOCK.findall(text)) != len(opened):
        raise TableError("a <!-- table:NAME --> marker has no <!-- /table:NAME --> after it")
    return _BLOCK.sub(
        lambda block: (
            f"<!-- table:{block['name']} -->\n{_make(block['name'], results)}<!-- /table:{block['name']} -->"
        ),
        text,
    )


def _make(name: str, results: Path) -> str:
    wanted = TABLES[name]
    found: list[Result] = []
    for file in wanted.files:
        try:
            found.append(_read(results / file))
        except OSError as error:
            if wanted.if_missing is not None:
                return wanted.if_missing
            raise TableError(f"table {name!r} needs {file}: {error}") from error
    return wanted.make(*found)


@cache
def _read(path: Path) -> Result:
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    return found


def outdated(results: Path) -> Iterator[str]:
    """Yield a note for each result that is older than its code, with the changes since it was measured."""
    for file in dict.fromkeys(file for each in TABLES.values() for file in each.files):
        if not (results / file).is_file():
            continue
        sections_by_age: dict[str, list[str]] = {}
        for section, measured in sources.sections(_read(results / file)):
            changed = sources.changed_since(measured, file, section)
            name = f"{'all' if section == '*' else section} at {measured['git_commit'] or 'unknown'}"
            if changed is None:
                sections_by_age.setdefault("no record of the code they ran", []).append(name)
            elif changed:
                sections_by_age.setdefault(f"since then, {', '.join(changed)} changed", []).append(name)
        for age, names in sections_by_age.items():
            yield f"{file} ({', '.join(names)}): {age}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if anything would change"
    )
    args = parser.parse_args()
    stale = []
    for document in args.documents:
        before = document.read_text(encoding="utf-8")
        try:
            after = fill(before, args.results)
        except TableError as error:
            sys.exit(f"{document}: {error}")
        if after != before:
            stale.append(str(document))
            if not args.check:
                document.write_text(after, encoding="utf-8")
    for line in outdated(args.results):
        print(f"note: {line}")
    if args.check and stale:
        sys.exit(
            f"out of date: {', '.join(stale)}; run python -m benchmarks.make_tables and commit the result"
        )
    print("tables are up to date" if args.check else f"rewritten: {', '.join(stale) or 'nothing'}")


if __name__ == "__main__":
    main()
