"""Fill the tables of the docs from the committed results, so that no published number is typed by hand.

    python -m benchmarks.make_tables            rewrite the documents that have tables in place
    python -m benchmarks.make_tables --check    exit 1 if a table is not what the results say

A document says where a table goes with a pair of markers; what is between them is replaced:

    <!-- table:cpu-serve -->
    <!-- /table:cpu-serve -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import cold_tables, cost_tables, gpu_tables, twin_tables
from benchmarks.markdown import Result, TableError, table

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = (
    Path("docs/benchmarks.md"),
    Path("docs/cold-start.md"),
    Path("docs/twin.md"),
    Path("README.md"),
)
_BLOCK = re.compile(
    r"<!-- table:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- /table:(?P=name) -->",
    re.DOTALL,
)


def serve_table(result: Result) -> str:
    rows = {(row["engine"], row["traffic"]): row for row in _suite(result, "serve")}
    lines = []
    for engine in dict.fromkeys(name for name, _ in rows):
        base, adapters = rows.get((engine, "base")), rows.get((engine, "adapters"))
        row = base or adapters
        assert row is not None
        lines.append(
            (f"{row['label']} {row['version']}", _figures(base), _figures(adapters), _cost(base, adapters))
        )
    adapters_heading = f"{result['parameters']['adapters']} adapters, round-robin"
    return table(("engine", "base model only", adapters_heading, "cost of the adapters"), lines)


def startup_table(result: Result) -> str:
    seen = {row["engine"]: row for row in _suite(result, "serve")}
    lines = [(row["label"], f"{min(row['start_s']):.1f} s", f"`{_command(row)}`") for row in seen.values()]
    return table(("engine", "start-up (best)", "command"), lines)


def runs_table(result: Result) -> str:
    """Every repeat, so that a reader sees the noise the medians hide."""
    lines = [
        (
            row["label"],
            row["traffic"],
            ", ".join(f"{run['output_tokens_per_s']:.0f}" for run in row["runs"]),
            ", ".join(_ms(run["ttft_ms"]) for run in row["runs"]),
            ", ".join(_ms(run["tpot_ms"]) for run in row["runs"]),
        )
        for row in _suite(result, "serve")
    ]
    return table(("engine", "traffic", "output tok/s, each run", "mean TTFT ms", "mean TPOT ms"), lines)


def many_adapters_table(result: Result) -> str:
    suite = _suite(result, "many-adapters")
    registration = suite["registration"]
    took = (
        f"{registration['seconds']:.1f} s" if registration else f"{suite['start_s']:.1f} s with the start-up"
    )
    lines = [
        ("16 adapters, all in memory", _figures(suite["all_in_memory"])),
        (
            f"{suite['adapters_on_disk']:,} adapters in turn, memory for {suite['adapters_that_fit']}",
            _figures(suite["in_turn"]),
        ),
        (f"registering {suite['adapters_on_disk']:,} adapters", took),
    ]
    return table(("loraplex", "measured"), lines)


def bystanders_table(result: Result) -> str:
    suite = _suite(result, "bystanders")
    crowd = f"among {suite['idle_clients']} idle clients and {suite['slow_readers']} slow readers"
    lines = [
        (name, _figures(row), f"{row['median']['itl_ms.p99']:,.0f} ms")
        for name, row in (("alone", suite["alone"]), (crowd, suite["among_bystanders"]))
    ]
    return table(("loraplex, 16 adapters", "measured", "ITL p99"), lines)


def machine_note(result: Result) -> str:
    machine, traffic = result["machine"], result["parameters"]["traffic"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']} ({machine['os']}), "
        f"Python {result['python']}, torch {result['packages'].get('torch', '?')}, "
        f"commit {result['git_commit'] or 'unknown'}. Model: {result['parameters']['model'].split(' (')[0]}. "
        f"{traffic['num_requests']} requests of {traffic['prompt_tokens']} prompt and "
        f"{traffic['output_tokens']} output tokens, closed loop of {traffic['concurrency']}; "
        f"medians of {result['parameters']['repeats']} interleaved runs.\n"
    )


def steps_table(result: Result) -> str:
    """Where a step's time goes, without adapters and with 16 of them."""
    steps = result["steps"]
    lines = []
    for kind, title in (("prefill", "prefill, 16 x 64 tokens"), ("decode", "decode, 16 rows")):
        base, adapters = steps[kind]["base"], steps[kind]["adapters"]
        lines.append((f"**{title}**", f"**{base['total_ms']:.1f}**", f"**{adapters['total_ms']:.1f}**"))
        lines += [
            (part.replace("_", " "), f"{base['parts_ms'][part]:.1f}", f"{adapters['parts_ms'][part]:.1f}")
            for part in ("linears", "attention", "add_lora")
        ]
    return table(("step", "base, ms", "16 adapters, ms"), lines)


def limits_table(result: Result) -> str:
    """The bytes a decode step must read, over the bandwidth they can be read at."""
    dram = result["read_gb_per_s"]["1000 MB"]
    weights, adapters = result["weights_mb"], result["steps"]["adapter_mb"]
    measured = result["steps"]["decode"]
    lora_ms = measured["adapters"]["parts_ms"]["add_lora"]
    lines = [
        ("reading from the last cache / from DRAM", f"{result['read_gb_per_s']['50 MB']} / {dram} GB/s"),
        ("base weights, read once a step", f"{weights} MB, {weights / dram:.1f} ms from DRAM"),
        ("weights of 16 adapters, read once a step", f"{adapters} MB, {adapters / dram:.1f} ms from DRAM"),
        ("LoRA in a decode step, measured", f"{lora_ms:.1f} ms, {adapters / lora_ms:.1f} GB/s"),
        ("bytes with adapters over bytes without", f"{(weights + adapters) / weights:.2f}x"),
        (
            "decode step with adapters over without, measured",
            f"{measured['adapters']['total_ms'] / measured['base']['total_ms']:.2f}x",
        ),
        ("launching one compiled kernel", f"{result['launch_us']} µs"),
        (
            "all linears on 16 rows: `F.linear` / packed once",
            " / ".join(f"{ms}" for ms in result["linears_ms"]["16 rows"].values()) + " ms",
        ),
    ]
    return table(("what", "measured"), lines)


def shared_table(result: Result) -> str:
    """Engines alone and beside a busy program on each core."""
    cores = result["machine"]["cores"]
    titles = {"alone": "alone", "one_busy_program_per_core": f"beside {cores} busy programs on {cores} cores"}
    kinds = ("all threads", "one thread", "automatic")
    lines = [
        (
            title,
            *(f"{result[name]['tokens_per_s'][kind]:,.1f}" for kind in kinds),
            f"{result[name]['automatic_over_all_threads']:.2f}x",
            f"{result[name]['automatic_over_one_thread']:.2f}x",
        )
        for name, title in titles.items()
    ]
    heads = (*(f"{kind}, tok/s" for kind in kinds), "automatic over all threads", "over one thread")
    return table(("one request at a time", *heads), lines)


def shared_note(result: Result) -> str:
    machine, load = result["machine"], result["load_before"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, "
        f"commit {result['git_commit'] or 'unknown'}, medians of {result['parameters']['repeats']} runs in "
        f"turn; the machine's own load before was {load[0]:.1f}.\n"
    )


SERVE, KERNELS, GPU = "cpu_serve.json", "cpu_kernels.json", "gpu_engine.json"
CORRECTNESS, COLD, ASSIST = "gpu_correctness.json", "gpu_cold.json", "assist.json"
TWIN, SHARED = "twin_validation.json", "shared_cpu.json"
TWIN_CUDA, TWIN_CPU = "twin_engine_cuda.json", "twin_engine_cpu.json"
TABLES: dict[str, tuple[str | tuple[str, ...], Callable[..., str]]] = {
    "cpu-serve": (SERVE, serve_table),
    "cpu-startup": (SERVE, startup_table),
    "cpu-runs": (SERVE, runs_table),
    "cpu-many-adapters": (SERVE, many_adapters_table),
    "cpu-bystanders": (SERVE, bystanders_table),
    "cpu-machine": (SERVE, machine_note),
    "cpu-steps": (KERNELS, steps_table),
    "cpu-limits": (KERNELS, limits_table),
    "cpu-shared": (SHARED, shared_table),
    "cpu-shared-machine": (SHARED, shared_note),
    "gpu-machine": (GPU, gpu_tables.machine_note),
    "gpu-decode": (GPU, gpu_tables.decode_table),
    "gpu-serve": (GPU, gpu_tables.serve_table),
    "gpu-registered": (GPU, gpu_tables.registered_table),
    "gpu-kernels": (GPU, gpu_tables.kernels_table),
    "gpu-attention": (GPU, gpu_tables.attention_table),
    "gpu-padded": (GPU, gpu_tables.padded_table),
    "gpu-cold": (GPU, gpu_tables.cold_table),
    "gpu-correctness": (CORRECTNESS, gpu_tables.correctness_table),
    "cold-machine": (COLD, gpu_tables.machine_note),
    "cold-idle": (COLD, cold_tables.idle_table),
    "cold-large": (COLD, cost_tables.large_table),
    "cold-setups": (COLD, cold_tables.setups_table),
    "cold-burst": (COLD, cold_tables.burst_table),
    "cold-waits": (COLD, cold_tables.waits_table),
    "cold-aims": ((COLD, ASSIST), cost_tables.aims_table),
    "cold-fits": (COLD, cost_tables.fits_table),
    "cold-predictions": ((COLD, ASSIST), cost_tables.predictions_table),
    "workers-machine": (ASSIST, cold_tables.workers_note),
    "workers": (ASSIST, cold_tables.workers_table),
    "twin-machine": (TWIN, twin_tables.machine_note),
    "twin-validation": (TWIN, twin_tables.validation_table),
    "twin-speed": (TWIN, twin_tables.speed_table),
    "twin-fleet": (TWIN, twin_tables.fleet_table),
    "twin-engine-cuda": (TWIN_CUDA, twin_tables.engine_table),
    "twin-engine-cuda-machine": (TWIN_CUDA, twin_tables.engine_note),
    "twin-engine-cpu": (TWIN_CPU, twin_tables.engine_table),
    "twin-engine-cpu-machine": (TWIN_CPU, twin_tables.engine_note),
    "twin-engine-cpu-pace": (TWIN_CPU, twin_tables.pace_note),
    "twin-profiles": ((TWIN_CUDA, TWIN_CPU), twin_tables.profiles_table),
}
"""Name of a table -> the result file or files it is made from, and how."""


def fill(text: str, results: Path) -> str:
    """The document with the inside of every marked block made anew."""
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
    files, make = TABLES[name]
    found: list[Result] = []
    for file in (files,) if isinstance(files, str) else files:
        try:
            found.append(json.loads((results / file).read_text()))
        except OSError as error:
            raise TableError(f"table {name!r} needs {file}: {error}") from error
    return make(*found)


def _suite(result: Result, name: str) -> Any:
    if name not in result:
        raise TableError(f"the results hold no suite {name!r}: run benchmarks.cpu_serve with it")
    return result[name]


def _figures(row: Result | None) -> str:
    if row is None:
        return "-"
    median = row["median"]
    failed = f", **{row['num_failed']} failed**" if row["num_failed"] else ""
    return (
        f"{median['output_tokens_per_s']:,.0f} tok/s, TTFT {median['ttft_ms.mean']:,.0f} ms, "
        f"TPOT {median['tpot_ms.mean']:,.0f} ms{failed}"
    )


def _cost(base: Result | None, adapters: Result | None) -> str:
    if base is None or adapters is None:
        return "-"
    ratio = base["median"]["output_tokens_per_s"] / adapters["median"]["output_tokens_per_s"]
    return f"{ratio:.2f}x"


def _ms(distribution: Result | None) -> str:
    return "-" if distribution is None else f"{distribution['mean']:,.0f}"


def _command(row: Result) -> str:
    env = "".join(f"{name}={value} " for name, value in row["env"].items())
    return env + str(row["command"])


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
        before = document.read_text()
        try:
            after = fill(before, args.results)
        except TableError as error:
            sys.exit(f"{document}: {error}")
        if after != before:
            stale.append(str(document))
            if not args.check:
                document.write_text(after)
    print(f"{'out of date' if args.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
