"""The two sockets between the HTTP process and an engine process, on one machine or between two.

On one machine they are Unix sockets in a folder that no other user can enter. Between machines they are TCP
with CurveZMQ: everything is encrypted, the engine accepts only the holder of the key it was started with, and
the HTTP process only the engine whose key it was given (`remote_sockets`). Each side generates its own keys,
and only public keys are exchanged. The HTTP process is the CurveZMQ server of both sockets, whichever side
binds them.
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
"""Milliseconds without data after which a connection between machines is cut. ZeroMQ's own threads keep it
alive whatever the process does, so this only catches a process that is not scheduled at all, or a machine
without network."""

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
    """Create a socket that neither drops nor blocks: its queue is bounded by the number of requests."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket


def connect_events(context: Context, launch: Launch) -> Socket:
    """Connect a socket for events; a process may have several."""
    socket = new_socket(context, zmq.PUSH)
    if launch.remote is None:
        socket.connect(endpoint(launch.socket_dir, EVENTS_SOCKET))
    else:
        _secure_engine(socket, launch.remote)
        prepare_connection(socket)
        socket.connect(launch.remote.events)
    return socket


def bind_commands(context: Context, launch: Launch) -> tuple[Socket, str]:
    """Bind the socket for commands; return it and its address."""
    socket = new_socket(context, zmq.PULL)
    if launch.remote is None:
        address = endpoint(launch.socket_dir, COMMANDS_SOCKET)
        socket.bind(address)
        return socket, address
    _secure_engine(socket, launch.remote)
    return socket, bind_any_port(socket, launch.remote.host)


@contextmanager
def calling_when_cut(events: Socket, leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` in a thread when the connection of a socket for events is cut."""
    # Imported here: it imports asyncio, which an engine process on this machine does not need.
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
    """Make a socket detect when its connection to another machine is cut. It does not reconnect: messages
    lost with the first connection would stay lost."""
    socket.ipv6 = True
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
    socket.reconnect_ivl = -1


def _secure_engine(socket: Socket, remote: Remote) -> None:
    socket.curve_serverkey = remote.front_key.encode(KEY_ENCODING)
    socket.curve_publickey = remote.public_key.encode(KEY_ENCODING)
    socket.curve_secretkey = remote.secret_key.encode(KEY_ENCODING)


def bind_any_port(socket: Socket, host: str) -> str:
    """Bind to a free port of an address; return the address that others connect to."""
    is_v6 = ":" in host
    socket.ipv6 = is_v6
    socket.bind(f"tcp://[{host}]:*" if is_v6 else f"tcp://{host}:*")
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode(KEY_ENCODING)
