"""Options without a value in --help.

Recent releases of typer show `<bool>` behind every flag that has no metavar, as if it took a value: behind
`--help` and its own options for shell completion, too. All flags of all commands are given an empty one here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])

_NO_VALUE: Final = ""


class App(typer.Typer):
    """Commands whose flags have no value in --help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        return super().command(name, cls=_Command, **options)


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_values(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _without_values(super().get_params(ctx))


def _without_values(options: Sequence[Any]) -> Sequence[Any]:
    """Give flags a metavar that shows nothing; returns the same options."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = _NO_VALUE
    return options
