"""HTTP calls to a server that already runs elsewhere: its address, keys, and connection errors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from loraplex.core.errors import EngineDeadError, UserError
from loraplex.core.url_secrets import without_secrets

# Below uvicorn's 5 s, after which it closes an idle connection: a request must not be sent into that.
_KEEP_ALIVE_S: Final = 2.0
_CONNECT_TIMEOUT_S: Final = 3.0
_MAX_ANSWER_BYTES: Final = 64 << 20
"""Most bytes of an answer that is read as a whole: a server of files or video must not fill our memory."""


class BackendError(UserError):
    """A server that a fleet should use is not there, or cannot be used as it is."""


class BackendAwayError(BackendError):
    """The server does not answer or is not ready, so nothing is known about it yet."""


class UnreachableError(EngineDeadError):
    """The server did not answer. `nobody_listens`: the connection was not even accepted."""

    def __init__(self, message: str, *, nobody_listens: bool = False) -> None:
        super().__init__(message)
        self.nobody_listens = nobody_listens


@dataclass(frozen=True, kw_only=True)
class BackendAddress:
    """The address of a server, and its keys. `admin_key` is for changes of adapters, if it differs."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _root_of(self.url))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A complete HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body decoded as JSON; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class BackendHttp:
    """Connections to one server, kept alive and reused. For use in one event loop; close it at the end."""

    def __init__(self, address: BackendAddress) -> None:
        self._root = address.url
        self.url = without_secrets(address.url)  # for messages
        self.has_key = address.api_key is not None
        self._headers = _authorization(address.api_key)
        self._admin_headers = _authorization(address.admin_key or address.api_key)
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, body: object = None, *, timeout_s: float, admin: bool = False
    ) -> Answer:
        """Send one request and read the whole answer. Raises UnreachableError if it does not arrive in
        time."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                await self._send(method, path, body, admin=admin) as response,
            ):
                body = await self._read(response)
                return Answer(status=response.status, headers=response.headers, body=body)
        except TimeoutError:
            raise UnreachableError(f"{self.url} did not answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self.unreachable(error) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise UnreachableError(
                    f"the answer of {self.url} goes on after {_MAX_ANSWER_BYTES >> 20} MiB"
                )
        return bytes(body)

    async def open_stream(self, path: str, body: object, *, traceparent: str = "") -> aiohttp.ClientResponse:
        """Send one request and return when its headers have arrived. The caller closes the response.
        `traceparent`: the trace that the server's own spans shall be a part of.

        Raises UnreachableError if the connection fails; waits for the headers without limit, as a server may
        queue the request.
        """
        try:
            try:
                return await self._send("POST", path, body, traceparent=traceparent)
            except aiohttp.ServerDisconnectedError:
                # The server may close a kept connection just as the request is sent, which says nothing about
                # the request.
                return await self._send("POST", path, body, traceparent=traceparent)
        except (aiohttp.ClientError, OSError) as error:
            raise self.unreachable(error) from error

    def unreachable(self, error: Exception) -> UnreachableError:
        """Return the error for a failed connection, with a readable message."""
        if isinstance(error, aiohttp.ClientPayloadError):  # its own message is about HTTP chunks
            return UnreachableError(f"the connection to {self.url} was cut in the middle of an answer")
        if isinstance(error, aiohttp.ClientConnectorError):
            return UnreachableError(
                f"nothing answers at {self.url} ({_system_reason(error)})", nobody_listens=True
            )
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return UnreachableError(
                f"{self.url} accepted no connection within {_CONNECT_TIMEOUT_S:g} s", nobody_listens=True
            )
        # Its own message shows the invalid bytes.
        if isinstance(error, aiohttp.ClientResponseError):
            return UnreachableError(f"what answers at {self.url} does not speak HTTP")
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return UnreachableError(f"{self.url} closed the connection without an answer")
        if isinstance(error, OSError) and error.errno is not None:
            return UnreachableError(f"the connection to {self.url} broke ({os.strerror(error.errno)})")
        if isinstance(error, ConnectionResetError):
            return UnreachableError(f"the connection to {self.url} was reset")
        return UnreachableError(f"the connection to {self.url} broke ({type(error).__name__})")

    async def close(self) -> None:
        """Close all connections, which cancels the requests on them. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def _send(
        self, method: str, path: str, body: object, *, admin: bool = False, traceparent: str = ""
    ) -> aiohttp.ClientResponse:
        headers = dict(self._admin_headers if admin else self._headers)
        if traceparent:
            headers["traceparent"] = traceparent
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
        # Redirects are reported, not followed: the body of a POST would be lost.
        return await self._open_session().request(
            method, self._root + path, data=data, headers=headers, allow_redirects=False
        )

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # it belongs to the event loop that runs when it is created
            self._session = aiohttp.ClientSession(
                # limit=0: the number of open requests is limited elsewhere.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                trust_env=False,
                auto_decompress=True,
            )
        return self._session


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _root_of(url: str) -> str:
    """Return the address without a path. Raises BackendError if it is not one."""
    root = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(root)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or any(char.isspace() for char in root):
        raise BackendError(
            f"{without_secrets(url)!r} is no address of a server; write it as http://HOST:PORT"
        )
    return root


def _system_reason(error: aiohttp.ClientConnectorError) -> str:
    """Return the system's own reason: asyncio replaces it by a list of the addresses it has tried."""
    found, number = error.os_error, error.os_error.errno
    if number is None or isinstance(found, socket.gaierror):  # name lookups have their own error numbers
        return str(found)
    return os.strerror(number)
