"""Options of commands: flags without a value in --help, options with an optional value, and options that
commands share.

Recent releases of typer show `<bool>` after every flag without a metavar, as if it took a value, including
`--help` and its own options for shell completion. All flags of all commands get an empty metavar here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from itertools import zip_longest
from shutil import get_terminal_size
from typing import Any, Final, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from loraplex.cli.configured import naming_origins, prefer_the_argument
from loraplex.cli.vllm_options import refuse_vllm_options

F = TypeVar("F", bound=Callable[..., Any])

WITHOUT_VALUE: Final = ""
"""The value of an option given without one, which is allowed if its metavar is in brackets."""
_NO_VALUE: Final = ""
_MIN_TABLE_COLUMNS: Final = 100
"""Terminal width from which a help table shows the full names of options."""
_NUMBERS: Final = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
}
"""Numbers by the kind of error that typer's validation of options has for them."""
_ONLY_SERVERS: Final = "--adapter"
"""An option that only serving commands have."""


class App(typer.Typer):
    """A Typer app whose flags show no value in --help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        return super().command(name, cls=_Command, **options)


def takes_options_of(source: Callable[..., Any]) -> Callable[[F], F]:
    """Give a command the options of `source` before its own. It is called with all of them by name, and
    receives those of `source` as `**options`."""

    def decorate(command: F) -> F:
        own = signature(command).parameters.values()
        shared = signature(source).parameters.values()
        parameters = [*shared, *(each for each in own if each.kind is not Parameter.VAR_KEYWORD)]
        hints = _parameter_hints(source) | _parameter_hints(command)
        # Keyword-only, so that one without a default may follow one with a default.
        by_name = [
            each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in parameters
        ]
        command.__signature__ = signature(command).replace(parameters=by_name)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: hints[each.name] for each in by_name}
        return command

    return decorate


def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters. The return type may be importable by type checkers
    only."""
    annotations = {name: each for name, each in function.__annotations__.items() if name != "return"}
    holder = type("Parameters", (), {"__annotations__": annotations})
    return get_type_hints(holder, globalns=function.__globals__, include_extras=True)


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        params = self.get_params(ctx)
        known = {name for each in params for name in each.opts}
        if _ONLY_SERVERS in known:
            refuse_vllm_options(args, known, ctx)
        with naming_origins(ctx), _plain_words():
            rest = super().parse_args(ctx, _with_values(args, params))
        prefer_the_argument(ctx)
        return rest

    def invoke(self, ctx: Any) -> Any:
        with naming_origins(ctx):
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> Any:
        params = _without_values(super().get_params(ctx))
        for each in params:  # variables made from the options' names would double the length of the help
            each.show_envvar = each.envvar is not None
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        mode = self.rich_markup_mode
        if get_terminal_size().columns < _MIN_TABLE_COLUMNS:
            self.rich_markup_mode = None  # plain text, which has room for every name
        try:
            super().format_help(ctx, formatter)
        finally:
            self.rich_markup_mode = mode


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _without_values(super().get_params(ctx))


@contextmanager
def _plain_words() -> Iterator[None]:
    """Say of what should be a number that it is none, instead of which parser refused it."""
    try:
        yield
    except typer.BadParameter as error:
        details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
        if details and (number := _NUMBERS.get(details[0]["type"])):
            error.message = f"{details[0]['input']!r} is not {number}"
        raise


def _without_values(options: Sequence[Any]) -> Sequence[Any]:
    """Give flags an empty metavar; return the same options."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = _NO_VALUE
    return options


def _with_values(args: Sequence[str], options: Sequence[Any]) -> list[str]:
    """Insert the empty value after options whose value is optional and was omitted: no other word follows
    them."""
    optional = {
        name
        for each in options
        if (each.metavar or "").startswith("[")
        for name in each.opts
        if name.startswith("-")
    }
    found: list[str] = []
    for arg, following in zip_longest(args, args[1:]):
        found.append(arg)
        if arg in optional and (following is None or following.startswith("-")):
            found.append(WITHOUT_VALUE)
    return found
