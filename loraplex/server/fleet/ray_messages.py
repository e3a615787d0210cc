"""What the front and the process that speaks to Ray for it say to each other: lines of JSON.

    front                                  driver
    ─────                                  ──────
    Connect                   ───────────▶ joins a cluster, or starts Ray on this machine
                              ◀─────────── Connected, or Refused, after which it ends
    Place                     ───────────▶ has Ray start an actor that holds the replica's GPUs or cores
                              ◀─────────── Placed, or Ended
    Run                       ───────────▶ has the actor start the engine process
                              ◀─────────── Running, then Ended when that has exited
    Release                   ───────────▶ ends the actor
                              ◀─────────── Ended, unless it was said before, then Released
    the end of its stdin      ───────────▶ ends all actors, and Ray if it has started it

An engine process is known by an `id` of its own. A replica that starts anew after its engine died does so in
the actor that it has, unless that is gone too.
"""

from __future__ import annotations

from typing import Final

import msgspec

Resources = dict[str, float]


class Order(msgspec.Struct, frozen=True, tag=True):
    """Base of what the front says."""


class Connect(Order, frozen=True):
    """`address`: of the cluster, None to start Ray on this machine, with its files in `folder`. `wait_s`: how
    long its head may take to answer."""

    address: str | None
    folder: str
    wait_s: float


class Place(Order, frozen=True):
    """`wait_s`: how long the resources may take to become free, and the head to answer."""

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
    """Base of what the driver says."""


class Node(msgspec.Struct, frozen=True):
    """A machine of the cluster, and what Ray may give away of it."""

    host: str
    cpus: float
    gpus: float


class Connected(Report, frozen=True):
    """`host`: this machine, as the others call it. `free`: of all nodes together."""

    host: str
    nodes: list[Node]
    free: Node


class Refused(Report, frozen=True):
    message: str


class Placed(Report, frozen=True):
    """`public_key`: with which the engine will connect."""

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
