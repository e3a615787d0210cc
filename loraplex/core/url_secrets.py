"""URLs as they may be shown: without their logins, and without what may be a token or a signature."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "****"
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/?#\s]*@)?([^?#\s]*)(\?[^#\s]*)?(#\S*)?")


def without_secrets(text: str) -> str:
    """Return a text whose URLs have neither users, passwords nor values of parameters."""
    return _URL.sub(_masked, text)


def _masked(url: re.Match[str]) -> str:
    scheme, login, place, query, fragment = url.groups(default="")
    if "=" in fragment:
        fragment = _without_values(fragment)
    return f"{scheme}{f'{MASK}@' if login else ''}{place}{_without_values(query)}{fragment}"


def _without_values(parameters: str) -> str:
    """Return parameters behind their `?` or `#` by name; one without a name may be a token itself."""
    parts = [each.partition("=") for each in parameters[1:].split("&")]
    shown = [f"{name}={MASK}" if equals else name and MASK for name, equals, _ in parts]
    return parameters[:1] + "&".join(shown)
