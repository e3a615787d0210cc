"""Checks of a request before the application sees it; each raises the error that refuses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import httptools

from loraplex.server.connections import ConnectionLimits
from loraplex.server.errors import (
    BodyTooLargeError,
    HeadersTooLargeError,
    HttpVersionError,
    TransferCodingError,
)
from loraplex.server.health import LIVE_PATH, READY_PATHS

_HEALTH_PATHS: Final = frozenset(path.encode() for path in (LIVE_PATH, *READY_PATHS))
_HEALTH_START: Final = b"GET /health"


def check_header_bytes(num_bytes: int, limits: ConnectionLimits) -> None:
    if num_bytes > limits.max_header_bytes:
        raise HeadersTooLargeError(
            f"the request's headers are larger than {limits.max_header_bytes:,} bytes; send fewer or shorter "
            "ones: cookies and tokens of proxies are often the largest"
        )


def check_header_fields(num_fields: int, limits: ConnectionLimits) -> None:
    if num_fields > limits.max_header_fields:
        limit = limits.max_header_fields
        raise HeadersTooLargeError(
            f"the request has more than the {limit:,} header fields it may have; send fewer"
        )


def check_chunk_bytes(num_bytes: int, limits: ConnectionLimits) -> None:
    limit = limits.max_chunk_overhead_bytes
    if num_bytes > limit:
        raise BodyTooLargeError(
            f"the sizes and extensions of the body's chunks have more than {limit:,} bytes; send it in "
            "larger chunks, or with a Content-Length"
        )


def check_version(version: str) -> None:
    if version not in ("1.1", "1.0"):
        raise HttpVersionError(f"this server speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}")


def check_transfer_coding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    if codings and codings.strip().lower() != b"chunked":
        raise TransferCodingError("the only Transfer-Encoding that this server decodes is chunked")


def may_ask_for_health(data: bytes) -> bool:
    """Return whether the first bytes of a request look like those of a health check."""
    return data.startswith(_HEALTH_START)


def asks_for_health(url: bytes) -> bool:
    """Return whether a path or an absolute URL is one that is answered even when all connections are in
    use."""
    try:
        return httptools.parse_url(url).path in _HEALTH_PATHS
    except httptools.HttpParserInvalidURLError:
        return False
