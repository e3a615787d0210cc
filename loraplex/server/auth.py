"""Keys: API keys for every route except those of /health and the page's files, and admin keys for requests
that change adapters.

Without an admin key, clients on this machine are administrators. Behind a reverse proxy on this machine every
client looks local, so forwarded requests do not count as local; proxies that add no forwarding header need an
admin key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.addresses import is_loopback
from loraplex.server.errors import ForbiddenError, UnauthorizedError
from loraplex.server.health import LIVE_PATH, READY_PATHS
from loraplex.server.page.files import is_page_path
from loraplex.server.refusal import refuse
from loraplex.server.request_log import request_record

_OPEN_PATHS: Final = frozenset({*READY_PATHS, LIVE_PATH})
_FORWARDED: Final = frozenset({b"forwarded", b"via", b"x-real-ip"})
_FORWARDED_PREFIX: Final = b"x-forwarded-"


class Keys:
    """Keys to compare a request's `Authorization: Bearer KEY` with."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have equal length, so the comparison's time reveals neither a key's length nor a matching
        # prefix.
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return bool(scheme.lower() == b"bearer" and any(matches))


class ApiKeyMiddleware:
    """Middleware that requires one of the keys. It is plain ASGI, so that streams pass through untouched."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = {"admin": Keys(admin_keys), "api": Keys(api_keys)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or is_page_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        kind = next((kind for kind, keys in self._keys.items() if keys.match(scope)), None)
        if kind is not None:
            request_record(scope).key_kind = kind
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError("no valid API key; send it as 'Authorization: Bearer KEY'")
        await refuse(error, scope, receive, send)


class Administrators:
    """The clients that may change adapters and see file paths: holders of an admin key or, if there is no
    key, clients on this machine."""

    def __init__(self, admin_keys: Sequence[str] = ()) -> None:
        self._keys = Keys(admin_keys)

    def include(self, scope: Scope) -> bool:
        return self._keys.match(scope) if self._keys else _is_local(scope)

    def require(self, scope: Scope) -> None:
        """Raise UnauthorizedError or ForbiddenError unless an administrator sent the request."""
        if self.include(scope):
            if self._keys:
                request_record(scope).key_kind = "admin"
            return
        if not self._keys:
            raise ForbiddenError(
                "adapters are changed from the server's own machine only; start the server with --admin-key "
                "KEY (or LORAPLEX_ADMIN_KEY) and send that key to change them from elsewhere or by a proxy",
                code="admin_only",
            )
        if any(name == b"authorization" for name, _ in scope["headers"]):
            raise ForbiddenError(
                "this key may not change adapters; send the one given to the server with --admin-key",
                code="admin_only",
            )
        raise UnauthorizedError(
            "adapters are changed with the admin key; send it as 'Authorization: Bearer KEY'"
        )


def _is_local(scope: Scope) -> bool:
    """Return whether the peer is a process on this machine and the request was not forwarded."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(name in _FORWARDED or name.startswith(_FORWARDED_PREFIX) for name, _ in scope["headers"])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
