"""The file of `--config`: TOML with a section for each command, whose keys are the command's options.

    [serve]
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    adapter = ["sql=my-org/sql-lora@v2"]
    max-waiting = 512

Values become the defaults of the options, so they are parsed and checked like those of the command line.
"""

from __future__ import annotations

import difflib
import os
import re
import select
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Final, Union, get_args, get_origin, get_type_hints

from loraplex.cli.durations import Duration
from loraplex.core.errors import UserError

MAX_FILE_BYTES: Final = 1 << 20
_WAIT_S: Final = 10.0
_INTEGERS: Final = range(-(2**63), 2**63)
"""Those that TOML has; its reader takes larger ones, too."""

_HEADER: Final = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY: Final = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


class ConfigError(UserError):
    """A config file that cannot be read, or that has a key or value which no option has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOption:
    """An option that a file may set. `key`: its name without dashes; `name`: its parameter."""

    key: str
    name: str
    kind: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """A file that was read: what it sets, by section and by key as written."""

    path: Path
    sections: Mapping[str, Mapping[str, Any]]
    text: str

    def values(self, section: str, options: Mapping[str, FileOption]) -> dict[str, Any]:
        """Return a section's values by parameter name. Raises ConfigError for keys and types that the
        section's options do not have."""
        found: dict[str, Any] = {}
        for key, value in self.sections.get(section, {}).items():
            option = options.get(key)
            if option is None:
                raise ConfigError(f"{self.where(section, key)}: {_no_key(section, key, options)}")
            expected = _mismatch(value, option.kind)
            if expected is not None:
                raise ConfigError(f"{self.where(section, key)}: {key} is {expected}, not {_described(value)}")
            found[option.name] = value
        return found

    def where(self, section: str, key: str | None = None) -> str:
        """Return the file and the line of a key, or of its section; TOML's reader does not tell lines."""
        inside = section == ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := _HEADER.match(line):
                inside = "".join(header[1].split()).replace('"', "").replace("'", "") == section
                if inside and key is None:
                    return f"{self.path}:{number}"
            elif inside and key is not None and (found := _KEY.match(line)) and found[1] == key:
                return f"{self.path}:{number}"
        return str(self.path)


def read_config(path: Path, commands: Mapping[str, Mapping[str, FileOption]]) -> ConfigFile:
    """Read a file, and check all of it, also what is about other commands. `commands`: the options that each
    section may set, by section. Raises ConfigError."""
    text = _read_text(path)
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # also of an integer with thousands of digits
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; a section has options, one a line") from None
    file = ConfigFile(path=path, sections=_sections(tree, commands), text=text)
    for section in file.sections:
        if section not in commands:
            raise ConfigError(_no_section(file, section, commands))
        file.values(section, commands[section])
    return file


def option_kind(annotation: Any) -> Any:
    """Return the type of an option's value, without None and typer's notes about it."""
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    if get_origin(kind) in (Union, UnionType):
        [kind] = [each for each in get_args(kind) if each is not NoneType]
    return kind


def option_kinds(command: Any) -> dict[str, Any]:
    """Return the type of each option of a command's function, by parameter name."""
    return {name: option_kind(each) for name, each in get_type_hints(command).items() if name != "return"}


def _open(path: Path) -> BinaryIO:
    """Open a file, or a pipe that somebody writes to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else a pipe waits for a writer
    file = os.fdopen(descriptor, "rb")
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not select.select([file], [], [], _WAIT_S)[0]:
        file.close()
        raise ConfigError(f"nothing is written to the pipe {path}; name a file, or write to it")
    os.set_blocking(descriptor, True)
    return file


def _read_text(path: Path) -> str:
    try:
        with _open(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}; create it, or name another") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the config file {path} cannot be read: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB; is it a config file?")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start:,}); save it as UTF-8") from None


def _sections(tree: Mapping[str, Any], commands: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Return the sections of a tree of tables: those of commands, and any other that has values."""
    found: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{outer}.{key}" if outer else key
        if isinstance(value, Mapping) and outer not in commands:
            found |= _sections(value, commands, name)
        else:
            values[key] = value
    if values or (outer and not found):
        found[outer] = values
    return found


def _no_section(file: ConfigFile, section: str, commands: Mapping[str, Any]) -> str:
    known = ", ".join(f"[{each}]" for each in commands)
    if section == "":
        key = next(iter(file.sections[section]))
        return f"{file.where('', key)}: {key} is in no section; put it below one of {known}"
    near = difflib.get_close_matches(section, commands, n=1)
    advice = f"did you mean [{near[0]}]?" if near else f"there are {known}"
    return f"{file.where(section)}: there is no section [{section}]; {advice}"


def _no_key(section: str, key: str, options: Mapping[str, FileOption]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), options, n=1)
    advice = f"did you mean {near[0]}?" if near else "keys are the options without their dashes"
    return f"loraplex {section.replace('.', ' ')} has no option {key!r}; {advice}"


def _mismatch(value: Any, kind: Any) -> str | None:
    """Return the kind of value that an option takes, in words, if a value is of another kind."""
    if isinstance(value, int) and value not in _INTEGERS:
        return "a number of at most 64 bits"
    if get_origin(kind) is list:
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return None if is_list else "a list of strings"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number else "a number"
    if kind is Duration and not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number else "a time such as '2s', or a number of seconds"
    return None if isinstance(value, str) else "a string"


def _described(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "a table"
        case int() if value not in _INTEGERS:
            return "a larger one"
        case int() | float():
            return f"{value}"
    return "a date or time"
