"""The twin's tables, from `results/twin_validation.json`, and `twin_engine_*.json` for our own engine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.markdown import Result, table
from loraplex.twin.scores import in_authors_unit

_WANTED = ("wanted, at most", "", "4", "8", "30", "", "0.97 at least")
_SCORES = ("output_throughput", "itl", "ttft", "ttft_all")


def validation_table(result: Result) -> str:
    found = result["held_out"]
    lines = [_line("all", found)]
    lines += [_line(model, each) for model, each in found["by_model"].items()]
    lines += [_line(f"runs that are {name}", each) for name, each in found["by_load"].items()]
    if "halves" in result:
        halves = result["halves"]
        lines.append(_line("the other file, each half of its workloads from the other half", halves))
        lines += [_line(f"- {model}", each) for model, each in halves["by_model"].items()]
    lines.append(_line("the twin of the runs' authors, by its published predictions", result["authors"]))
    headings = (
        "SMAPE, % (in the authors' unit)",
        "runs",
        "output throughput",
        "ITL",
        "TTFT, completed requests",
        "TTFT, all requests sent",
        "starvation, macro-F1",
    )
    return table(headings, [*lines, _WANTED])


def speed_table(result: Result) -> str:
    speed = result["speed"]
    lines = [
        ("requests, steps", f"{speed['num_requests']:,}, {speed['num_steps']:,}", ""),
        ("CPU time on one core, best of three", f"{speed['cpu_s']:.1f} s", "3.6 s"),
        ("times real time", f"{speed['times_real_time']:,.0f}", "1,000"),
        ("memory of the process", f"{speed['peak_mib']:.0f} MiB", "300 MB"),
    ]
    return table(("one hour, 10 requests/s, 128 adapters", "measured", "wanted"), lines)


def fleet_table(result: Result) -> str:
    fleet = result["fleet"]
    per_engine = fleet["mean_running"] / fleet["num_engines"]
    lines = [
        ("requests, all served", f"{fleet['num_requests']:,}, {_yes(fleet)}", ""),
        ("adapters asked for, loads", f"{fleet['num_adapters_used']:,}, {fleet['num_loads']:,}", ""),
        ("running on an engine, mean and most", f"{per_engine:.1f}, {fleet['most_running']:.1f}", ""),
        ("steps", f"{fleet['num_steps']:,}", ""),
        ("CPU time on one core, best of three", f"{fleet['cpu_s']:.1f} s", "20 s"),
        ("times real time", f"{fleet['times_real_time']:.1f}", "15"),
        ("memory of the process", f"{fleet['peak_mib']:.0f} MiB", "1 GB"),
    ]
    heading = f"{fleet['num_engines']} GPUs, 340 requests/s, {fleet['num_adapters']:,} adapters, 5 minutes"
    return table((heading, "measured", "wanted"), lines)


def engine_table(result: Result) -> str:
    """Show the live figures, with the twin's in brackets."""

    def beside(each: Result, name: str, digits: int) -> str:
        live, twin = (f"{each[side][name]:,.{digits}f}" for side in ("live", "twin"))
        return f"{live} ({twin}), {each['smape'][name]:.1f}"

    lines: list[tuple[str, ...]] = [
        (
            f"{each['load']:.0%}, {each['requests_per_s']:.1f} requests/s",
            beside(each, "output_tok_s", 0),
            beside(each, "itl_ms", 2),
            beside(each, "ttft_ms", 1),
        )
        for each in mean_workloads(result)
    ]
    means = [("mean", "mean_smape"), ("mean, without being told the pace", "mean_smape_not_told_the_pace")]
    lines += [
        (name, *(f"{result[key][each]:.1f}" for each in ("output_tok_s", "itl_ms", "ttft_ms")))
        for name, key in means
        if key in result
    ]
    lines.append(("wanted, at most", "3", "5", "15"))
    headings = ("load", "output tokens/s, SMAPE %", "ITL, ms, SMAPE %", "TTFT, ms, SMAPE %")
    return table(headings, lines)


def mean_workloads(result: Result) -> list[Result]:
    """Return each load's figures and errors, as means over all rounds."""

    def mean_of(load: Sequence[Result], part: str) -> dict[str, float]:
        return {name: fmean(each[part][name] for each in load) for name in load[0][part]}

    of_each_load = zip(*(each["workloads"] for each in result["rounds"]), strict=True)
    return [
        {
            "load": load[0]["load"],
            "requests_per_s": fmean(each["requests_per_s"] for each in load),
            **{part: mean_of(load, part) for part in ("live", "twin", "smape")},
        }
        for load in of_each_load
    ]


def profiles_table(cuda: Result, cpu: Result) -> str:
    """Show how well the profiles that the twin ran on predict held-out samples."""

    def line(name: str, result: Result) -> tuple[str, ...]:
        found = [each["profile"]["held_out"] for each in result["rounds"]]
        parts = ("decode", "prefill", "load", "serving")
        return (name, *(cell([each[part] for each in found]) for part in parts))

    def cell(found: Sequence[Result | None]) -> str:
        qualities = [each for each in found if each is not None]
        if not qualities:
            return "-"
        error, r_squared = (fmean(each[name] for each in qualities) for name in ("mean_error", "r_squared"))
        return f"{error:.1%}, {r_squared:.3f}"

    headings = ("mean error held out, R²", "decode", "prefill", "load", "steps of serving")
    wanted = ("wanted, at most and at least", "5%, 0.98", "5%, 0.98", "10%, 0.98", "")
    return table(headings, [line("H200, 7B", cuda), line("CPU, tiny model", cpu), wanted])


def pace_note(result: Result) -> str:
    slower = [
        fmean(each["pace"]["times_the_profile"]) for found in result["rounds"] for each in found["workloads"]
    ]
    return (
        f"In the {len(slower)} replays, steps of the other engine took {min(slower):.2f} to "
        f"{max(slower):.2f} times what the profile says, on the mean.\n"
    )


def engine_note(result: Result) -> str:
    machine, setting = result["machine"], result["setting"]
    on = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    return (
        f"Measured {result['date'][:10]} on {on}, {setting['shape']} shape, {setting['dtype']}, "
        f"{setting['num_adapters']} adapters of ranks 8 to 64, in {len(result['rounds'])} rounds, "
        f"commit {result['git_commit'] or 'unknown'}.\n"
    )


def _yes(fleet: Result) -> str:
    return "yes" if fleet["num_served"] == fleet["num_requests"] else f"{fleet['num_served']:,}"


def validation_note(result: Result) -> str:
    return _computed(result["held_out"])


def speed_note(result: Result) -> str:
    return _computed(result["speed"])


def fleet_note(result: Result) -> str:
    return _computed(result["fleet"])


def _computed(section: Result) -> str:
    machine = section["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in section["packages"].items())
    return (
        f"Computed {section['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, "
        f"Python {section['python']}, {packages}, commit {section['git_commit'] or 'unknown'}.\n"
    )


def _line(name: str, found: Result) -> tuple[str, ...]:
    has_both = 0 < found.get("num_starved", 0) < found["num_compared"]
    f1 = f"{found['starvation_f1']:.3f}" if has_both else "-"
    return (name, str(found["num_compared"]), *(_in_both_units(found["smape"].get(s)) for s in _SCORES), f1)


def _in_both_units(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.1f} ({in_authors_unit(percent):.1f})"
