"""The tables of `results/batching.json` and `results/kv_swap.json`: batching policies and swapping, in the
twin."""

from __future__ import annotations

from benchmarks.markdown import Result, TableError, span, table, when_and_what

_BASE = "base model"
_FCFS = "fcfs"


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
    """Return the time per token by policy, for each skewness, and how late first tokens are with `auto`."""
    cases = _cases(result, "skew")
    names = list(next(iter(cases.values())))
    lines = [
        (
            what,
            *(
                f"{policies[name]['s_per_token']['mean']:.3f}, {policies[name]['e2e_max_s']['mean']:,.0f} s"
                for name in names
            ),
            f"{max(policies['auto']['beyond_bound_s']['runs']):+.2f}",
        )
        for what, policies in cases.items()
    ]
    return table(("seconds per token, longest request", *names, "auto beyond the bound, s"), lines)


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
        )
        for found in result["sections"].values()
    ]
    headings = (
        "requests",
        "KV memory, tokens",
        "computed again, requests/s",
        "or swapped, requests/s",
        "gain",
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
