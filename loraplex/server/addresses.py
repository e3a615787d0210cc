"""Parse hosts, origins and peer addresses of HTTP requests into one comparable form."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from loraplex.core.errors import UserError

ANY: Final = "*"

_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^\[\]:/?#@\s]+))(?::(?P<port>[0-9]*))?")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_DNS_NAME: Final = re.compile(r"[0-9a-z_](?:[0-9a-z_.-]*[0-9a-z_])?")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressSyntaxError(UserError):
    """A host or origin in an option that can never match a request."""


class Host(NamedTuple):
    """A host in canonical form: lower case, no trailing dot, no brackets; `port` may be empty."""

    name: str
    port: str

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{name}:{self.port}" if self.port else name


class Origin(NamedTuple):
    """Scheme and host of a web page. `host.port` is empty if it is the scheme's default."""

    scheme: str
    host: Host

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}"

    def is_at(self, host: Host) -> bool:
        """Return whether a page of this origin comes from `host`, whatever the scheme."""
        default = _DEFAULT_PORTS.get(self.scheme, "")
        return (self.host.name, self.host.port or default) == (host.name, host.port or default)


def parse_host(text: str) -> Host | None:
    """Parse a Host header; None if it is malformed."""
    found = _HOST.fullmatch(text.strip().lower())
    if found is None:
        return None
    if found["ipv6"] is not None:
        address = parse_ip(found["ipv6"])
        return None if address is None else Host(str(address), found["port"] or "")
    name = canonical_name(found["name"])
    return Host(name, found["port"] or "") if name else None


def parse_origin(text: str) -> Origin | None:
    """Parse an Origin header; None for `null` and for malformed ones."""
    scheme, _, authority = text.strip().lower().partition("://")
    host = parse_host(authority)
    if host is None or not _SCHEME.fullmatch(scheme):
        return None
    port = "" if host.port == _DEFAULT_PORTS.get(scheme) else host.port
    return Origin(scheme, Host(host.name, port))


def canonical_name(name: str) -> str:
    """Return a host name or bare address in the form of `Host.name`."""
    name = name.strip().lower().removesuffix(".")
    address = parse_ip(name)
    return name if address is None else str(address)


def parse_ip(name: str) -> IpAddress | None:
    """Parse an IP address, with an IPv4-mapped IPv6 address as IPv4; None if it is a host name."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_loopback(name: str) -> bool:
    """Return whether the name always means this machine: `localhost`, 127.0.0.0/8 or ::1."""
    address = parse_ip(name)
    return name == "localhost" if address is None else address.is_loopback


def parse_allowed_host(text: str) -> str:
    """Parse a value of --allowed-hosts: a name or address, `*.example.com`, or `*`. Raises
    AddressSyntaxError."""
    name = canonical_name(text.strip().removeprefix("[").removesuffix("]"))
    if name == ANY or parse_ip(name) is not None or _DNS_NAME.fullmatch(name.removeprefix("*.")):
        return name
    raise AddressSyntaxError(
        f"{text!r} is not a host name; give a name without scheme, port and path, as in api.example.com, "
        "*.example.com for all names below it, or * for any"
    )


def parse_allowed_origin(text: str) -> str:
    """Parse a value of --allowed-origins into the form browsers send, or `*`. Raises AddressSyntaxError."""
    if text.strip() == ANY:
        return ANY
    origin = parse_origin(text.strip().removesuffix("/"))
    if origin is None:
        raise AddressSyntaxError(
            f"{text!r} is not an origin; give scheme, name and port as in the browser's address bar, "
            "e.g. https://chat.example.com or http://localhost:3000, or * for any"
        )
    return str(origin)
