"""The files of the web page, read once and sent with headers that keep everything foreign out of it.

The page holds no data, so that browsers get it without a key; it asks for one when the server does. All of it
comes from this package: it works without a network, and the content policy forbids any other host.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

PAGE_PATH: Final = "/"
_FOLDER: Final = "/page/"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # A text that reaches innerHTML or the like is an error, not markup.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def is_page_path(path: str) -> bool:
    """Return whether a path is one of the page's files."""
    return path in page_files()


@cache
def page_files() -> dict[str, _File]:
    """Return all files by their paths on the server."""
    found = {}
    for each in files(__package__).joinpath("files").iterdir():
        media_type = _TYPES.get(each.name.rpartition(".")[2])
        if media_type is not None:
            content = each.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            path = PAGE_PATH if each.name == "index.html" else _FOLDER + each.name
            found[path] = _File(content, media_type, etag)
    return found


def page_response(scope: Scope) -> Response:
    """Return the answer to a request for one of the page's files."""
    file = page_files()[scope["path"]]
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in Request(scope).headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
