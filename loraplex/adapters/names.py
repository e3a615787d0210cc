"""Valid adapter names."""

from __future__ import annotations

import re
from typing import Final

from loraplex.core.errors import InvalidRequestError

MAX_NAME_CHARS: Final = 128

_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")


def validate_adapter_name(name: str, *, param: str = "name") -> str:
    """Return the name if it is valid; raise InvalidRequestError otherwise.

    Names appear as the `model` of a request, in URLs and in metric labels. No ':' because requests may
    say `base:adapter`. With '/' they read as those of a hub (`org/sql`); no part has a leading dot because of
    '..', or is empty.
    """
    if not name:
        raise InvalidRequestError("the adapter name is empty", param=param)
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"the adapter name has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed", param=param
        )
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} is not a valid adapter name: use ASCII letters, digits, '.', '_' and '-', with '/' "
            "between its parts, and begin none of these with a dot",
            param=param,
        )
    return name
