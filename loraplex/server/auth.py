"""Keys: API keys for every route except those of /health and the page's files, and admin keys for requests
that change adapters.

Where there are tenants, theirs are the API keys, and a key decides what its holder may see and change;
holders of an admin key are operators, who may do everything.

Without an admin key, clients on this machine are administrators. Behind a reverse proxy on this machine every
client looks local, so forwarded requests do not count as local; proxies that add no forwarding header need an
admin key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.adapters.names import MAX_NAME_CHARS
from loraplex.server.addresses import is_loopback
from loraplex.server.errors import ForbiddenError, UnauthorizedError
from loraplex.server.health import LIVE_PATH, READY_PATHS
from loraplex.server.page.files import is_page_path
from loraplex.server.refusal import refuse
from loraplex.server.request_log import request_record
from loraplex.server.tenants.access import UNRESTRICTED, Access, access_of, grant
from loraplex.server.tenants.keys import digest_of
from loraplex.server.tenants.tenants import Tenants

_OPEN_PATHS: Final = frozenset({*READY_PATHS, LIVE_PATH})
_FORWARDED: Final = frozenset({b"forwarded", b"via", b"x-real-ip"})
_FORWARDED_PREFIX: Final = b"x-forwarded-"


class Keys:
    """Keys to compare a request's `Authorization: Bearer KEY` with."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have equal length, so the comparison's time reveals neither a key's length nor a matching
        # prefix.
        self._digests = [digest_of(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, scope: Scope) -> bool:
        key = _key_of(scope)
        given = digest_of(key or b"")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return key is not None and any(matches)


class ApiKeyMiddleware:
    """Middleware that requires one of the keys. It is plain ASGI, so that streams pass through untouched."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        tenants: Tenants | None = None,
    ) -> None:
        self._app = app
        self._keys = {"admin": Keys(admin_keys), "api": Keys(api_keys)}
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or is_page_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        kind, access = self._identify(scope)
        if kind is not None:
            record = request_record(scope)
            record.key_kind, record.tenant = kind, access.tenant or None
            if access.account is not None:
                record.late_headers = access.account.headers
            grant(scope, access)
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError("no valid API key; send it as 'Authorization: Bearer KEY'")
        await refuse(error, scope, receive, send)

    def _identify(self, scope: Scope) -> tuple[str | None, Access]:
        """Return the kind of a request's key, None if it is not valid, and what it allows."""
        kind = next((kind for kind, keys in self._keys.items() if keys.match(scope)), None)
        if kind is None and self._tenants is not None:
            key = _key_of(scope)
            access = None if key is None else self._tenants.find(key)
            if access is not None:
                return "tenant", access
        return kind, UNRESTRICTED


class Administrators:
    """The clients that may change adapters and see file paths: holders of an admin key or, if there is no
    key, clients on this machine. Where there are tenants (`has_tenants`), some change adapters of certain
    names, and only operators see paths and do everything else that others must not."""

    def __init__(self, admin_keys: Sequence[str] = (), *, has_tenants: bool = False) -> None:
        self._keys = Keys(admin_keys)
        self._has_tenants = has_tenants

    def include(self, scope: Scope) -> bool:
        if self._has_tenants:
            return access_of(scope).is_operator
        return self._keys.match(scope) if self._keys else _is_local(scope)

    def require_operator(self, scope: Scope) -> None:
        """Raise ForbiddenError if a tenant that is no operator sent the request. For what only tenants must
        not see: without tenants, every client may."""
        if self._has_tenants and not access_of(scope).is_operator:
            raise ForbiddenError(
                "this key's tenant may not see this, as it is about other tenants too; ask with an "
                "operator's key",
                code="operator_only",
            )

    def require_fleet(self, scope: Scope) -> None:
        """Raise as `require` does unless the sender may change the fleet, which serves all tenants."""
        if not self._has_tenants:
            self.require(scope, "replicas and placements")
        elif not access_of(scope).is_operator:
            raise ForbiddenError(
                "this key's tenant may not change replicas or where adapters are placed, which all tenants "
                "share; ask with an operator's key, of a tenant with `operator = true` in the tenants file",
                code="operator_only",
            )

    def require_adapter(self, scope: Scope, name: str) -> None:
        """Raise ForbiddenError unless the sender, an administrator, may change the adapter of this name. The
        error is the same whether or not there is one."""
        access = access_of(scope)
        if not access.administers(name):
            allowed = " or ".join(map(repr, access.administered))
            raise ForbiddenError(
                f"this key's tenant may change adapters named {allowed} only, and not "
                f"{name[:MAX_NAME_CHARS]!r}",
                code="admin_only",
            )

    def require(self, scope: Scope, what: str = "adapters") -> None:
        """Raise UnauthorizedError or ForbiddenError unless an administrator sent the request. Where there are
        tenants, `require_adapter` has to follow. `what`: what is changed, in words."""
        if self._has_tenants:
            if not access_of(scope).is_administrator:
                raise ForbiddenError(
                    "this key's tenant may not change adapters; the operator allows it in the tenants file, "
                    "with `administers`",
                    code="admin_only",
                )
            return
        if self.include(scope):
            if self._keys:
                request_record(scope).key_kind = "admin"
            return
        if not self._keys:
            raise ForbiddenError(
                f"{what} are changed from the server's own machine only; start the server with --admin-key "
                "KEY (or LORAPLEX_ADMIN_KEY) and send that key to change them from elsewhere or by a proxy",
                code="admin_only",
            )
        if any(name == b"authorization" for name, _ in scope["headers"]):
            raise ForbiddenError(
                f"this key may not change {what}; send the one given to the server with --admin-key",
                code="admin_only",
            )
        raise UnauthorizedError(
            f"{what} are changed with the admin key; send it as 'Authorization: Bearer KEY'"
        )


def _is_local(scope: Scope) -> bool:
    """Return whether the peer is a process on this machine and the request was not forwarded."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(name in _FORWARDED or name.startswith(_FORWARDED_PREFIX) for name, _ in scope["headers"])


def _key_of(scope: Scope) -> bytes | None:
    """Return the key that a request has sent; None if it sent none."""
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = header.partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None
