"""Options that have a name as their value, one of a few."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from loraplex.core.errors import OptionError
from loraplex.core.words import unknown_name

E = TypeVar("E", bound=StrEnum)


def choice(kind: str, name: str, choices: type[E]) -> E:
    """Return the choice of that name. Raises OptionError, which names similar ones, or all."""
    if name in {*choices}:
        return choices(name)
    raise OptionError(unknown_name(kind, str(name), choices))
