"""The tables of the HTTP comparison, from results/http_compare.json.

Figures are medians if a cell was measured several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Final

from benchmarks.http_plan import DEFAULT_SHAPE, HIGH_RATE, SATURATED, STEADY, prompt_tokens_of, section_of
from benchmarks.markdown import Result, span, table

_NO_VERSION: Final = "0+unknown"
"""The version of a copy of the code without its git history."""
LABELS: Final = {"loraplex": "loraplex", "vllm": "vLLM, LoRA off", "vllm-lora": "vLLM, LoRA on"}
"""Section of a server -> its title in tables."""
SHAPES: Final = (DEFAULT_SHAPE, "llama-3-8b")
_NOT_YET: Final = "Not measured yet.\n"
PICTURE: Final = "docs/images/http-compare.svg"
_FIRST_RUN: Final = {"ttft_ms_p95": "TTFT p95", "tpot_ms_mean": "TPOT", "itl_ms_p99": "ITL p99"}
"""Figures in which the first run after a start is compared with the last -> their titles in tables."""


def servers(result: Result, shape: str = DEFAULT_SHAPE) -> dict[str, Result]:
    """Return the sections of servers with a model of this shape, in the order of the tables."""
    found = {name: result.get(section_of(name, shape), {}) for name in LABELS}
    return {name: section for name, section in found.items() if section.get("runs")}


def figure(section: Result, adapters: int, load: str, name: str) -> float | None:
    """Return the median of a figure over the runs of one cell; None if there are none."""
    found = [run[name] for run in cell(section, adapters, load) if name in run]
    return median(found) if found else None


def cell(section: Result, adapters: int, load: str) -> list[Result]:
    """Return the runs with this number of adapters (0: the base model) under this load."""
    return [run for run in section["runs"] if (run["adapters"], run["load"]) == (adapters, load)]


def numbers_of_adapters(sections: Iterable[Result]) -> list[int]:
    return sorted({run["adapters"] for section in sections for run in section["runs"]})


def summary(result: Result) -> str:
    """Return the README's part: what was run, the figures with most adapters, and the picture."""
    found = servers(result)
    most = numbers_of_adapters(found.values())[-1]
    parameters = next(iter(found.values()))["parameters"]
    steady, saturated = _load(result, STEADY), _load(result, SATURATED)
    figures = [
        f"{_title(name, section)}: {_throughput(section, most)} with {saturated}, first token within "
        f"{_plain(section, most, STEADY, 'ttft_ms_p95', '.1f')} ms (p95) at {steady}"
        for name, section in found.items()
        if cell(section, most, SATURATED)
    ]
    ours = found.get("loraplex")
    if ours is not None and cell(ours, 0, SATURATED):
        figures.append(
            f"loraplex, base model alone: {_throughput(ours, 0)}, "
            f"{_plain(ours, 0, STEADY, 'ttft_ms_p95', '.1f')} ms"
        )
    intro = (
        "Over HTTP beside vLLM, both loaded by vLLM's own client (`vllm bench serve`), on "
        f"{_machine(result)}: {parameters['shape']} shape, random weights, {parameters['dtype']}, "
        f"adapters of rank {parameters['rank']}. With requests for {most} adapters at random:\n\n"
        + "\n".join(f"- {each}" for each in figures)
        + "\n\nAll figures, and what was run at which commit: "
        "[docs/benchmarks.md](docs/benchmarks.md#over-http-on-a-gpu-beside-vllm).\n"
    )
    picture = f"![Throughput and time to first token over the number of adapters]({PICTURE})\n"
    return "\n".join(["", intro, picture, ""])


def machine_note(result: Result) -> str:
    """Return a note with the commit of each section, as they may be measured at different times."""
    found = servers(result)
    parameters = next(iter(found.values()))["parameters"]
    days = sorted({section["date"][:10] for section in result.values()})
    # Results of before there were loads of other lengths name them once for all loads.
    lengths = parameters["loads"][STEADY].get("lengths") or parameters["lengths"]
    commits = ", ".join(f"{name} at {section['git_commit'] or 'unknown'}" for name, section in result.items())
    return (
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {_machine(result)}, "
        f"{parameters['shape']} shape, random weights, {parameters['dtype']}, "
        f"{parameters['adapters_served']} adapters of rank {parameters['rank']} on q, k and v known to each "
        "server that serves adapters. "
        f"Prompts of {lengths['prompt_tokens']} and answers of {lengths['output_tokens']} random tokens on "
        f"average, each request for one of the adapters at random; {_load(result, STEADY)} "
        f"({_requests(result, STEADY)} requests) and {_load(result, SATURATED)} "
        f"({_requests(result, SATURATED)} requests). Commits: {commits}.\n"
    )


def _machine(result: Result) -> str:
    machine = next(iter(servers(result).values()))["machine"]
    return f"one {machine['gpu']}" if "gpu" in machine else f"{machine['cores']} cores of {machine['cpu']}"


def compare_table(result: Result) -> str:
    found = servers(result)
    lines = [
        (
            _title(name, section),
            _asked_for(adapters),
            _steady(section, adapters),
            _plain(section, adapters, STEADY, "itl_ms_p99", ".1f"),
            _plain(section, adapters, STEADY, "e2e_ms_mean", ",.0f"),
            _throughput(section, adapters),
            _plain(section, adapters, SATURATED, "ttft_ms_mean", ",.0f"),
            _plain(section, adapters, SATURATED, "tpot_ms_mean", ".1f"),
            _failed(section, adapters, (STEADY, SATURATED)),
        )
        for name, section in found.items()
        for adapters in _measured(section, (STEADY, SATURATED))
    ]
    steady, saturated = _load(result, STEADY), _load(result, SATURATED)
    headings = (
        "server", "adapters asked for", f"{steady}: TTFT mean (p95), TPOT, ms", "ITL p99, ms", "E2E, ms",
        saturated, "TTFT, ms", "TPOT, ms", "failed requests",
    )  # fmt: skip
    return table(headings, lines)


def high_rate_table(result: Result) -> str:
    lines = [
        (
            _title(name, section),
            _asked_for(adapters),
            _steady(section, adapters, HIGH_RATE),
            _plain(section, adapters, HIGH_RATE, "itl_ms_p99", ".1f"),
            _plain(section, adapters, HIGH_RATE, "e2e_ms_mean", ",.0f"),
            _throughput(section, adapters, HIGH_RATE),
            _failed(section, adapters, (HIGH_RATE,)),
        )
        for name, section in servers(result).items()
        for adapters in _measured(section, (HIGH_RATE,))
    ]
    if not lines:
        return _NOT_YET
    rate = f"{_load(result, HIGH_RATE)} ({_requests(result, HIGH_RATE)} requests)"
    headings = (
        "server", "adapters asked for", f"{rate}: TTFT mean (p95), TPOT, ms", "ITL p99, ms", "E2E, ms",
        "throughput", "failed requests",
    )  # fmt: skip
    return table(headings, lines)


def prompts_table(result: Result) -> str:
    """Show prompts alone, for each shape: the median time to the first token and that per prompt token."""
    loads = sorted(set(_prompt_loads(result)), key=lambda load: prompt_tokens_of(load) or 0)
    lines = [
        (
            _title(name, section),
            shape,
            _asked_for(adapters),
            *(_prompt(section, adapters, load) for load in loads),
            _failed(section, adapters, loads),
        )
        for shape in SHAPES
        for name, section in servers(result, shape).items()
        for adapters in _measured(section, loads)
    ]
    if not lines:
        return _NOT_YET
    lengths = (f"{prompt_tokens_of(load):,} tokens" for load in loads)
    return table(("server", "shape", "adapters asked for", *lengths, "failed requests"), lines)


def shapes_table(result: Result) -> str:
    """Show the saturated load with models of other shapes."""
    lines = [
        (
            _title(name, section),
            shape,
            _asked_for(adapters),
            _throughput(section, adapters),
            _plain(section, adapters, SATURATED, "ttft_ms_mean", ",.0f"),
            _plain(section, adapters, SATURATED, "tpot_ms_mean", ".1f"),
            _failed(section, adapters, (SATURATED,)),
        )
        for shape in SHAPES[1:]
        for name, section in servers(result, shape).items()
        for adapters in _measured(section, (SATURATED,))
    ]
    if not lines:
        return _NOT_YET
    headings = (
        "server", "shape", "adapters asked for", _load(result, SATURATED), "TTFT, ms", "TPOT, ms",
        "failed requests",
    )  # fmt: skip
    return table(headings, lines)


def starts_table(result: Result) -> str:
    """Show loraplex's starts with empty and with used caches, the other servers' starts, and first runs."""
    lines: list[tuple[str, ...]] = [
        (_title(name, section), f"{span(section['start_s'], '.1f')} s", "-", *["-"] * len(_FIRST_RUN))
        for name, section in servers(result).items()
    ]
    section = result.get("starts", {"start_s": [], "runs": []})
    for caches, start_s in zip(("empty", "used"), section["start_s"], strict=False):
        runs = [run for run in section["runs"] if run["caches"] == caches]
        shown = ", ".join(f"{run['ttft_ms_mean']:.1f} ({run['ttft_ms_p95']:.1f})" for run in runs)
        ratios = (f"{runs[0][name] / runs[-1][name]:.2f}x" if len(runs) > 1 else "-" for name in _FIRST_RUN)
        lines.append((f"loraplex, {caches} caches", f"{start_s:.1f} s", shown or "-", *ratios))
    heads = (f"first over last run, {title}" for title in _FIRST_RUN.values())
    return table(("start", "healthy after", "TTFT mean (p95), ms, run by run", *heads), lines)


def _title(name: str, section: Result) -> str:
    version = section["versions"]["loraplex" if name == "loraplex" else "vllm"]
    if version == _NO_VERSION:
        version = f"at {section['git_commit'][:7]}"
    return f"{LABELS[name]} {version}"


def _asked_for(adapters: int) -> str:
    return "base model" if adapters == 0 else str(adapters)


def _measured(section: Result, loads: Iterable[str]) -> list[int]:
    """Return the numbers of adapters with which a server was measured under any of these loads."""
    wanted = set(loads)
    return sorted({run["adapters"] for run in section["runs"] if run["load"] in wanted})


def _failed(section: Result, adapters: int, loads: Iterable[str]) -> str:
    return str(sum(run["failed"] for load in loads for run in cell(section, adapters, load)))


def _prompt_loads(result: Result) -> Iterator[str]:
    for shape in SHAPES:
        for section in servers(result, shape).values():
            yield from (run["load"] for run in section["runs"] if prompt_tokens_of(run["load"]))


def _prompt(section: Result, adapters: int, load: str) -> str:
    ttft_ms, tokens = figure(section, adapters, load, "ttft_ms_p50"), prompt_tokens_of(load)
    if ttft_ms is None or tokens is None:
        return "-"
    num_failed = int(_failed(section, adapters, (load,)))
    failed = f" ({num_failed} failed)" if num_failed else ""
    return f"{ttft_ms:,.1f} ms, {1000 * ttft_ms / tokens:.1f} µs/token{failed}"


def _steady(section: Result, adapters: int, load: str = STEADY) -> str:
    mean, p95, tpot = (
        figure(section, adapters, load, name) for name in ("ttft_ms_mean", "ttft_ms_p95", "tpot_ms_mean")
    )
    if mean is None or p95 is None or tpot is None:
        return "-"
    return f"{mean:,.1f} ({p95:,.1f}), {tpot:.1f}"


def _throughput(section: Result, adapters: int, load: str = SATURATED) -> str:
    tokens_per_s = figure(section, adapters, load, "output_tokens_per_s")
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f} tok/s"


def _plain(section: Result, adapters: int, load: str, name: str, form: str) -> str:
    found = figure(section, adapters, load, name)
    return "-" if found is None else f"{found:{form}}"


def _parameters(result: Result, load: str) -> Result:
    """Return the settings of a load, from the first section that has it."""
    every = (section for shape in SHAPES for section in servers(result, shape).values())
    found: Result = next(
        loads[load] for section in every if load in (loads := section["parameters"]["loads"])
    )
    return found


def _load(result: Result, load: str) -> str:
    found = _parameters(result, load)
    rate = found["requests_per_s"]
    return f"{found['concurrency']} at a time" if rate is None else f"{rate:g} req/s"


def _requests(result: Result, load: str) -> str:
    return f"{_parameters(result, load)['num_requests']:,}"
