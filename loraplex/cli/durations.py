"""Options that are durations: all have one form, `2s` or `500ms`. A number alone is in seconds."""

from __future__ import annotations

import math
from typing import Any

import typer

from loraplex.server.durations import DURATION_FORM, duration_s


class Duration(float):
    """A duration in seconds, shown as it is written."""

    def __str__(self) -> str:
        return f"{self * 1000:g}ms" if 0 < self < 1 else f"{float(self):g}s"

    __repr__ = __str__


def duration_option(
    *names: str, text: str, least: float = 0.0, most: float = math.inf, may_be_least: bool = True
) -> Any:
    """Return an option for a Duration. `text`: its help. `may_be_least`: it may be `least` itself."""

    def parse(value: Any) -> Duration:
        return parse_duration(value, least=least, most=most, may_be_least=may_be_least)

    return typer.Option(*names, metavar="TIME", help=text, parser=parse)


def parse_duration(
    value: str | float,
    option: str | None = None,
    *,
    least: float = 0.0,
    most: float = math.inf,
    may_be_least: bool = False,
) -> Duration:
    """Return the duration that a text, or the number of a config file, stands for. Raises a usage error."""
    seconds = duration_s(value) if isinstance(value, str) else float(value)
    if seconds is None or not math.isfinite(seconds):
        raise typer.BadParameter(f"{value!r} is no time; {DURATION_FORM}", param_hint=option)
    if seconds < least or seconds > most or (seconds == least and not may_be_least):
        bound = f"at least {Duration(least)}" if may_be_least else f"above {Duration(least)}"
        if most != math.inf:
            bound += f" and at most {Duration(most)}"
        raise typer.BadParameter(f"{value!r} is no time {bound}; {DURATION_FORM}", param_hint=option)
    return Duration(seconds)
