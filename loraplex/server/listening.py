"""The port that a server listens on: binding it, accepting connections, and stopping at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from loraplex.core.errors import LoraplexError
from loraplex.server.pacing import PacedListener


class AddressError(LoraplexError):
    """The address cannot be listened on. `reason` is the message without the fix."""

    def __init__(self, reason: str, *, fix: str = "choose another with --host and --port") -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound to the address but not listening yet. Raises AddressError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield listener


async def listen(server: ListeningServer, listener: socket.socket, *, host: str, port: int) -> None:
    """Answer requests until the server is asked to exit. `host` and `port` are for the error message."""
    try:
        await server.serve(sockets=[listener])
    except OSError as error:
        # Two servers may bind one port at the same time; only one may listen.
        raise _cannot_listen(host, port, error) from error
    finally:
        server.is_listening.set()  # also after a failure, so that waiters continue


def _cannot_listen(host: str, port: int, error: OSError) -> AddressError:
    return AddressError(f"cannot listen on {host}:{port}: {error.strerror or error}")


class ListeningServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us, so that they end in exit code 0, and reports when it
    listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """Number of HTTP requests being answered."""
        return len(self.server_state.tasks)

    def cut_connections(self) -> None:
        """Drop unsent data. Requests on these connections end as if their clients had disconnected."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: `stop_signals` does."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening as uvicorn does on bound sockets, except that connections are accepted by
        PacedListener."""
        assert sockets is not None
        config, state = self.config, self.server_state
        protocol_class: Any = config.http_protocol_class
        make_protocol = partial(protocol_class, config=config, server_state=state, app_state={})
        self.servers = []
        for listener in sockets:
            listener.setblocking(False)
            listener.listen(config.backlog)
            self.servers.append(PacedListener(listener, make_protocol))  # type: ignore[arg-type]
        self.started = True
        self.is_listening.set()


@contextlib.contextmanager
def stop_signals(on_stop: Callable[[], None]) -> Iterator[None]:
    """Call `on_stop` at SIGINT and SIGTERM while the block runs."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of a fast event loop; None for Python's default."""
    try:
        import uvloop
    except ImportError:
        return None  # not available on Windows
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]
