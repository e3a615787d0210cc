"""The tables of structured output, from results/structured_libraries.json and structured_steps.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.markdown import Result, span, table

_SIDES = ("llguidance", "xgrammar")


def libraries_table(result: Result) -> str:
    """Show compiling and masks of both libraries: all rounds, and ratios within a round."""
    lines = []
    for size, found in result["results"].items():
        for case, measured in found["cases"].items():
            rounds = [measured["rounds"][side] for side in _SIDES]
            lines.append(
                (
                    f"{int(size):,}",
                    case,
                    *(span((each["compile_cpu_ms"] for each in side), ",.0f") for side in rounds),
                    _ratio("compile_cpu_ms", *reversed(rounds)),
                    *(span((each["mask_cpu_us"] for each in side), ",.0f") for side in rounds),
                    _ratio("mask_cpu_us", *rounds),
                    *(span((each["accept_cpu_us"] for each in side), ",.0f") for side in rounds),
                )
            )
    compiling = (*(f"compiling by {side}, ms" for side in _SIDES), "xgrammar over llguidance")
    masks = (*(f"a mask by {side}, µs" for side in _SIDES), "llguidance over xgrammar")
    tokens = (f"taking a token by {side}, µs" for side in _SIDES)
    return table(("tokens", "what", *compiling, *masks, *tokens), lines)


def slowest_masks(result: Result) -> str:
    """Say how long the slowest masks of a step took."""
    slowest = {
        side: max(
            each["slowest_batch_ms"]
            for found in result["results"].values()
            for measured in found["cases"].values()
            for each in measured["rounds"][side]
        )
        for side in _SIDES
    }
    words = " and ".join(f"{slowest[side]:,.0f} ms by {side}" for side in _SIDES)
    return f"The slowest masks of 32 answers took {words}, in time on the clock beside other programs.\n"


def _ratio(figure: str, more: Sequence[Result], less: Sequence[Result]) -> str:
    ratios = [a[figure] / b[figure] for a, b in zip(more, less, strict=True)]
    return f"{span(ratios, '.1f' if max(ratios) < 10 else ',.0f')}x"


def steps_table(result: Result) -> str:
    """Show decode steps with and without schemas, and their ratios, each of two steps beside each other."""
    found = result["results"]
    lines = []
    for title, figure in (("CPU time of a step", "step_cpu_ms"), ("time of a step", "step_ms")):
        plain, structured = found[figure]["plain"], found[figure]["structured"]
        ratios = [b / a for a, b in zip(plain, structured, strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        lines.append(
            (
                title,
                f"{statistics.median(plain):,.0f} ms",
                f"{statistics.median(structured):,.0f} ms",
                f"{middle:.2f}x ({lower:.2f}x to {upper:.2f}x)",
            )
        )
    heads = (f"{found['batch']} requests that decode", "without schemas", "each with a schema")
    return table((*heads, "ratio: median (middle half)"), lines)


def gpu_table(result: Result) -> str:
    """Show decode steps on a GPU with and without schemas."""
    found = result["results"]
    lines = []
    for kind, name in (("likeliest", "the likeliest token"), ("drawn", "a drawn token")):
        plain, structured = (found["kinds"][kind][side]["mean_ms"] for side in ("plain", "structured"))
        lines.append((name, f"{plain:.2f} ms", f"{structured:.2f} ms", f"{structured / plain:.3f}x"))
    heads = (f"{found['batch']} requests that decode", "without schemas", "each with a schema", "ratio")
    return table(heads, lines)


def gpu_note(result: Result) -> str:
    found, packages = result["results"], result["packages"]
    steps = min(side["steps"] for kind in found["kinds"].values() for side in kind.values())
    return (
        f"Means of {steps} steps or more for each figure, {result['date'][:10]}, "
        f"{result['machine']['gpu']}, {found['shape']} shape, random weights, bfloat16, a vocabulary of "
        f"{found['vocabulary']:,} tokens, torch {packages['torch']}, llguidance {packages['llguidance']}, "
        f"commit {result['git_commit']}.\n"
    )


def note(result: Result) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in result["packages"].items() if name != "loraplex"
    )
    return (
        f"Measured {result['date'][:10]} on {result['machine']['cores']} cores of "
        f"{result['machine']['cpu']}, shared with other programs, Python {result['python']}, {versions}, "
        f"commit {result['git_commit'] or 'unknown'}.\n"
    )
