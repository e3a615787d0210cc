"""Valid adapter names."""

from __future__ import annotations

import re
from typing import Final

from loraplex.core.errors import InvalidRequestError

MAX_NAME_CHARS: Final = 128

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def validate_adapter_name(name: str, *, param: str = "name") -> str:
    """Return the name if it is valid; raise InvalidRequestError otherwise.

    Names appear as the `model` of a request, in URLs and in metric labels. No ':' because requests may
    say `base:adapter`, no '/' because a name is one path segment, no leading dot because of '..'.
    """
    if not name:
        raise InvalidRequestError("the adapter name is empty", param=param)
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"the adapter name has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed", param=param
        )
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} is not a valid adapter name: use ASCII letters, digits, '.', '_' and '-', "
            "and do not start with a dot",
            param=param,
        )
    return name
