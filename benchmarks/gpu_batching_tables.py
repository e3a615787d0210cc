"""The tables of `results/gpu_batching.json`: merging, swapping and batching policies on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import Result, TableError, table, when_and_what

_QUEUED = ("fcfs", "auto")
_MODULES = {"q,k,v": "q, k and v", "all": "all linears"}


def merge_table(result: Result) -> str:
    """Return what merging an adapter costs."""
    lines = [
        (
            f"{row['rank']} on {_MODULES[row['modules']]}",
            f"{row['merged_mb'] / 1e3:.1f} GB",
            f"{row['merge_ms']:.2f}",
            f"{row['worst_merge_ms']:.2f}",
            f"{row['tb_per_s']:.2f}",
        )
        for row in _rows(result, "merge")
    ]
    return table(("rank", "weights written", "ms", "slowest, ms", "TB/s, read and written"), lines)


def switch_table(result: Result) -> str:
    """Return what changing between merged and unmerged steps costs."""
    found = _rows(result, "switch")
    itl_ms = found["itl_ms"]
    shown = [f"{itl_ms[name]['mean']:.3f}" for name in ("merged", "unmerged", "in turns")]
    headings = ("requests", "merged steps, ms", "unmerged, ms", "in turns, ms", "a switch, ms")
    return table(headings, [(str(found["batch"]), *shown, f"{found['switch_ms']:+.4f}")])


def steps_table(result: Result) -> str:
    """Return merged steps beside those of the base model, and of the same adapter unmerged."""
    lines = []
    for row in _rows(result, "steps"):
        is_decode = row["what"] == "decode"
        merged, base, unmerged = (
            row[f"{name}_ms"]["mean" if is_decode else "p50"]
            for name in ("merged_adapter", "merged_base", "unmerged_adapter")
        )
        lines.append(
            (
                f"decode, {row['batch']} requests" if is_decode else f"prompt of {row['tokens']:,} tokens",
                f"{row['rank']} on {_MODULES[row['modules']]}",
                f"{base:.2f}",
                f"{merged:.2f} ({merged / base:.2f}x)",
                f"{unmerged:.2f} ({unmerged / base:.2f}x)",
            )
        )
    return table(("step", "rank", "base model, ms", "merged, ms", "unmerged, ms"), lines)


def swap_table(result: Result) -> str:
    """Return copies of keys and values, and decode beside them."""
    found = _rows(result, "swap")
    lines = [
        (
            f"{found['mb']} MB {way}",
            f"{found[name]['plain_ms']:.2f}",
            f"{found[name]['swap_ms']:.2f} ({found[name]['over_plain']:.2f}x)",
            f"{found[name]['gb_per_s']:.1f}",
        )
        for name, way in (("out", "to the host"), ("in", "to the device"))
    ]
    without, beside = (found["decode_ms"][name] for name in ("without", "with"))
    copies = table(("1,000 tokens", "plain copy, ms", "swap, ms", "GB/s"), lines)
    figures = [(key, f"{without[key]:.2f}", f"{beside[key]:.2f}") for key in ("mean", "p50", "p95", "p99")]
    steps = table(("decode, 32 requests", "alone, ms", "beside copies both ways, ms"), figures)
    return f"{copies}\n{steps}"


def served_table(result: Result) -> str:
    """Return the loads that were served, by policy."""
    lines = [
        (
            row["what"],
            row["policy"],
            f"{row['output_tok_s']:,}",
            f"{row['ttft_mean_s'] * 1e3:.0f}",
            f"{row['s_per_token'] * 1e3:.1f}",
            f"{row['e2e_mean_s']:.2f}",
            "-" if row["policy"] in ("fcfs", "base model") else f"{row['beyond_bound_s']:+.2f}",
            f"{row['num_merged_steps'] / row['num_steps']:.0%}",
        )
        for section in ("hot", "queue", "skew")
        if section in result
        for row in _rows(result, section)
    ]
    if not lines:
        return "Not measured yet.\n"
    headings = (
        *("load", "policy", "output tok/s", "TTFT, mean, ms", "per token, ms", "E2E, mean, s"),
        *("beyond the bound, s", "merged steps"),
    )
    return table(headings, lines)


def queue_steps_table(result: Result) -> str:
    """Return what a step of a long queue takes, beside the base model's, and how many adapters it reads."""
    by_queue: dict[str, dict[str, Any]] = {}
    for row in _rows(result, "queue"):
        by_queue.setdefault(row["what"], {})[row["policy"]] = row
    lines = []
    for what, rows in by_queue.items():
        base_ms, fcfs_ms = (_step_ms(rows[policy]) for policy in ("base model", "fcfs"))
        read = (f"{rows[each]['num_step_adapters'] / rows[each]['num_steps']:.0f}" for each in _QUEUED)
        lines.append((what, f"{base_ms:.2f}", f"{fcfs_ms:.2f}", f"{fcfs_ms - base_ms:.2f}", *read))
    headings = ("queue", "step of the base model, ms", "of fcfs, ms", "longer by, ms")
    return table((*headings, *(f"adapters a step, {each}" for each in _QUEUED)), lines)


def _step_ms(row: Result) -> float:
    """Return the mean of all steps of a queue, which begin at once and end with the longest request."""
    mean_ms: float = row["e2e_max_s"] / row["num_steps"] * 1e3
    return mean_ms


def note(result: Result) -> str:
    dates, commits = when_and_what(result)
    first = next(iter(result.values()))
    return (
        f"{first['machine']['gpu']}, random weights of {first['shape']} in bfloat16, {dates}, torch "
        f"{first['packages']['torch']}, triton {first['packages']['triton']}, commits {commits}.\n"
    )


def _rows(result: Result, section: str) -> Any:
    try:
        return result[section]["results"]
    except KeyError:
        raise TableError(
            f"the section {section!r} is missing; run python -m benchmarks.gpu_batching {section}"
        ) from None
