"""The tables of `results/planner.json`: surrogates, rules, times to plan, and plans that hold."""

from __future__ import annotations

from math import ceil
from statistics import fmean

from benchmarks.markdown import Result, TableError, span, table, when_and_what
from loraplex.core.words import plural

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
            _figure(found, "r2", ".3f"),
            f"{found['starvation_macro_f1']:.3f}",
            f"{found['num_misjudged']} of {found['num_runs']}",
            *_simulated(found),
            _figure(found, "train_s", ".0f"),
            _figure(found, "microseconds", ",.0f"),
        )
        for model, case in _section(result, "surrogates")["models"].items()
        for name, found in case["models"].items()
    ]
    headings = (
        *("model", "surrogate", "SMAPE", "R2", "macro-F1", "misjudged", "SMAPE, simulated"),
        *("F1, simulated", "training, s", "prediction, us"),
    )
    return table(headings, lines)


def rows_table(result: Result) -> str:
    """Return the errors on recorded runs by the number of rows; of several samples the least and the most."""
    lines = []
    for model, found in _section(result, "rows")["models"].items():
        for num_rows in sorted({each["num_rows"] for each in found}):
            samples = [each for each in found if each["num_rows"] == num_rows]
            lines.append(
                (
                    _NAMES[model],
                    f"{num_rows:,}",
                    f"{len(samples)}",
                    span((each["smape_authors_unit"] for each in samples), ".2f") + "%",
                    span((each["starvation_macro_f1"] for each in samples), ".3f"),
                    span((each["num_misjudged"] for each in samples), ".0f"),
                )
            )
    return table(("model", "rows", "samples", "SMAPE", "macro-F1", "misjudged"), lines)


def rules_table(result: Result) -> str:
    """Return the errors and the speed of small trees."""
    lines = [
        (
            _NAMES[model],
            " + ".join(map(str, found["num_rules"])),
            f"{found['smape_authors_unit']:.2f}%",
            _figure(found, "r2", ".3f"),
            f"{found['starvation_macro_f1']:.3f}",
            f"{found['num_misjudged']} of {found['num_runs']}",
            span(found["prediction_ns"], ".0f"),
            span(found.get("called_ns", ()), ".0f"),
            f"{found['train_s']:.0f}",
        )
        for model, found in _section(result, "rules")["models"].items()
    ]
    headings = (
        *(
            "model",
            "rules",
            "SMAPE",
            "R2",
            "macro-F1",
            "misjudged",
            "prediction, ns",
            "called from Python, ns",
        ),
        "training, s",
    )
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
            f"{found['cpu_s'] * 1e3:.1f}" if "cpu_s" in found else "-",
        )
        for model, case in _section(result, "plan_speed")["models"].items()
        for name, found in case["packers"].items()
    ]
    return table(("model", "packer, surrogate", "GPUs", "median, ms", "least, ms", "CPU, median, ms"), lines)


def recorded_table(result: Result) -> str:
    """Return how often it is predicted rightly whether a GPU serves what a recorded run was sent."""
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
    headings = ("model", "runs", "that kept up", "predicted rightly", "of those never fitted to")
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
    """Return the plan for our own engine. Earlier results checked all GPUs."""
    found = _section(result, "own")
    checked = found["num_checked_gpus" if "num_checked_gpus" in found else "num_gpus"]
    lines = [
        ("adapters, requests/s", f"{found['num_adapters']:,}, {found['rate_rps']:,.0f}"),
        ("GPUs", f"{found['num_gpus']}"),
        *_bound(found, "lower bound", found["lower_bound"]),
        *_bound(found, "lower bound without the judge's margin", found["lower_bound_without_margin"]),
        ("time to plan", f"{found['plan_s']:.1f} s"),
        ("GPUs checked in the twin, the fullest first", f"{checked}"),
        (
            "runs that starve",
            f"{found['num_starved']} of {len(found['seeds']) * checked}, of {found['checked_s']:.0f} s each",
        ),
        (
            "share served, least and mean",
            f"{found['least_share_served']:.3f}, {found['mean_share_served']:.3f}",
        ),
    ]
    return table(("10,000 adapters on our own engine", ""), lines)


def _bound(found: Result, name: str, bound: float) -> list[tuple[str, str]]:
    num_gpus = ceil(bound)
    over = found["num_gpus"] / num_gpus - 1
    return [(name, f"{bound:.1f}, so {num_gpus} GPUs"), (f"GPUs over the {name}", f"{over:.1%}")]


def note(result: Result) -> str:
    dates, commits = when_and_what(result)
    machines = dict.fromkeys(f"{_of_machine(each)}, Python {each['python']}" for each in result.values())
    return f"Computed {dates} on {' and '.join(machines)}, commit {commits}.\n"


def _of_machine(section: Result) -> str:
    machine = section["machine"]
    return f"{machine['cores']} {plural('core', machine['cores'])} of {machine['cpu']}"


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


def _figure(found: Result, name: str, form: str) -> str:
    return f"{found[name]:{form}}" if name in found else "-"


def _gpus(found: Result) -> str:
    if found["num_gpus"] is None:
        return "no plan"
    starved = sum(1 for each in found["num_starved"] if each)
    return f"{found['num_gpus']}" + (f" ({starved} starve)" if starved else "")
