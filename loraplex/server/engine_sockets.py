"""The two sockets between the HTTP process and an engine process, on one machine or between two.

On one machine they are Unix sockets in a folder that nobody else can enter. Between machines they are TCP
with CurveZMQ: all is encrypted, the engine talks to none but the holder of the key it was started with, and
the HTTP process to none but the engine whose key it was told (`remote_sockets`). Both sides make their keys
themselves, and only public ones travel. The HTTP process is CurveZMQ's server on both, whoever binds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import zmq

from loraplex.server.protocol_ipc import COMMANDS_SOCKET, EVENTS_SOCKET, Launch, Remote, endpoint

KEY_ENCODING: Final = "ascii"
_HEARTBEAT_MS: Final = 1000
_SILENCE_MS: Final = 5000
"""A connection between machines on which nothing came for so long is cut. ZeroMQ's own threads keep it alive,
whatever the processes do: a process that has no turn at all, or a machine without network, does not."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """A pair of CurveZMQ's keys, in Z85."""

    public: str
    secret: str

    @classmethod
    def make(cls) -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(KEY_ENCODING), secret=secret.decode(KEY_ENCODING))


def new_socket(context: Context, kind: int) -> Socket:
    """Make a socket that neither drops nor blocks: what waits is bounded by the requests."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket


def connect_events(context: Context, launch: Launch) -> Socket:
    """Connect a socket for events, of which a process may have several."""
    socket = new_socket(context, zmq.PUSH)
    if launch.remote is None:
        socket.connect(endpoint(launch.socket_dir, EVENTS_SOCKET))
    else:
        _secure_engine(socket, launch.remote)
        prepare_connection(socket)
        socket.connect(launch.remote.events)
    return socket


def bind_commands(context: Context, launch: Launch) -> tuple[Socket, str]:
    """Bind the socket for commands; returns its address as well."""
    socket = new_socket(context, zmq.PULL)
    if launch.remote is None:
        address = endpoint(launch.socket_dir, COMMANDS_SOCKET)
        socket.bind(address)
        return socket, address
    _secure_engine(socket, launch.remote)
    return socket, bind_any_port(socket, launch.remote.host)


@contextmanager
def calling_when_cut(events: Socket, leave: Callable[[], None]) -> Iterator[None]:
    """Have `leave` called, in a thread, when the connection of a socket for events is cut."""
    # Imported here: it imports asyncio, which an engine process on this machine has no use for.
    from zmq.utils.monitor import recv_monitor_message

    monitor = events.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)

    def watch() -> None:
        with monitor:
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                leave()

    watching = threading.Thread(target=watch, name="connection-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        events.disable_monitor()
        watching.join()


def prepare_connection(socket: Socket) -> None:
    """Have a socket notice when its one connection to another machine is cut. It makes no second one: what
    was lost with the first does not come back with it."""
    socket.ipv6 = True
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
    socket.reconnect_ivl = -1


def _secure_engine(socket: Socket, remote: Remote) -> None:
    socket.curve_serverkey = remote.front_key.encode(KEY_ENCODING)
    socket.curve_publickey = remote.public_key.encode(KEY_ENCODING)
    socket.curve_secretkey = remote.secret_key.encode(KEY_ENCODING)


def bind_any_port(socket: Socket, host: str) -> str:
    """Bind to a free port of an address; returns it as others connect to it."""
    is_v6 = ":" in host
    socket.ipv6 = is_v6
    socket.bind(f"tcp://[{host}]:*" if is_v6 else f"tcp://{host}:*")
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode(KEY_ENCODING)
