"""Keep web pages of other sites away from the server by checking Host, Origin and Sec-Fetch-Site.

Anything that runs in a browser on this machine can reach a server on loopback, so being unreachable from
outside is no protection. Two attacks are prevented:

- Cross-site requests. A page may POST to any address without asking. Browsers mark such requests with Origin,
  and with Sec-Fetch-Site if the target is loopback or HTTPS; the page can set neither.
- DNS rebinding. A page's own name is made to resolve to this server's address, which makes the page
  same-origin with it. The name is still in Host; attackers cannot make browsers send an address there.

Clients that are not browsers send none of these headers, and their Host is the name they were given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.errors import UserError
from loraplex.server.addresses import ANY, canonical_name, is_loopback, parse_host, parse_ip, parse_origin
from loraplex.server.errors import ForbiddenError, InvalidHostError
from loraplex.server.refusal import refuse

_HEALTH: Final = "/health"
_TRUSTED_SITES: Final = frozenset({"same-origin", "none"})  # `none`: typed by the user, or a bookmark


@dataclass(frozen=True, kw_only=True)
class WebAccess:
    """The web origins that may call from a browser, and the host names that the server answers to.

    `bound_host` is --host. `allowed_hosts` and `allowed_origins` are as `server.addresses` parses them.
    """

    bound_host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def allows_host(self, name: str) -> bool:
        """Return whether the server answers to a canonical host name. Rebinding needs a DNS name, so any
        address is allowed unless the server is bound to a particular one."""
        if is_loopback(name) or name == canonical_name(self.bound_host):
            return True
        if ANY in self.allowed_hosts or name in self.allowed_hosts:
            return True
        if any(name.endswith(host[1:]) for host in self.allowed_hosts if host.startswith("*.")):
            return True
        return parse_ip(name) is not None and not self._is_bound_to_one_address()

    def allows_origin(self, origin: str) -> bool:
        return ANY in self.allowed_origins or origin in self.allowed_origins

    def _is_bound_to_one_address(self) -> bool:
        name = canonical_name(self.bound_host)
        address = parse_ip(name)
        return is_loopback(name) or (address is not None and not address.is_unspecified)


class WebGuardMiddleware:
    """Refuses what `access` does not allow. It is plain ASGI, so that streams pass through untouched."""

    def __init__(self, app: ASGIApp, *, access: WebAccess) -> None:
        self._app = app
        self._access = access
        self._last_allowed: list[str] = []  # the Host headers of the last allowed request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._host_error(scope) or self._origin_error(scope)
            if error is not None:
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _host_error(self, scope: Scope) -> UserError | None:
        values = _values(scope, b"host")
        if values and values == self._last_allowed:  # the common case
            return None
        if not values and scope["http_version"] == "1.0":
            return None  # some load balancers check health this way; browsers always send Host
        if len(values) != 1:
            return InvalidHostError(f"a request must have one Host header; this one has {len(values)}")
        host = parse_host(values[0])
        if host is None:
            return InvalidHostError("the Host header must be a name or address, with or without a port")
        if self._access.allows_host(host.name):
            self._last_allowed = values
            return None
        if _is_health(scope) and parse_ip(host.name) is not None:
            return None
        return ForbiddenError(
            f"this server does not answer to the name {host.name!r}; if it should, start it with "
            f"--allowed-hosts {host.name}",
            code="host_not_allowed",
        )

    def _origin_error(self, scope: Scope) -> UserError | None:
        origins = _values(scope, b"origin")
        if len(origins) == 1 and self._access.allows_origin(origins[0]):
            return None
        if len(origins) <= 1 and "null" not in origins and _is_trusted(scope, origins):
            return None
        named = parse_origin(origins[0]) if len(origins) == 1 else None
        return ForbiddenError(
            "this request comes from a web page of another site; to let that site call this server, start "
            f"the server with --allowed-origins {named or 'ORIGIN'}",
            code="origin_not_allowed",
        )


def _is_trusted(scope: Scope, origins: list[str]) -> bool:
    """Return whether a request comes from no web page, from one of our own, or from a link."""
    sites = _values(scope, b"sec-fetch-site")
    if sites:  # the browser's own verdict, valid even behind a proxy that rewrites Host
        return _TRUSTED_SITES.issuperset(sites) or _is_link(scope)
    if not origins:
        return True
    origin = parse_origin(origins[0])
    hosts = [parse_host(value) for value in _values(scope, b"host")]
    return origin is not None and any(host is not None and origin.is_at(host) for host in hosts)


def _is_link(scope: Scope) -> bool:
    """Return whether a link on another site was followed: the page with the link cannot read the answer."""
    is_navigation = _values(scope, b"sec-fetch-mode") == ["navigate"]
    is_whole_page = _values(scope, b"sec-fetch-dest") == ["document"]
    return bool(scope["method"] == "GET" and is_navigation and is_whole_page)


def _is_health(scope: Scope) -> bool:
    """Return whether this is a health check. Load balancers send them by address, whatever the server is
    bound to."""
    path: str = scope["path"]
    return path == _HEALTH or path.startswith(f"{_HEALTH}/")


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]
