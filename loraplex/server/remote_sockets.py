"""The HTTP process's sockets for an engine on another machine; see `engine_sockets`."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from loraplex.server.engine_sockets import (
    KEY_ENCODING,
    Context,
    CurveKeys,
    Socket,
    bind_any_port,
    new_socket,
    prepare_connection,
)
from loraplex.server.protocol_ipc import Remote


class RemoteSockets:
    """The HTTP process's sockets for one engine elsewhere. Nobody may connect before `admit`."""

    def __init__(self, context: Context, host: str) -> None:
        """Listen for events at `host`, an address of this machine."""
        self._context = context
        self._keys = CurveKeys.make()
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=_Nobody())
        self.events = new_socket(context, zmq.PULL)
        self._secure(self.events)
        self.remote = Remote(events=bind_any_port(self.events, host), front_key=self._keys.public)
        """The connection data that the engine needs of this side."""

    def admit(self, public_key: str) -> None:
        """Allow only the engine with this key to connect."""
        self._guard.configure_curve_callback("*", credentials_provider=OnlyKey(public_key))

    def connect_commands(self, address: str) -> tuple[Socket, Socket]:
        """Return a socket for commands, and one that gets a message when its connection is cut."""
        socket = new_socket(self._context, zmq.PUSH)
        self._secure(socket)
        prepare_connection(socket)
        cut = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        return socket, cut

    def close(self) -> None:
        """Stop the authenticator; must be called before the context is destroyed."""
        self._guard.stop()

    def _secure(self, socket: Socket) -> None:
        socket.curve_server = True
        socket.curve_publickey = self._keys.public.encode(KEY_ENCODING)
        socket.curve_secretkey = self._keys.secret.encode(KEY_ENCODING)


class _Nobody:
    def callback(self, domain: str, key: bytes) -> bool:
        return False


class OnlyKey:
    """Accepts only the holder of this key's secret."""

    def __init__(self, public_key: str) -> None:
        self._key = public_key.encode(KEY_ENCODING)

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key
