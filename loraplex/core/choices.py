"""Options that have a name as their value, one of a few."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import TypeVar

from loraplex.core.errors import OptionError

E = TypeVar("E", bound=StrEnum)


def choice(kind: str, name: str, choices: type[E]) -> E:
    """Return the choice of that name. Raises OptionError, which names the nearest one, and all."""
    if name in {*choices}:
        return choices(name)
    near = difflib.get_close_matches(str(name).lower(), [*choices], n=1)
    advice = f"did you mean {near[0]}? There are" if near else "there are"
    raise OptionError(f"there is no {kind} {name!r}; {advice} {', '.join(choices)}")
