"""`loraplex config show`: the options that a command would run with, and where each is from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from loraplex.cli.configured import file_options, is_configured, origin_of
from loraplex.cli.flags import App
from loraplex.cli.server_calls import AsJson
from loraplex.cli.table import print_table, printable, text_column
from loraplex.core.errors import UserError
from loraplex.core.url_secrets import MASK, without_secrets

_SECRETS: Final = frozenset({"api_key", "admin_key", "backend_key", "backend_admin_key"})
_AS_JSON: Final = "--json"
_NOT_OPTIONS: Final = frozenset({"config", "help"})
_COLUMNS: Final = (text_column("option"), text_column("value"), text_column("from"))

app = App(help="Options from files and the environment.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `show` a subcommand while it is the only one."""


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def show(
    context: typer.Context,
    as_json: AsJson = False,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND [OPTIONS]",
            help="The command with its options, as it would be run: fleet serve --config loraplex.toml.",
            show_default="serve",
        ),
    ] = None,
) -> None:
    """Show every option of a command, its value, and where that is from: a flag, the environment, a file or
    the default. Keys, and logins and parameters of URLs, are masked. Nothing is started."""
    words = list(command or ["serve"])
    if _AS_JSON in words:  # after the command, too: it has no such option itself
        words.remove(_AS_JSON)
        as_json = True
    called = _parsed(context.find_root(), words)
    rows = [_row(called, param) for param in called.command.params if _is_shown(called, param)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        print_table([row | {"value": _text(row["value"])} for row in rows], _COLUMNS)


def _parsed(root: Any, words: Sequence[str]) -> Any:
    """Return the context of a command whose options are parsed. Raises UserError for one that takes them
    from the command line only."""
    context, rest = root, list(words)
    while hasattr(context.command, "commands"):
        name = rest.pop(0) if rest else ""
        command = context.command.commands.get(name)
        if command is None or not (hasattr(command, "commands") or is_configured(command)):
            these = ", ".join(each.replace(".", " ") for each in file_options(root.command))
            raise UserError(
                f"`loraplex {' '.join(words)}` takes no options from a file or the environment; these "
                f"do: {these}"
            )
        if hasattr(command, "commands"):
            context = typer.Context(command, info_name=name, parent=context)
        else:
            context = command.make_context(name, rest, parent=context)
    return context


def _is_shown(context: Any, param: Any) -> bool:
    if param.name not in context.params or param.name in _NOT_OPTIONS:
        return False
    # The model is an argument or an option; what was not given, or is overridden, says nothing.
    of_model = (context.params.get("model_argument"), context.params.get("model"))
    if param.param_type_name == "argument":
        return of_model[0] is not None
    return param.name != "model" or of_model[1] is not None or of_model[0] is None


def _row(context: Any, param: Any) -> dict[str, Any]:
    origin, place = origin_of(context, param)
    value = context.params[param.name]
    is_option = param.param_type_name == "option"
    return {
        "option": max(param.opts, key=len) if is_option else "MODEL",
        "value": _shown(param.name, value),
        "from": f"{origin} {place}" if place else str(origin),
    }


def _shown(name: str, value: Any) -> Any:
    """Return a value as JSON has it, without secrets."""
    if isinstance(value, (list, tuple)):
        return [_shown(name, each) for each in value]
    if name in _SECRETS and value is not None:
        return MASK
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return without_secrets(str(value))


def _text(value: Any) -> str:
    match value:
        case None | []:
            return "-"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(str, value))
    return printable(str(value))
