"""The tables of servers on a CPU, from results/cpu_serve.json and cpu_kernels.json.

cpu_serve.json holds every measurement ever made; later ones do not replace earlier ones. Machines like the
one it was measured on are noisy, so tables give the range over all runs of all measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.markdown import Result, TableError, span, table


def serve_table(result: Result) -> str:
    rows = _rows(result)
    lines = []
    for engine in dict.fromkeys(name for name, _ in rows):
        base, adapters = rows.get((engine, "base"), []), rows.get((engine, "adapters"), [])
        named = (base or adapters)[-1]
        lines.append(
            (
                f"{named['label']} {named['version']}",
                _figures(base),
                _figures(adapters),
                _cost(base, adapters),
            )
        )
    adapters_heading = f"{_measurements(result)[-1]['parameters']['adapters']} adapters, round-robin"
    return table(("engine", "base model only", adapters_heading, "cost of the adapters"), lines)


def startup_table(result: Result) -> str:
    lines = []
    for engine in dict.fromkeys(name for name, _ in _rows(result)):
        found = [row for (name, _), rows in _rows(result).items() if name == engine for row in rows]
        start_s = [seconds for row in found for seconds in row["start_s"]]
        lines.append((found[-1]["label"], f"{span(start_s, '.1f')} s", f"`{_command(found[-1])}`"))
    return table(("engine", "start-up", "command"), lines)


def runs_table(result: Result) -> str:
    """Return a table of every single run, grouped by measurement."""

    def runs(rows: Sequence[Result], cell: Callable[[Result], str]) -> str:
        return "; ".join(", ".join(cell(run) for run in row["runs"]) for row in rows)

    lines = [
        (
            rows[-1]["label"],
            traffic,
            runs(rows, lambda run: f"{run['output_tokens_per_s']:.0f}"),
            runs(rows, lambda run: _ms(run["ttft_ms"])),
            runs(rows, lambda run: _ms(run["tpot_ms"])),
        )
        for (_, traffic), rows in _rows(result).items()
    ]
    return table(("engine", "traffic", "output tok/s, each run", "mean TTFT ms", "mean TPOT ms"), lines)


def many_adapters_table(result: Result) -> str:
    suites = _suites(result, "many-adapters")
    suite = suites[-1]
    registered_s = [each["registration"]["seconds"] for each in suites if each["registration"]]
    took = (
        f"{span(registered_s, '.1f')} s"
        if registered_s
        else f"{span([each['start_s'] for each in suites], '.1f')} s with the start-up"
    )
    lines = [
        ("16 adapters, all in memory", _figures([each["all_in_memory"] for each in suites])),
        (
            f"{suite['adapters_on_disk']:,} adapters in turn, memory for {suite['adapters_that_fit']}",
            _figures([each["in_turn"] for each in suites]),
        ),
        (f"registering {suite['adapters_on_disk']:,} adapters", took),
    ]
    return table(("loraplex", "measured"), lines)


def bystanders_table(result: Result) -> str:
    suites = _suites(result, "bystanders")
    crowd = f"among {suites[-1]['idle_clients']} idle clients and {suites[-1]['slow_readers']} slow readers"
    lines = []
    for name, key in (("alone", "alone"), (crowd, "among_bystanders")):
        rows = [suite[key] for suite in suites]
        gaps = span([run["itl_ms"]["p99"] for row in rows for run in row["runs"]], ",.0f")
        lines.append((name, _figures(rows), f"{gaps} ms"))
    return table(("loraplex, 16 adapters", "measured", "ITL p99"), lines)


def machine_note(result: Result) -> str:
    found = _measurements(result)
    latest = found[-1]
    traffic = latest["parameters"]["traffic"]
    num_runs = sum(each["parameters"]["repeats"] for each in found)
    days = sorted({each["date"][:10] for each in found})
    machines = dict.fromkeys(_machine(each) for each in found)
    commits = dict.fromkeys(each["git_commit"] or "unknown" for each in found)
    return (
        f"Smallest and largest of {num_runs} runs in {_count(len(found), 'measurement')}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, on {'; '.join(machines)}, "
        f"Python {latest['python']}, torch {latest['packages'].get('torch', '?')}, "
        f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}. "
        f"Model: {latest['parameters']['model'].split(' (')[0]}. "
        f"{traffic['num_requests']} requests of {traffic['prompt_tokens']} prompt and "
        f"{traffic['output_tokens']} output tokens, closed loop of {traffic['concurrency']}; "
        "engines take turns within a measurement.\n"
    )


def steps_table(result: Result) -> str:
    """Return a table of a step's parts, without adapters and with 16 of them."""
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
    """Return a table of the bytes a decode step must read, and the bandwidth they can be read at."""
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


def _measurements(result: Result) -> list[Result]:
    found: list[Result] = result["measurements"]
    return found


def _suites(result: Result, name: str) -> list[Any]:
    """Return a suite from every measurement that has it."""
    found = [each[name] for each in _measurements(result) if name in each]
    if not found:
        raise TableError(f"the results hold no suite {name!r}: run benchmarks.cpu_serve with it")
    return found


def _rows(result: Result) -> dict[tuple[str, str], list[Result]]:
    """Return the rows of each engine and kind of traffic, one per measurement."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for suite in _suites(result, "serve"):
        for row in suite:
            rows.setdefault((row["engine"], row["traffic"]), []).append(row)
    return rows


def _figures(rows: Sequence[Result]) -> str:
    runs = [run for row in rows for run in row["runs"]]
    if not runs:
        return "-"
    num_failed = sum(row["num_failed"] for row in rows)
    failed = f", **{num_failed} failed**" if num_failed else ""
    return (
        f"{span((run['output_tokens_per_s'] for run in runs), ',.0f')} tok/s, "
        f"TTFT {_range_ms(runs, 'ttft_ms')} ms, TPOT {_range_ms(runs, 'tpot_ms')} ms{failed}"
    )


def _range_ms(runs: Iterable[Result], name: str) -> str:
    # A run in which every request failed has no latencies.
    return span((run[name]["mean"] for run in runs if run[name] is not None), ",.0f")


def _cost(base: Sequence[Result], adapters: Sequence[Result]) -> str:
    """Return throughput without adapters over that with them; both sides of a ratio are of the same
    repeat."""
    if not base or not adapters:
        return "-"
    ratios = [
        without["output_tokens_per_s"] / having["output_tokens_per_s"]
        for base_row, adapters_row in zip(base, adapters, strict=True)
        for without, having in zip(base_row["runs"], adapters_row["runs"], strict=True)
        if having["output_tokens_per_s"]
    ]
    return f"{span(ratios, '.2f')}x" if ratios else "-"


def _ms(distribution: Result | None) -> str:
    return "-" if distribution is None else f"{distribution['mean']:,.0f}"


def _machine(measurement: Result) -> str:
    machine = measurement["machine"]
    return f"{machine['cores']} cores of {machine['cpu']} ({machine['os']})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _command(row: Result) -> str:
    env = "".join(f"{name}={value} " for name, value in row["env"].items())
    return env + str(row["command"])
