"""Commands whose options may also come from the environment and from a file, and where each value is from.

A flag wins over the environment, that over the file, and the file over the default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from loraplex.cli.config_file import ConfigError, ConfigFile, FileOption, option_kinds, read_config

_PREFIX: Final = "LORAPLEX"
_FILE: Final = "loraplex.config_file"
"""The key under which a context keeps the file that it has read."""
_CONFIG: Final = "config"
_ARGUMENT: Final = "model_argument"
_SAME_AS_OPTION: Final = "model"


class Origin(StrEnum):
    """The source of a value."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


# Variables that Kubernetes sets for a service of the same name.
_OF_SERVICES: Final = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_TCP_PORT", "_TCP_PROTO", "_TCP_ADDR")
_VERY_CLOSE: Final = 0.9
"""Likeness above which a name is taken for a mistyped one."""
_ORIGINS: Final = {
    "COMMANDLINE": Origin.FLAG,
    "ENVIRONMENT": Origin.ENVIRONMENT,
    "DEFAULT_MAP": Origin.FILE,
}


def from_environment(*command: str) -> dict[str, Any]:
    """Return typer's settings of a command that also takes its options from the environment: LORAPLEX, the
    command and the option, such as LORAPLEX_FLEET_SERVE_MAX_WAITING. Only such commands take `--config`."""
    return {"auto_envvar_prefix": "_".join((_PREFIX, *command)).upper()}


def _read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the options that are parsed after this one. Names variables of
    the environment that set nothing, as a mistyped key would leave a server open."""
    if context.resilient_parsing:
        return path
    for line in _unused_variables(context):
        typer.echo(line, err=True)
    if path is None:
        return path
    section = section_of(context)
    commands = file_options(context.find_root().command)
    try:
        file = read_config(path, commands)
    except ConfigError as error:
        raise typer.BadParameter(str(error), ctx=context, param_hint="--config") from None
    context.default_map = file.values(section, commands[section])
    context.meta[_FILE] = file
    return path


ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="LORAPLEX_CONFIG",
        is_eager=True,
        callback=_read_file,
        help="A TOML file with options: a section for each command, such as serve or fleet.serve.",
    ),
]


def section_of(context: Any) -> str:
    """Return a command's section: its name, after those of the groups it is in."""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return ".".join(names)


def is_configured(command: Any) -> bool:
    """Return whether a command takes options from the environment and a file."""
    return "auto_envvar_prefix" in (command.context_settings or {})


def file_options(group: Any, outer: str = "") -> dict[str, dict[str, FileOption]]:
    """Return the options that each section of a file may set, for all commands below a group."""
    found: dict[str, dict[str, FileOption]] = {}
    for name, command in group.commands.items():
        section = f"{outer}.{name}" if outer else name
        if hasattr(command, "commands"):
            found |= file_options(command, section)
        elif is_configured(command):
            found[section] = _options_of(command)
    return found


def _options_of(command: Any) -> dict[str, FileOption]:
    kinds = option_kinds(command.callback)
    found = (
        FileOption(key=max(each.opts, key=len).lstrip("-"), name=each.name, kind=kinds[each.name])
        for each in command.params
        if each.param_type_name == "option" and each.name in kinds and each.name != _CONFIG
    )
    return {option.key: option for option in found}


def origin_of(context: Any, param: Any) -> tuple[Origin, str]:
    """Return where a parameter's value is from, and its place there: a variable, or a file and line."""
    source = context.get_parameter_source(param.name)
    origin = _ORIGINS.get(getattr(source, "name", ""), Origin.DEFAULT)
    if origin is Origin.ENVIRONMENT:
        return origin, _variable(context, param)
    if origin is Origin.FILE:
        file: ConfigFile = context.meta[_FILE]
        return origin, file.where(section_of(context), max(param.opts, key=len).lstrip("-"))
    return origin, ""


def _variable(context: Any, param: Any) -> str:
    own = _own_variables(param)
    automatic = f"{context.auto_envvar_prefix}_{param.name.upper()}"
    return next((name for name in own if os.environ.get(name)), automatic)


def _unused_variables(context: Any) -> list[str]:
    """Return a line for each variable that begins like this command's, or is much like one of its own names,
    and is no option."""
    prefix = f"{context.auto_envvar_prefix}_"
    own = {name for each in context.command.params for name in _own_variables(each)}
    automatic = {f"{prefix}{each.name.upper()}" for each in context.command.params}
    command = section_of(context).replace(".", " ")
    found = []
    for name in sorted(os.environ):
        if name in own or name in automatic or name.endswith(_OF_SERVICES):
            continue
        if name.startswith(prefix):
            near = difflib.get_close_matches(name, automatic, n=1)
        elif name.startswith(f"{_PREFIX.upper()}_"):
            near = difflib.get_close_matches(name, own, n=1, cutoff=_VERY_CLOSE)
        else:
            continue
        advice = f"; did you mean {near[0]}?" if near else ""
        if near or name.startswith(prefix):
            found.append(f"{name} is no option of `loraplex {command}`{advice}")
    return found


def _own_variables(param: Any) -> list[str]:
    """Return the variables of an option that are named for it alone."""
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())


def prefer_the_argument(context: Any) -> None:
    """Let a model that is given as an argument win over one of the environment or the file, which are those
    of `--model`."""
    params = context.params
    if params.get(_ARGUMENT) is None or params.get(_SAME_AS_OPTION) is None:
        return
    source = context.get_parameter_source(_SAME_AS_OPTION)
    if _ORIGINS.get(getattr(source, "name", "")) is not Origin.FLAG:
        params[_SAME_AS_OPTION] = None


@contextmanager
def naming_origins(context: Any) -> Iterator[None]:
    """Add to usage errors where the refused value is from, if it is not from the command line."""
    try:
        yield
    except typer.BadParameter as error:
        hint = error.param_hint
        named = [each for each in context.command.params if isinstance(hint, str) and hint in each.opts]
        param = error.param or next(iter(named), None)
        if param is not None and param.name != _CONFIG:
            _, place = origin_of(context, param)
            if place and place not in error.message:
                error.message = f"{error.message} (given in {place})"
        raise
