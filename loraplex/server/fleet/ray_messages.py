"""Messages between the front and the process that talks to Ray for it: lines of JSON.

    front                                  driver
    ─────                                  ──────
    Connect                   ───────────▶ joins a cluster, or starts Ray on this machine
                              ◀─────────── Connected, or Refused, after which it exits
    Place                     ───────────▶ has Ray start an actor that reserves the replica's GPUs or cores
                              ◀─────────── Placed, or Ended
    Run                       ───────────▶ has the actor start the engine process
                              ◀─────────── Running, then Ended when that has exited
    Release                   ───────────▶ ends the actor
                              ◀─────────── Ended, unless it was sent before, then Released
    the end of its stdin      ───────────▶ ends all actors, and Ray if it has started it

Each engine process has its own `id`. When a replica restarts after its engine died, it uses the same actor,
unless that is gone too.
"""

from __future__ import annotations

from typing import Final

import msgspec

Resources = dict[str, float]


class Order(msgspec.Struct, frozen=True, tag=True):
    """Base of the front's messages."""


class Connect(Order, frozen=True):
    """`address`: that of the cluster; None to start Ray on this machine, with its files in `folder`.
    `wait_s`: seconds that its head may take to answer."""

    address: str | None
    folder: str
    wait_s: float


class Place(Order, frozen=True):
    """`wait_s`: seconds that the resources may take to become free, and the head to answer."""

    id: int
    replica: int
    resources: Resources
    wait_s: float


class Run(Order, frozen=True):
    """`launch`: a Launch as JSON, which the actor completes."""

    id: int
    replica: int
    launch: str


class Release(Order, frozen=True):
    id: int
    replica: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Base of the driver's messages."""


class Node(msgspec.Struct, frozen=True):
    """A machine of the cluster, and the resources that Ray may allocate there."""

    host: str
    cpus: float
    gpus: float


class Connected(Report, frozen=True):
    """`host`: this machine's address for the others. `free`: free resources of all nodes together."""

    host: str
    nodes: list[Node]
    free: Node


class Refused(Report, frozen=True):
    message: str


class Placed(Report, frozen=True):
    """`public_key`: the key with which the engine will connect."""

    id: int
    host: str
    public_key: str


class Running(Report, frozen=True):
    id: int
    pid: int


class Ended(Report, frozen=True):
    id: int
    reason: str


class Released(Report, frozen=True):
    id: int


_orders: Final[msgspec.json.Decoder[Connect | Place | Run | Release]] = msgspec.json.Decoder(
    Connect | Place | Run | Release
)
_reports: Final[msgspec.json.Decoder[Connected | Refused | Placed | Running | Ended | Released]] = (
    msgspec.json.Decoder(Connected | Refused | Placed | Running | Ended | Released)
)

decode_order: Final = _orders.decode
decode_report: Final = _reports.decode


def line_of(message: Order | Report) -> bytes:
    return msgspec.json.encode(message) + b"\n"
