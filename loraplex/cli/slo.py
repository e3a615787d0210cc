"""Service level objectives as options spell them: 1.5x, 30ms or 0.03s per token, 10s to the first token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import typer

from loraplex.twin.slo import Slo

SloTpt = Annotated[
    str | None,
    typer.Option(
        "--slo-tpt",
        help="Time per token that a request may take: 1.5x of the base model alone, or 30ms; default: 1.5x, "
        "with --slo-ttft any.",
    ),
]
SloTtft = Annotated[
    str | None,
    typer.Option(
        "--slo-ttft", help="Time to the first token that a request may take: 10s or 500ms; default: any."
    ),
]

_DEFAULT_TPT: Final = "1.5x"
_MULTIPLE: Final = "x"
_PER_SECOND: Final = {"ms": 1e3, "s": 1.0}
_FORM: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(x|ms|s)\s*")


class AskedSlo(NamedTuple):
    """An SLO as options give it. At most one of the first two is there: seconds per token, or a multiple of
    what the base model takes alone."""

    tpt_s: float | None
    tpt_multiple: float | None
    ttft_s: float | None

    def slo(self, base_tpt_s: Callable[[], float]) -> Slo:
        """Return it in seconds. `base_tpt_s`: what the base model takes alone; asked only for a multiple."""
        multiple = self.tpt_multiple
        return Slo(tpt_s=self.tpt_s if multiple is None else multiple * base_tpt_s(), ttft_s=self.ttft_s)


def parse_slo(slo_tpt: str | None, slo_ttft: str | None) -> AskedSlo:
    """Read both options. Raises a usage error, which names the one that is wrong."""
    ttft_s = None if slo_ttft is None else _parse_ttft(slo_ttft)
    if slo_tpt is None and ttft_s is not None:
        return AskedSlo(None, None, ttft_s)
    text = _DEFAULT_TPT if slo_tpt is None else slo_tpt
    amount, unit = _parse(
        text, "--slo-tpt", "1.5x for a multiple of what the base model takes alone, or 30ms or 0.03s"
    )
    if unit == _MULTIPLE:
        return AskedSlo(None, amount, ttft_s)
    return AskedSlo(amount / _PER_SECOND[unit], None, ttft_s)


def _parse_ttft(text: str) -> float:
    amount, unit = _parse(text, "--slo-ttft", "10s or 500ms")
    if unit == _MULTIPLE:
        raise typer.BadParameter(
            f"{text!r} is a multiple, which has no meaning here, as prompts differ; write 10s or 500ms",
            param_hint="--slo-ttft",
        )
    return amount / _PER_SECOND[unit]


def _parse(text: str, option: str, examples: str) -> tuple[float, str]:
    """Return an amount above zero, and its unit."""
    found = _FORM.fullmatch(text)
    amount = float(found[1]) if found else math.nan
    if found is None or not 0 < amount < math.inf:
        raise typer.BadParameter(f"{text!r} is no objective; write {examples}", param_hint=option)
    return amount, found[2]
