"""The tables of `results/policies.json`: victims, queues, admission and start policies in the twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import stdev
from typing import Final

from benchmarks.markdown import Result, TableError, span, table

_SHIPPED: Final = "as shipped"
_BY_LOAD: Final = "admission-by-load"
_BY_SEED: Final = "victims-by-seed"
_KINDS: Final = ("victims", "queue", "admission", "start policy")


def loads_table(result: Result) -> str:
    """Return the loads and the figures as shipped: means, and the smallest and largest seed."""
    lines = []
    for name, section in _loads(result).items():
        figures = _of(section, _SHIPPED)
        lines.append(
            (
                f"{name}: {section['what']}",
                f"{section['requests_per_s']:.1f}, {section['share_of_capacity']:.0%}",
                _cell(figures["ttft_mean_s"], 1e3),
                _cell(figures["ttft_p99_s"], 1e3),
                _cell(figures["disk_reads"]),
                _cell(figures["device_loads"]),
                _cell(figures["output_tok_s"]),
                f"{figures['slo_attainment']['mean']:.1%}",
            )
        )
    headings = (
        "workload",
        "requests/s, of capacity",
        "TTFT, mean, ms",
        "p99, ms",
        "reads from disk",
        "loads to the device",
        "output tok/s",
        "SLO attained",
    )
    return table(headings, lines)


def changes_table(result: Result) -> str:
    """Mean TTFT and its 99th percentile against the shipped policy's, by the means of all seeds."""
    rows = [(name, *_line(result, name, _change)) for name in _names(result)]
    return table(("TTFT, mean and p99, against what is shipped", *_loads(result)), rows)


def ranges_table(result: Result) -> str:
    """The same of the mean TTFT for the seed where it is best and where it is worst."""
    rows = [(name, *_line(result, name, _range)) for name in _names(result)]
    return table(("mean TTFT, best and worst seed", *_loads(result)), rows)


def starts_table(result: Result) -> str:
    """Return the mean E2E latency with other start policies: joining spares one wait and adds others."""
    names = [name for name in _names(result) if _kind(result, name) == "start policy"]
    rows = [(name, *_line(result, name, _e2e_change)) for name in names]
    return table(("E2E, mean, against what is shipped", *_loads(result)), rows)


def memory_table(result: Result) -> str:
    """Return reads from disk, loads to the device, preemptions and the SLO attained, by policy."""
    rows = [(name, *_line(result, name, _traffic)) for name in (_SHIPPED, *_names(result))]
    headings = ("reads from disk / loads to the device / preemptions, SLO attained", *_loads(result))
    return table(headings, rows)


def admission_table(result: Result) -> str:
    """The shipped rule of admission against the one before it, at several loads."""
    try:
        found = result[_BY_LOAD]
    except KeyError:
        raise TableError(f"the section {_BY_LOAD!r} is missing; run benchmarks.policies {_BY_LOAD}") from None
    lines = [
        (
            f"{each['share_of_capacity']:.0%}",
            *(_before_and_after(each, name, 1e3) for name in ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")),
            *(_counts(each, name) for name in ("num_preemptions", "device_loads")),
        )
        for each in found["loads"]
    ]
    headings = ("load", "TTFT, mean, ms", "p99, ms", "E2E, mean, ms", "preemptions", "loads to the device")
    return table(headings, lines)


def victims_table(result: Result) -> str:
    """Victims by their value against LRU on every workload, by the means of all seeds."""
    try:
        found = result[_BY_SEED]
    except KeyError:
        raise TableError(f"the section {_BY_SEED!r} is missing; run benchmarks.policies {_BY_SEED}") from None
    figures = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
    lines = [
        (
            name,
            *(_paired(load, each) for each in figures),
            f"{load['lru']['disk_reads']['mean']:,.0f} to {load['by_value']['disk_reads']['mean']:,.0f}",
        )
        for name, load in found["loads"].items()
    ]
    headings = ("LRU to value", "TTFT, mean, ms", "p99, ms", "E2E, mean, ms", "reads from disk")
    return table(headings, lines)


def note(result: Result) -> str:
    sections = list(result.values())
    dates = " to ".join(sorted({each["date"][:10] for each in sections}))
    commits = ", ".join(dict.fromkeys(each["git_commit"] or "unknown" for each in sections))
    first = next(iter(_loads(result).values()))
    return (
        f"Computed {dates} by the twin with the profile {first['profile']}, {len(first['seeds'])} seeds "
        f"for each workload, Python {first['python']}, numpy {first['packages']['numpy']}, commit {commits}. "
        f"SLO: {first['slo']}.\n"
    )


def _before_and_after(load: Result, name: str, factor: float) -> str:
    """Return both means, the change, and that of the best and worst seed."""
    former, shipped = load["former"][name], load["shipped"][name]
    seeds = (new / old - 1 for new, old in zip(shipped["runs"], former["runs"], strict=True))
    means = f"{former['mean'] * factor:,.0f} to {shipped['mean'] * factor:,.0f}"
    return f"{means}: {shipped['mean'] / former['mean'] - 1:+.1%} (seeds {span(seeds, '+.1%')})"


def _paired(load: Result, name: str) -> str:
    """Return both means in milliseconds, the change, and two standard errors of the seeds' changes."""
    lru, by_value = load["lru"][name], load["by_value"][name]
    changes = [new / old - 1 for new, old in zip(by_value["runs"], lru["runs"], strict=True)]
    error = 2 * stdev(changes) / math.sqrt(len(changes))
    means = f"{lru['mean'] * 1e3:,.0f} to {by_value['mean'] * 1e3:,.0f}"
    return f"{means}: {by_value['mean'] / lru['mean'] - 1:+.1%} (± {error:.1%})"


def _counts(load: Result, name: str) -> str:
    return f"{load['former'][name]['mean']:,.1f} to {load['shipped'][name]['mean']:,.1f}"


def _loads(result: Result) -> Result:
    """The sections in which all candidates were run."""
    return {name: section for name, section in result.items() if "policies" in section}


def _names(result: Result) -> list[str]:
    """Candidates by kind, each under its name."""
    kinds = {
        name: each["kind"]
        for section in _loads(result).values()
        for name, each in section["policies"].items()
        if name != _SHIPPED
    }
    if unknown := set(kinds.values()) - set(_KINDS):
        raise TableError(f"a policy of an unknown kind, {min(unknown)!r}")
    return sorted(kinds, key=lambda name: _KINDS.index(kinds[name]))


def _kind(result: Result, name: str) -> str | None:
    """Return the kind of a candidate that all workloads have."""
    kinds = (section["policies"].get(name, {}).get("kind") for section in _loads(result).values())
    return next(kinds, None)


def _line(result: Result, name: str, cell: Callable[[Result, str], str]) -> Iterator[str]:
    for section in _loads(result).values():
        yield cell(section, name) if name in section["policies"] else "as shipped"


def _change(section: Result, name: str) -> str:
    mean, p99 = (_ratio(section, name, figure) - 1 for figure in ("ttft_mean_s", "ttft_p99_s"))
    return f"{mean:+.1%}, {p99:+.1%}"


def _e2e_change(section: Result, name: str) -> str:
    return f"{_ratio(section, name, 'e2e_mean_s') - 1:+.1%}"


def _range(section: Result, name: str) -> str:
    shipped, found = (_of(section, each)["ttft_mean_s"]["runs"] for each in (_SHIPPED, name))
    return span((new / old - 1 for new, old in zip(found, shipped, strict=True)), "+.1%")


def _traffic(section: Result, name: str) -> str:
    figures = _of(section, name)
    counts = (figures[each]["mean"] for each in ("disk_reads", "device_loads", "num_preemptions"))
    return f"{' / '.join(f'{each:,.0f}' for each in counts)}, {figures['slo_attainment']['mean']:.1%}"


def _ratio(section: Result, name: str, figure: str) -> float:
    found: float = _of(section, name)[figure]["mean"] / _of(section, _SHIPPED)[figure]["mean"]
    return found


def _of(section: Result, name: str) -> Result:
    found: Result = section["policies"][name]["figures"]
    return found


def _cell(figure: Result, factor: float = 1.0) -> str:
    runs = span((each * factor for each in figure["runs"]), ",.0f")
    return f"{figure['mean'] * factor:,.0f} ({runs})"
