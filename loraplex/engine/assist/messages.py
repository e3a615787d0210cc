"""Messages to a CPU LoRA worker, at its start and over its socket, and its answer. Tasks are not among them.

A packet is one message; weights are sent as a file descriptor.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from loraplex.core.logs import LogFormat

_MESSAGE: Final = struct.Struct("=cqq")
_WEIGHTS, _GO, _WAKE = b"w", b"g", b"a"
_MAX_ANSWER_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A worker's command line. File descriptors are inherited. `profiled`: in_features, out_features and rank
    of the product that the worker measures."""

    slot: int
    num_slots: int
    ring_size: int
    core: int
    dtype: str
    parent_pid: int
    socket_fd: int
    control_fd: int
    control_bytes: int
    x_fd: int
    x_bytes: int
    y_fd: int
    y_bytes: int
    profiled: tuple[int, int, int]
    log_level: int
    log_format: LogFormat

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Launch:
        fields = json.loads(text)
        fields["profiled"] = tuple(fields["profiled"])
        fields["log_format"] = LogFormat(fields["log_format"])
        return cls(**fields)

    @property
    def fds(self) -> tuple[int, ...]:
        return self.socket_fd, self.control_fd, self.x_fd, self.y_fd


@dataclass(frozen=True, slots=True)
class Weights:
    """A block of weights, and its index in tasks."""

    index: int
    fd: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Go:
    """The worker takes part in tasks from this ticket on."""

    first_ticket: int


@dataclass(frozen=True, slots=True)
class Wake:
    """The pool was armed."""


Message = Weights | Go | Wake


def send(channel: socket.socket, message: Message) -> None:
    """Send a message. Raises OSError if the other end is gone, or does not read (BlockingIOError)."""
    if isinstance(message, Weights):
        data = _MESSAGE.pack(_WEIGHTS, message.index, message.num_bytes)
        socket.send_fds(channel, [data], [message.fd])
    elif isinstance(message, Go):
        channel.send(_MESSAGE.pack(_GO, message.first_ticket, 0))
    else:
        channel.send(_MESSAGE.pack(_WAKE, 0, 0))


def receive(channel: socket.socket) -> Message | None:
    """Return the next message; None when the other end is closed."""
    data, fds, _, _ = socket.recv_fds(channel, _MESSAGE.size, 1)
    if not data:
        return None
    kind, value, num_bytes = _MESSAGE.unpack(data)
    if kind == _WEIGHTS:
        os.set_inheritable(fds[0], False)
        return Weights(value, fds[0], num_bytes)
    return Go(value) if kind == _GO else Wake()


def send_ready(channel: socket.socket, times_us: Mapping[int, float]) -> None:
    """Send the worker's one answer: number of rows -> microseconds."""
    channel.send(json.dumps(list(times_us.items())).encode())


def receive_ready(channel: socket.socket) -> dict[int, float] | None:
    """Return the worker's answer; None if the worker ended instead."""
    data = channel.recv(_MAX_ANSWER_BYTES)
    return dict(json.loads(data)) if data else None
