"""The table of costs of request sets, from the sections `sets` and `padded_sets` of gpu_engine.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from benchmarks.markdown import Result, TableError, table

_SECTIONS: Final = {"sets": "ranks as they are", "padded_sets": "padded to the largest rank"}
_FORMS: Final = {"papers": "as in the papers", "by_request": "with a term for each request"}


def set_costs_table(result: Result) -> str:
    head = ("kernels", "form", "decode step, us", "R²", "worst error", "prefill, R²", "worst error")
    return table(head, list(_rows(result)))


def set_costs_note(result: Result) -> str:
    made = _section(result, "sets")
    padded = _section(result, "padded_sets")
    return (
        f"Measured {made['date'][:10]} on one {made['machine']['gpu']}, {made['shape']}, LoRA on q, k and "
        f"v, commit {made['git_commit']}: {len(made['results']['sets'])} sets with ranks as they are, "
        f"{len(padded['results']['sets'])} with padding (more padded adapters do not fit), of 4 to 64 "
        f"requests with an adapter each, ranks 8 to 128.\n"
    )


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    for section, kernels in _SECTIONS.items():
        for form, name in _FORMS.items():
            fit = _section(result, section)["results"]["fit"][form]
            decode, prefill = fit["decode_quality"], fit["prefill_quality"]
            yield (
                kernels,
                name,
                _decode_form(fit, section),
                f"{decode['r_squared']:.3f}",
                f"{decode['worst_error']:.0%}",
                f"{prefill['r_squared']:.3f}",
                f"{prefill['worst_error']:.0%}",
            )


def _decode_form(fit: dict[str, Any], section: str) -> str:
    ranks = "requests x largest rank" if section == "padded_sets" else "sum of ranks"
    terms = [f"{fit['decode_base_s'] * 1e6:,.0f}", f"{fit['decode_rank_s'] * 1e6:.2f} x {ranks}"]
    if fit["decode_request_s"]:
        terms.append(f"{fit['decode_request_s'] * 1e6:.1f} x requests")
    return " + ".join(terms)


def _section(result: Result, name: str) -> Any:
    try:
        return result[name]
    except KeyError:
        raise TableError(f"the section {name!r} is missing; run benchmarks.gpu_engine {name}") from None
