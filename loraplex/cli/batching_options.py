"""The options of batching, which commands that serve, simulate or measure have."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from loraplex.core.batching import Batching, DelayBound, bound_of
from loraplex.core.choices import choice
from loraplex.core.errors import OptionError

MAX_DELAY_OPTION: Final = "--max-delay-by-grouping"


def parse_policy(text: str) -> Batching:
    """Return the policy of `--batching`. Raises a usage error, which says what compares several."""
    if "," in text:
        raise typer.BadParameter(
            f"{text!r} is more than one batching policy; choose one, or compare them on a workload with "
            f"`loraplex twin batching --policies {text.replace(' ', '')}`"
        )
    try:
        return choice("batching policy", text, Batching)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None


BatchingPolicy = Annotated[
    Batching,
    typer.Option(
        "--batching",
        metavar="POLICY",
        parser=parse_policy,
        help=f"Which requests run together: {', '.join(Batching)} (our own engine; see docs/batching.md).",
    ),
]
MaxDelay = Annotated[
    str | None,
    typer.Option(
        MAX_DELAY_OPTION,
        metavar="BOUND",
        help="For --batching grouped and auto: by how much they may delay a request over first come, first "
        "served, e.g. 25%,250ms (default): the larger of the two.",
    ),
]


def parse_delay(text: str | None, batching: Batching) -> DelayBound:
    """Return the bound of `--max-delay-by-grouping`, if given, or the default. Raises a usage error."""
    try:
        return bound_of(text, batching)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=MAX_DELAY_OPTION) from None
