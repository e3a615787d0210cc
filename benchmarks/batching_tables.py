"""The tables of `results/batching.json` and `results/kv_swap.json`: batching policies and swapping, in the
twin."""

from __future__ import annotations

from benchmarks.markdown import Result, TableError, span, table, when_and_what

_BASE = "base model"
_FCFS = "fcfs"
_BOUNDED = ("grouped", "auto")
_DYNAMIC = ("dynamic", "dynamic, tuned as in dLoRA's code", "auto")
_DLORA_S_PER_TOKEN = {
    4: (1.25, 2.28, 0.58),
    8: (1.34, 1.53, 0.68),
    16: (1.35, 1.12, 0.72),
    32: (1.43, 1.06, 0.60),
}
"""Seconds per token by functions for each adapter, unmerged only, merged only and dLoRA: its Figure 10, from
its published results."""


def queue_table(result: Result) -> str:
    """Return the throughput of a long queue over the base model's, and how late first tokens were."""
    lines = []
    for what, policies in _cases(result, "queue").items():
        base = policies[_BASE]["output_tok_s"]
        for name, figures in policies.items():
            if name == _BASE:
                continue
            rates = figures["output_tok_s"]
            ratios = [one / other for one, other in zip(rates["runs"], base["runs"], strict=True)]
            lines.append(
                (
                    what,
                    name,
                    f"{rates['mean']:,.0f}",
                    f"{rates['mean'] / base['mean']:.3f}x ({span(ratios, '.3f')})",
                    _cell(figures["ttft_mean_s"]),
                    _cell(figures["e2e_mean_s"]),
                    "-" if name == _FCFS else f"{max(figures['beyond_bound_s']['runs']):+.2f}",
                )
            )
    headings = (
        *("adapters", "policy", "output tok/s", "over the base model", "TTFT, mean, s", "E2E, mean, s"),
        "beyond the bound, s",
    )
    return table(headings, lines)


def skew_table(result: Result) -> str:
    """Return the time per token by policy, for each skewness, and how late first tokens are."""
    cases = _cases(result, "skew")
    names = list(next(iter(cases.values())))
    lines = [
        (
            what,
            *(_times_per_token(policies[name]) for name in names),
            *(f"{max(policies[name]['beyond_bound_s']['runs']):+.2f}" for name in _BOUNDED),
        )
        for what, policies in cases.items()
    ]
    beyond = (f"{name} beyond the bound, s" for name in _BOUNDED)
    return table(("seconds per token (P90), longest request", *names, *beyond), lines)


def _times_per_token(figures: Result) -> str:
    mean_s, p90_s, longest_s = (
        figures[name]["mean"] for name in ("s_per_token", "s_per_token_p90", "e2e_max_s")
    )
    return f"{mean_s:.3f} ({p90_s:.3f}), {longest_s:,.0f} s"


def factors_table(result: Result) -> str:
    """Return by what factor the time per token is shorter than that of each half alone, as dLoRA published
    it, and in the twin with its costs."""
    cases = _cases(result, "skew")
    lines = []
    for num_functions, (unmerged_s, merged_s, dlora_s) in _DLORA_S_PER_TOKEN.items():
        ours = cases[f"dLoRA's costs, {num_functions} functions each"]
        fcfs_s, only_s, *dynamic_s = (
            ours[name]["s_per_token"]["mean"] for name in (_FCFS, "merged", *_DYNAMIC)
        )
        factors = (merged_s / dlora_s, unmerged_s / dlora_s)
        found = [(only_s / each, fcfs_s / each) for each in dynamic_s]
        cells = (f"{over_merged:.1f}x, {over_fcfs:.1f}x" for over_merged, over_fcfs in (factors, *found))
        lines.append((str(num_functions), *cells))
    return table(("functions each", "dLoRA, published", *_DYNAMIC), lines)


def hot_table(result: Result) -> str:
    """Return the latencies with one hot adapter."""
    lines = [
        (
            what,
            name,
            _cell(figures["ttft_mean_s"], 1e3),
            _cell(figures["s_per_token"], 1e3),
            _cell(figures["e2e_mean_s"]),
            _cell(figures["e2e_p90_s"]),
        )
        for what, policies in _cases(result, "hot").items()
        for name, figures in policies.items()
    ]
    headings = ("traffic", "policy", "TTFT, mean, ms", "per token, ms", "E2E, mean, s", "E2E, p90, s")
    return table(headings, lines)


def kv_swap_table(result: Result) -> str:
    """Return the goodput with and without swapping, where KV memory is for a third of what runs."""
    lines = [
        (
            found["what"],
            f"{found['kv_tokens']:,}",
            *(f"{found['goodput_rps'][name]:.2f}" for name in ("recompute", "swap")),
            f"{found['goodput_ratio']:.2f}x",
            f"{rate}: " + ", ".join(f"{by_way[name]['ttft_mean_s']:.2f}" for name in ("recompute", "swap")),
        )
        for found in result["sections"].values()
        for rate, by_way in [next(iter(found["at"].items()))]
    ]
    headings = (
        "requests",
        "KV memory, tokens",
        "computed again, requests/s",
        "or swapped, requests/s",
        "gain",
        "mean TTFT at one rate, computed again and swapped, s",
    )
    return table(headings, lines)


def note(result: Result) -> str:
    dates, commits = when_and_what(result)
    first = next(iter(result.values()))
    return (
        f"Computed {dates} by the twin with the profile {first['profile']}, {len(first['seeds'])} seeds for "
        f"each row (smallest and largest in brackets), Python {first['python']}, commit {commits}.\n"
    )


def _cases(result: Result, section: str) -> Result:
    try:
        found: Result = result[section]["cases"]
    except KeyError:
        raise TableError(
            f"the section {section!r} is missing; run python -m benchmarks.batching {section}"
        ) from None
    return found


def _cell(figure: Result, factor: float = 1.0) -> str:
    digits = ".2f" if factor == 1.0 else ".1f"
    runs = span((each * factor for each in figure["runs"]), digits)
    return f"{figure['mean'] * factor:{digits}} ({runs})"
