"""The messages between the HTTP process and the engine process.

    HTTP process                                 engine process
    ────────────                                 ──────────────
    Launch (one JSON line on stdin) ───────────▶ opens the sockets
                                    ◀─────────── Listening
    Hello                           ───────────▶ unlinks the sockets, builds the core
                                    ◀─────────── StartProgress*, then Loaded or Failed
    JoinPool, in a fleet            ───────────▶ offers its adapters to other replicas
                                    ◀─────────── PoolJoined
    AddAdapter*, Prepare            ───────────▶ compiles and captures what these adapters need
                                    ◀─────────── StartProgress*, then Ready or Failed
    AddRequest, Cancel              ───────────▶
                                    ◀─────────── Rejected, or Outputs: an empty one when queued,
                                                 then one per step
    AddAdapter, RemoveAdapter       ───────────▶
                                    ◀─────────── AdapterAdded, AdapterRemoved
    SetTenants                      ───────────▶
    GetStats                        ───────────▶
                                    ◀─────────── Stats
                                    ◀─────────── Alive, periodically, whatever else it does
    Shutdown                        ───────────▶ exits with 0
                                    ◀─────────── Failed, then exits with another code

Messages are msgpack on two one-way ZeroMQ sockets: a socket that only receives can be read from its
edge-triggered descriptor without losing the wake-ups that sending on it would swallow. The parent binds the
events socket before the child exists, and connects to the commands socket when told that the child has bound
it, so neither side ever sends into a socket without a peer. Once both have received a message, the sockets'
names are removed, so that a kill -9 leaves none behind. An engine on another machine is started by a process
there (`Remote`), and the sockets are TCP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.engine_policy import EnginePolicy
from loraplex.core.errors import AdapterFormatError, InvalidRequestError, LoraplexError
from loraplex.core.logs import LogFormat
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.server.pool.messages import Holder

EVENTS_SOCKET: Final = "events.sock"
COMMANDS_SOCKET: Final = "commands.sock"
_READABLE: Final = int(zmq.POLLIN)


def endpoint(socket_dir: str, name: str) -> str:
    """Return the ZeroMQ address of one of the two sockets."""
    return f"ipc://{socket_dir}/{name}"


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether `recv` would return at once. This is cheaper than the exception of a refused `recv`."""
    return bool(int(socket.get(zmq.EVENTS)) & _READABLE)


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """The sockets of an engine on another machine. `events`: the address where the HTTP process listens;
    `host`: the engine's own address. Keys are CurveZMQ's; `front_key` is the public key of the HTTP
    process."""

    events: str
    front_key: str
    host: str = ""
    public_key: str = ""
    secret_key: str = ""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child needs to build its core; `factory` and `config_type` are "module:name". `socket_dir`
    is set for a child of the HTTP process, `remote` for an engine on another machine."""

    factory: str
    config_type: str
    config: msgspec.Raw
    socket_dir: str = ""
    remote: Remote | None = None
    parent_pid: int
    log_level: int
    log_format: LogFormat = LogFormat.TEXT


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: a msgpack array whose first element names the kind."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A serialized LoraplexError. `param` is the field at fault, for the classes that name one."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: LoraplexError) -> ErrorInfo:
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in ERROR_KINDS)
        param = getattr(error, "param", None) or getattr(error, "field", None)
        return cls(kind=kind, message=str(error), param=param)

    def to_error(self) -> LoraplexError:
        """Return a new error of the class that was sent."""
        error_class = ERROR_KINDS.get(self.kind, LoraplexError)
        if issubclass(error_class, InvalidRequestError):
            return error_class(self.message, param=self.param)
        if issubclass(error_class, AdapterFormatError):
            return error_class(self.message, field=self.param)
        return error_class(self.message)


def _error_kinds(root: type[LoraplexError]) -> dict[str, type[LoraplexError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds |= _error_kinds(child)
    return kinds


ERROR_KINDS: Final = _error_kinds(LoraplexError)
"""Class name -> class, for the tree in core/errors.py; a subclass defined elsewhere is sent as its base
class."""


class Hello(Message, frozen=True):
    pass


class JoinPool(Message, frozen=True):
    """Tells the engine that there are other replicas to share adapters in host memory with. The keys are the
    fleet's."""

    public_key: str
    secret_key: str


class AddRequest(Message, frozen=True):
    """A new request. `holders`: replicas from which its adapter can be copied if this one does not have
    it."""

    request: EngineRequest
    holders: tuple[Holder, ...] = ()


class Cancel(Message, frozen=True):
    request_id: str


class AddAdapter(Message, frozen=True):
    """A new adapter. `holders`: as in AddRequest."""

    spec: AdapterSpec
    holders: tuple[Holder, ...] = ()


class RemoveAdapter(Message, frozen=True):
    version: str


class Prepare(Message, frozen=True):
    """Tells the engine that the initial adapters are known, and to prepare for serving them."""


class SetTenants(Message, frozen=True):
    """The shares, priorities and objectives of all tenants that have any."""

    policies: tuple[TenantPolicy, ...]


class GetStats(Message, frozen=True):
    pass


class Shutdown(Message, frozen=True):
    pass


class Listening(Message, frozen=True):
    """The child has bound the socket for commands at this address."""

    commands: str


class PoolJoined(Message, frozen=True):
    """Other replicas may copy adapters from this address."""

    address: str


class StartProgress(Message, frozen=True):
    """The progress of loading. `fraction` is of this phase; None if it is unknown."""

    phase: str
    fraction: float | None = None


class Loaded(Message, frozen=True):
    """The core is built, and accepts adapters."""


class Ready(Message, frozen=True):
    """Everything that known adapters need is compiled and captured. `load_s`: seconds since the start.

    `num_kv_blocks` is None for a server elsewhere that does not report it. `costs`: the profile of the engine
    as JSON, `policy`: how it decides; None where these are unknown.
    """

    num_kv_blocks: int | None
    max_model_len: int
    load_s: float
    costs: str | None = None
    policy: EnginePolicy | None = None


class Failed(Message, frozen=True):
    """The core could not be built, or a step raised. The process exits right after."""

    error: ErrorInfo


class Outputs(Message, frozen=True):
    outputs: list[EngineOutput]


class Rejected(Message, frozen=True):
    """The core refused a request and queued nothing."""

    request_id: str
    error: ErrorInfo


class AdapterAdded(Message, frozen=True):
    version: str
    error: ErrorInfo | None = None


class AdapterRemoved(Message, frozen=True):
    version: str
    error: ErrorInfo | None = None


class Stats(Message, frozen=True):
    stats: EngineStats


class Alive(Message, frozen=True):
    """A heartbeat: the process is being scheduled. It is sent over its own connection, so its order relative
    to other events is undefined."""


Command = (
    Hello
    | JoinPool
    | AddRequest
    | Cancel
    | AddAdapter
    | RemoveAdapter
    | Prepare
    | SetTenants
    | GetStats
    | Shutdown
)
Event = (
    Listening
    | PoolJoined
    | StartProgress
    | Loaded
    | Ready
    | Failed
    | Outputs
    | Rejected
    | AdapterAdded
    | AdapterRemoved
    | Stats
    | Alive
)


def encode_extra(value: object) -> object:
    """Encode types of the core that msgspec does not support."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


def decode_extra(kind: type, value: Any) -> object:
    """Decode what `encode_extra` encoded."""
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"cannot receive a {kind.__name__}")


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=encode_extra)
_commands: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command, dec_hook=decode_extra)
_events: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event, dec_hook=decode_extra)

encode: Final = _encoder.encode
decode_command: Final = _commands.decode
decode_event: Final = _events.decode
