"""The tables of `results/planner.json`: surrogates, rules, times to plan, and plans that hold."""

from __future__ import annotations

from statistics import fmean

from benchmarks.markdown import Result, TableError, span, table, when_and_what

_NAMES = {"llama": "Llama 3.1 8B", "qwen": "Qwen 2.5 7B"}
_PAPER = "the paper's"
_OURS = "ours"
_BASELINES = ("MaxBase", "MaxBase*", "Random", "dLoRA")
_SCENARIOS = ("scenarios", "scenarios_qwen")


def surrogates_table(result: Result) -> str:
    """Return the errors of each kind of model on recorded runs."""
    lines = [
        (
            _NAMES[model],
            name,
            f"{found['smape_authors_unit']:.2f}%",
            f"{found['starvation_macro_f1']:.3f}",
            f"{found['num_misjudged']} of {found['num_runs']}",
            *_simulated(found),
            f"{found['train_s']:.0f}" if "train_s" in found else "-",
            f"{found['microseconds']:.0f}" if "microseconds" in found else "-",
        )
        for model, case in _section(result, "surrogates")["models"].items()
        for name, found in case["models"].items()
    ]
    headings = (
        *("model", "surrogate", "SMAPE", "macro-F1", "misjudged", "SMAPE, simulated", "F1, simulated"),
        *("training, s", "prediction, us"),
    )
    return table(headings, lines)


def rules_table(result: Result) -> str:
    """Return the errors and the speed of small trees."""
    lines = [
        (
            _NAMES[model],
            " + ".join(map(str, found["num_rules"])),
            f"{found['smape_authors_unit']:.2f}%",
            f"{found['starvation_macro_f1']:.3f}",
            f"{found['num_misjudged']} of {found['num_runs']}",
            span(found["prediction_ns"], ".0f"),
            f"{found['train_s']:.0f}",
        )
        for model, found in _section(result, "rules")["models"].items()
    ]
    headings = ("model", "rules", "SMAPE", "macro-F1", "misjudged", "prediction, ns", "training, s")
    return table(headings, lines)


def speed_table(result: Result) -> str:
    """Return the time of a plan by packer and surrogate."""
    lines = [
        (
            _NAMES[model],
            name,
            f"{found['num_gpus']}",
            f"{found['seconds'] * 1e3:.1f}",
            f"{found['least_s'] * 1e3:.1f}",
        )
        for model, case in _section(result, "plan_speed")["models"].items()
        for name, found in case["packers"].items()
    ]
    return table(("model", "packer, surrogate", "GPUs", "median, ms", "least, ms"), lines)


def recorded_table(result: Result) -> str:
    """Return how often it is foretold rightly whether a GPU serves what a recorded run was sent."""
    lines = [
        (
            _NAMES[model],
            f"{found['num_runs']}",
            f"{found['num_feasible']}",
            f"{found['num_right'] / found['num_runs']:.1%}",
            f"{found['num_held_out_right'] / found['num_held_out']:.1%} of {found['num_held_out']}",
        )
        for model, found in _section(result, "recorded")["models"].items()
    ]
    headings = ("model", "runs", "that kept up", "foretold rightly", "of those never fitted to")
    return table(headings, lines)


def scenarios_table(result: Result) -> str:
    """Return the GPUs of each packer's plan, in brackets how many of them starve by any seed."""
    sections = _scenario_sections(result)
    packers = _compared(sections)
    lines = [
        (_NAMES[each["model"]], name, *(_gpus(found[packer]) for packer in packers))
        for each in sections
        for name, found in each["cases"].items()
    ]
    return table(("model", "scenario", "max-pack", *packers[1:]), lines)


def scenarios_summary(result: Result) -> str:
    """Return how many plans of each packer hold, and how their GPUs compare."""
    lines = []
    sections = _scenario_sections(result)
    for section, packer in ((section, packer) for section in sections for packer in _compared(sections)):
        cases = list(section["cases"].values())
        outcomes = [each[packer] for each in cases]
        made = [each for each in outcomes if each["num_gpus"] is not None]
        held = [each for each in made if not any(each["num_starved"])]
        both = [
            (each[packer]["num_gpus"], each[_PAPER]["num_gpus"])
            for each in cases
            if each[packer]["num_gpus"] and each[_PAPER]["num_gpus"]
        ]
        lines.append(
            (
                _NAMES[section["model"]],
                "max-pack, the paper's" if packer == _PAPER else packer,
                f"{len(held)} of {len(cases)}",
                f"{fmean(mine for mine, _ in both):.2f}",
                f"{sum(mine < theirs for mine, theirs in both)}",
                f"{sum(mine > theirs for mine, theirs in both)}",
            )
        )
    headings = ("model", "packer", "plans that starve nobody", "GPUs, mean", "fewer than max-pack", "more")
    return table(headings, lines)


def _scenario_sections(result: Result) -> list[Result]:
    """Return the sections of all models that were run; the first must have been."""
    first, *others = _SCENARIOS
    return [_section(result, first), *(result[name] for name in others if name in result)]


def _compared(sections: list[Result]) -> list[str]:
    """Return the packers that all sections have."""
    cases = [found for each in sections for found in each["cases"].values()]
    return [_PAPER, _OURS, *(each for each in _BASELINES if all(each in found for found in cases))]


def own_table(result: Result) -> str:
    """Return the plan for our own engine."""
    found = _section(result, "own")
    seeds, seconds = found["seeds"], found["checked_s"]
    lines = [
        ("adapters, requests/s", f"{found['num_adapters']:,}, {found['rate_rps']:,.0f}"),
        ("GPUs", f"{found['num_gpus']}"),
        ("lower bound", f"{found['lower_bound']:.1f}, so {found['lower_bound_gpus']} GPUs"),
        ("GPUs over the bound", f"{found['num_gpus'] / found['lower_bound_gpus'] - 1:.1%}"),
        ("lower bound without the judge's margin", f"{found['lower_bound_without_margin']:.1f}"),
        ("time to plan", f"{found['plan_s']:.1f} s"),
        (
            "GPUs that starve in the twin",
            f"{found['num_starved']} of {found['num_gpus'] * len(seeds)} runs of {seconds:.0f} s",
        ),
        (
            "share served, least and mean",
            f"{found['least_share_served']:.3f}, {found['mean_share_served']:.3f}",
        ),
    ]
    return table(("10,000 adapters on our own engine", ""), lines)


def note(result: Result) -> str:
    dates, commits = when_and_what(result)
    first = next(iter(result.values()))
    machine = first["machine"]
    return f"Computed {dates} on one core of {machine['cpu']}, Python {first['python']}, commit {commits}.\n"


def _section(result: Result, name: str) -> Result:
    try:
        found: Result = result[name]
    except KeyError:
        raise TableError(
            f"the section {name!r} is missing; run python -m benchmarks.planner {name}"
        ) from None
    return found


def _simulated(found: Result) -> tuple[str, str]:
    """Return the errors on simulated runs that a surrogate was not trained on."""
    if "simulated" not in found:
        return "-", "-"
    accuracy = found["simulated"]
    return f"{accuracy['throughput_smape_authors_unit']:.2f}%", f"{accuracy['starvation_macro_f1']:.3f}"


def _gpus(found: Result) -> str:
    if found["num_gpus"] is None:
        return "no plan"
    starved = sum(1 for each in found["num_starved"] if each)
    return f"{found['num_gpus']}" + (f" ({starved} starve)" if starved else "")
