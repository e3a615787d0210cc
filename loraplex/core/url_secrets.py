"""URLs as they may be shown: without their logins, and without what may be a token or a signature."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "****"
_URL: Final = re.compile(r"""((?:\b[A-Za-z][A-Za-z0-9+.-]*:)?//|\b[A-Za-z][A-Za-z0-9+.-]*:/)([^\s'"]*)""")
_PATH_PARAMETER: Final = re.compile(r";([^=/;]*)=[^/;]*")
_ANCHOR: Final = re.compile(r"[\w.-]{1,64}")


def without_secrets(text: str) -> str:
    """Return a text whose URLs have neither users, passwords nor values of parameters.

    More is left out than need be where a URL can be read in two ways: a password may hold slashes.
    """
    return _URL.sub(lambda url: url[1] + _without_secrets(url[2]), text)


def _without_secrets(rest: str) -> str:
    """Return what follows a URL's scheme."""
    before, at, after = rest.rpartition("@")
    if at and (":" in before or not re.search(r"[/?#]", before)):
        return f"{MASK}@{_without_secrets(after)}"
    rest, hash_sign, fragment = rest.partition("#")
    place, question_mark, query = rest.partition("?")
    place = _PATH_PARAMETER.sub(rf";\1={MASK}", place)
    if "=" in fragment or not _ANCHOR.fullmatch(fragment):
        fragment = _without_values(fragment)
    return f"{place}{question_mark}{_without_values(query)}{hash_sign}{fragment}"


def _without_values(parameters: str) -> str:
    """Return parameters by name; one without a name may be a token itself."""
    parts = [each.partition("=") for each in parameters.split("&")]
    return "&".join(f"{name}={MASK}" if equals else name and MASK for name, equals, _ in parts)
