"""Tables of cold starts with copies slowed down: measured (`benchmarks.slow_bus`), and simulated
(`benchmarks.twin_slow_bus`)."""

from __future__ import annotations

from benchmarks.gpu_cold import BURST, SETUPS
from benchmarks.markdown import Result, table


def ttft_table(result: Result) -> str:
    """Return the mean TTFT of every policy: one request on an idle engine, a burst, and setups."""
    rows = [
        [rate, case, *(f"{means_ms[policy]:.1f} ms" for policy in means_ms)]
        for rate, section in result.items()
        for case, means_ms in _cases(section["results"])
    ]
    policies = list(next(iter(_cases(next(iter(result.values()))["results"])))[1])
    return table(["copies", "case", *(f"`{policy}`" for policy in policies)], rows)


def _cases(found: Result) -> list[tuple[str, dict[str, float]]]:
    """Return the mean TTFT in milliseconds by case and policy."""
    cases = []
    for tokens, policies in found["idle"].items():
        # Adapters of `cached` are never anywhere else.
        means = {name: times.get("host", times["ready"])["mean"] for name, times in policies.items()}
        cases.append((f"one request, {tokens}", means))
    cases.append((f"{BURST} at once", {name: times["mean"] for name, times in found["burst"].items()}))
    for name, setup in found["setups"].items():
        means = {policy: one["ttft_ms"]["mean"] for policy, one in setup["policies"].items()}
        cases.append((_title(name, setup["rank"], setup["requests_per_s"]), means))
    return cases


def twin_table(measured: Result, simulated: Result) -> str:
    """Return the mean TTFT that the twin predicts, and how far that is off what was measured, if it was."""
    rows = []
    for rate, predicted in simulated["ttft_mean_ms"].items():
        measured_ms = dict(_cases(measured[rate]["results"]))
        for case, found_ms in _simulated_cases(predicted):
            cells = (_deviation(each, measured_ms.get(case, {}).get(name)) for name, each in found_ms.items())
            rows.append([rate, case, *cells])
    policies = list(next(iter(_cases(next(iter(measured.values()))["results"])))[1])
    return table(["copies", "case", *(f"`{policy}`" for policy in policies)], rows)


def _simulated_cases(predicted: Result) -> list[tuple[str, dict[str, float]]]:
    """Return the cases that the twin predicts, like `_cases`."""
    setups = {setup.name: _title(setup.name, setup.rank, setup.requests_per_s) for setup in SETUPS}
    return [
        *((f"one request, {tokens}", means) for tokens, means in predicted["idle"].items()),
        (f"{BURST} at once", predicted["burst"]),
        *((setups[name], means) for name, means in predicted["setups"].items()),
    ]


def _title(name: str, rank: int, requests_per_s: float) -> str:
    return f"{name}: rank {rank}, {requests_per_s:g} requests/s"


def _deviation(found_ms: float, measured_ms: float | None) -> str:
    return f"{found_ms:.1f} ms" + ("" if measured_ms is None else f" ({found_ms / measured_ms - 1:+.0%})")


def twin_note(simulated: Result) -> str:
    return (
        f"Computed {simulated['date'][:10]} by the twin with the profile of this page, Python "
        f"{simulated['python']}, commit {simulated['git_commit'] or 'unknown'}.\n"
    )
