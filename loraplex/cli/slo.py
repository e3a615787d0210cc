"""Service level objectives as options spell them: 1.5x, 30ms or 0.03s."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

import typer

_FORM: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(x|ms|s)\s*")


class Slo(NamedTuple):
    """Seconds, or a multiple of what the base model takes alone."""

    seconds: float | None
    multiple: float | None


def parse_slo(text: str, option: str) -> Slo:
    found = _FORM.fullmatch(text)
    amount = float(found[1]) if found else math.nan
    if found is None or not 0 < amount < math.inf:
        raise typer.BadParameter(
            f"{text!r} is no objective; write 1.5x for a multiple of what the base model takes alone, or "
            "30ms or 0.03s",
            param_hint=option,
        )
    if found[2] == "x":
        return Slo(None, amount)
    return Slo(amount / 1e3 if found[2] == "ms" else amount, None)
