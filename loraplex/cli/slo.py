"""Parsing of service level objectives: 1.5x, 30ms or 0.03s per token, 10s to the first token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from loraplex.cli.durations import parse_duration
from loraplex.server.durations import duration_s
from loraplex.twin.slo import Slo

if TYPE_CHECKING:
    from loraplex.twin.fleet_run import BaseTimes

SloTpt = Annotated[
    str | None,
    typer.Option(
        "--slo-tpt",
        help="Limit on TPT, a request's whole time over its output tokens: 30ms, or 1.5x, a multiple of what "
        "the base model takes alone; default: 1.5x, or none if another limit is given.",
    ),
]
SloTpot = Annotated[
    str | None,
    typer.Option(
        "--slo-tpot",
        help="Limit on TPOT, the time per output token after the first: 1.5x or 30ms; default: none.",
    ),
]
SloTtft = Annotated[
    str | None,
    typer.Option(
        "--slo-ttft", help="Limit on TTFT, the time to the first token: 10s or 500ms; default: none."
    ),
]

_DEFAULT_TPT: Final = "1.5x"
_MULTIPLE: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*x\s*")
_EXAMPLES: Final = "1.5x for a multiple of what the base model takes alone, or 30ms or 0.03s"


class _Limit(NamedTuple):
    """A limit as given in an option: seconds, or a multiple of the base model's latency alone."""

    amount: float
    is_multiple: bool

    def seconds(self, base_s: float) -> float:
        return self.amount * base_s if self.is_multiple else self.amount


class AskedSlo(NamedTuple):
    """An SLO as given in options."""

    tpt: _Limit | None
    tpot: _Limit | None
    ttft_s: float | None

    def slo(self, base_times: Callable[[], BaseTimes]) -> Slo:
        """Return the SLO in seconds. `base_times`: the base model's latencies alone; called only for
        multiples."""
        is_multiple = any(limit is not None and limit.is_multiple for limit in (self.tpt, self.tpot))
        base_tpt_s, base_tpot_s = base_times() if is_multiple else (math.nan, math.nan)
        return Slo(
            tpt_s=None if self.tpt is None else self.tpt.seconds(base_tpt_s),
            tpot_s=None if self.tpot is None else self.tpot.seconds(base_tpot_s),
            ttft_s=self.ttft_s,
        )


def parse_slo(slo_tpt: str | None, slo_tpot: str | None, slo_ttft: str | None) -> AskedSlo:
    """Parse all options. Raises a usage error that names the wrong one."""
    ttft_s = None if slo_ttft is None else parse_duration(slo_ttft, "--slo-ttft")
    tpot = None if slo_tpot is None else _parse_pace(slo_tpot, "--slo-tpot")
    if slo_tpt is None:
        slo_tpt = _DEFAULT_TPT if slo_tpot is None and slo_ttft is None else None
    return AskedSlo(None if slo_tpt is None else _parse_pace(slo_tpt, "--slo-tpt"), tpot, ttft_s)


def _parse_pace(text: str, option: str) -> _Limit:
    """Return a limit above zero."""
    multiple = _MULTIPLE.fullmatch(text)
    amount = duration_s(text) if multiple is None else float(multiple[1])
    if amount is None or not 0 < amount < math.inf:
        raise typer.BadParameter(f"{text!r} is no objective; write {_EXAMPLES}", param_hint=option)
    return _Limit(amount, is_multiple=multiple is not None)
