"""API keys: every route but those of /health wants one of them, once any is configured."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.errors import UnauthorizedError, describe
from loraplex.server.health import LIVE_PATH, READY_PATHS

_OPEN_PATHS: Final = frozenset({*READY_PATHS, LIVE_PATH})


class ApiKeyMiddleware:
    """Plain ASGI, so that streams pass through untouched."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        # Digests of equal length: neither the length of a key nor how far a guess agrees shows in the time.
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError("no valid API key; send it as 'Authorization: Bearer KEY'")
        await describe(error).response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return bool(scheme.lower() == b"bearer" and any(matches))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
