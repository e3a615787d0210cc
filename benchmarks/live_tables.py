"""The tables of live fleets: what the front adds, killed replicas, changing versions, comparison with the
twin, vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.markdown import Result, span, table

_AIMS: Final[dict[str, tuple[str, str]]] = {"ttft_added_ms": ("2", "8"), "gap_added_ms": ("", "3")}
"""Targets at p50 and p99."""
_OF_REPLICAS: Final = ("drain", "undrain", "restart", "scale")
_WRONG_TITLES: Final[dict[str, str]] = {
    "another version than promised": "answers of another version than promised",
    "tokens of another version": "answers with the tokens of another version",
    "tokens of no version": "answers with the tokens of no version",
    "refused though served": "404 for a name that was served",
    "header and usage differ": "answers whose header and usage differ",
    "request lines that differ": "lines of the log about requests that differ",
    "audit lines that differ": "audit lines that differ",
    "lists unlike what was promised": "names in lists that are unlike what was promised",
}
"""Errors that must not occur -> their titles in the table."""


_KILLED: Final = {
    "alone": "engine processes, one at a time",
    "overlapping": "engine processes, before the last is back",
    "servers": "servers behind a front",
}


def front_table(result: Result) -> str:
    """Show what the front adds to first tokens and to gaps, over all rounds."""
    lines = []
    for replicas in sorted({each["replicas"] for each in result["results"]}):
        rounds = [each for each in result["results"] if each["replicas"] == replicas]
        found = [span([each[kind][q] for each in rounds], ".1f") for kind in _AIMS for q in ("p50", "p99")]
        failed = sum(each["failed"] for each in rounds)
        name = "one engine (`serve`)" if replicas == 1 else f"{replicas} replicas"
        lines.append((name, *found, f"{failed} of {sum(each['requests'] for each in rounds):,}"))
    lines.append(("wanted", *(aim for aims in _AIMS.values() for aim in aims), "0"))
    return table(
        ("behind the front", "TTFT p50, ms", "TTFT p99, ms", "gap p50, ms", "gap p99, ms", "failed"), lines
    )


def front_note(result: Result) -> str:
    parameters = result["parameters"]
    return (
        f"{_where(result)}, {parameters['requests_per_s']:g} requests/s at random times (Poisson), "
        f"{parameters['tokens']} tokens each, one every {1e3 * parameters['pace_s']:g} ms: about 200 streams "
        "are open.\n"
    )


def kills_table(result: Result) -> str:
    """Show the outcomes of answers, by how replicas were killed."""
    lines = []
    for name, title in _KILLED.items():
        if (part := result.get(name)) is None:
            continue
        answers = part["answers"]
        total, good = sum(answers.values()), answers.get("as undisturbed", 0)
        kills = ", ".join(f"{count} {way}" for way, count in part["kills"].items())
        pauses = ", ".join(
            f"{way} {each['p50']:.2f} / {each['p95']:.2f}" for way, each in part["pause_s"].items() if each
        )
        back = ", ".join(f"{way} {each['p95']:.1f}" for way, each in part["replaced_s"].items())
        wrong = answers.get("other tokens", 0)
        share = f"{good:,} of {total:,} ({good / total:.2%})"
        lines.append((title, kills, share, f"{wrong}", pauses, back or "-"))
    lines.append(("wanted", "200 in all", "99.9%", "0", "p95 2 s", "15 s"))
    heads = ("answers as undisturbed", "with other tokens", "pause p50 / p95, s", "replaced after p95, s")
    return table(("what", "taken away", *heads), lines)


def kills_note(result: Result) -> str:
    parameters, joined = result["parameters"], result.get("alone", {}).get("joined_s")
    joins = (
        f" A new replica served after {joined['p50']:.1f} s, {joined['max']:.1f} s at the most (15 wanted)."
        if joined
        else ""
    )
    return (
        f"{_where(result)}, {parameters['replicas']} replicas, {parameters['streams']} streams at a time of "
        f"{parameters['tokens']} tokens each.{joins}\n"
    )


def versions_table(result: Result) -> str:
    """Show what was done to a fleet, and whether its answers had the promised versions."""
    changes, moves, wrong = result["changes"], result["moves"], result["wrong"]
    replicas = {name: count for name, count in changes.items() if name.partition(" ")[0] in _OF_REPLICAS}
    versions = {name: count for name, count in changes.items() if name not in replicas}
    lines = [
        ("requests", f"{result['requests']:,}", "100,000"),
        ("answers, of these streamed", f"{result['answers']:,}, {result['streams']:,}", ""),
        ("404 for a name that was not served just then", f"{result['not served']:,}", ""),
        ("errors, of adapters whose files were overwritten", _counts(result["errors_overwritten"]), ""),
        ("other errors", _counts(result["errors"]), ""),
        ("changes of versions", _counts(versions), ""),
        ("changes of versions that were refused", _counts(result["changes_refused"]), ""),
        ("changes of replicas", _counts(replicas), ""),
        ("replicas killed", f"{result['kills']}", ""),
        (
            "plans that moved adapters, adapters brought in",
            f"{moves['plans']}, {moves['adapters_brought']}",
            "",
        ),
        (
            "requests that went on elsewhere: after a death, moved",
            f"{moves['requests_after_a_death']:,}, {moves['requests_moved']:,}",
            "",
        ),
        ("answers by canaries, while there was one", _canaries(result["canaries"]), ""),
        *((_WRONG_TITLES[what], f"{count}", "0") for what, count in wrong.items()),
    ]
    return table(("", "measured", "wanted"), lines)


def versions_note(result: Result) -> str:
    parameters = result["parameters"]
    return (
        f"{_where(result)}, in {result['seconds'] / 60:.0f} minutes: {parameters['replicas']} replicas, "
        f"{parameters['clients']} requests at a time, {parameters['adapters']} adapters of "
        f"{parameters['versions']} versions each, the files of {parameters['overwritten']} overwritten.\n"
    )


def live_table(result: Result) -> str:
    """Show the twin beside the fleet that served the same workload."""
    lines = []
    for each in result["results"]:
        live, twin, off = each["live"], each["twin"], each["differences"]
        lines.append(
            (
                f"`{each['policy']}`",
                f"{live['adapter_loads']} / {twin['adapter_loads']} ({off['adapter_loads']:+.0%})",
                f"{_shares(live['shares'])} / {_shares(twin['shares'])} ({100 * off['share']:.1f} points)",
                f"{live['ttft_mean_ms']:.0f} / {twin['ttft_mean_ms']:.0f} ms ({off['ttft_mean']:+.0%})",
                f"{each['step_factor']:.2f}x",
            )
        )
    lines.append(("wanted", "10%", "5 points", "15%", ""))
    heads = (
        "adapter loads, live / twin",
        "shares of requests, live / twin",
        "mean TTFT, live / twin",
        "steps, live / profile",
    )
    return table(("policy", *heads), lines)


def vllm_table(result: Result) -> str:
    """Show a fleet in front of vLLM servers, by routing."""
    found = result["routings"]
    lines = [
        (
            f"`{name}`",
            f"{each['adapter_loads']}",
            f"{each['ttft_mean_ms']:.0f}, p95 {each['ttft_p95_ms']:.0f} ms",
            f"{each['failed']} of {each['requests']}",
        )
        for name, each in found.items()
    ]
    before = found["round-robin"]
    for name, each in found.items():
        if each is not before:
            loads = each["adapter_loads"] / before["adapter_loads"]
            waits = each["ttft_mean_ms"] / before["ttft_mean_ms"]
            lines.append((f"`{name}` over `round-robin`", f"{loads:.2f}x", f"{waits:.2f}x", ""))
    if_packed = result["loads_if_packed"]
    packed = f"{if_packed}, {if_packed / before['adapter_loads']:.2f}x"
    lines.append(("popularity known, two servers' slots for eight adapters", packed, "", ""))
    lines.append(("wanted", "0.33x", "0.50x", "0"))
    return table(("routing", "adapter loads", "mean TTFT", "failed"), lines)


def note(result: Result) -> str:
    return f"{_where(result)}.\n"


def _where(result: Result) -> str:
    machine = result["machine"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, commit "
        f"{result['git_commit'] or 'unknown'}"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "0"


def _canaries(found: Result) -> str:
    if not found["requests"]:
        return "-"
    return f"{found['share']:.1%} of {found['requests']:,}, asked for {found['share_asked']:.1%}"


def _shares(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.0f}" for share in shares) + "%"
