"""Messages between replicas about slabs: ranged reads, as in HTTP, over CurveZMQ.

    replica without it                           replica that has it
    ──────────────────                           ───────────────────
    Ask (bytes [begin, end) of a slab) ────────▶
                                       ◀──────── Answer, and the bytes if it has them

Each Ask is answered independently, so an interrupted copy resumes where it was, over another connection or
from another replica. The client asks for a few pieces ahead; no more are ever in flight.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

PIECE_BYTES: Final = 1 << 20
"""Most bytes requested at a time."""
MAX_ASK_BYTES: Final = 4096
MAX_ANSWER_BYTES: Final = PIECE_BYTES + 4096


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A replica that has a version in its host memory, or will soon. `awaited`: it was not seen to have the
    version yet but will, because it has requests for it. `number`: the replica's number, for logs."""

    address: str
    awaited: bool = False
    number: int | None = None

    @property
    def shown(self) -> str:
        """The replica's name in logs."""
        known_as = "the replica" if self.number is None else f"replica {self.number}"
        return f"{known_as} at {self.address}"


class SlabState(StrEnum):
    """The state of a slab at a replica. COMES: it is being read or copied there right now."""

    HELD = "held"
    COMES = "comes"
    ABSENT = "absent"
    OUT_OF_RANGE = "out of range"


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request for bytes [begin, end) of the slab of a version; see `engine.peers.SlabKey`."""

    version: str
    layout: str
    begin: int
    end: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an Ask. `num_bytes`: of the whole slab. `digest`: its SHA-256, None while it is being
    computed."""

    state: SlabState
    num_bytes: int = 0
    digest: bytes | None = None


_encoder: Final = msgspec.msgpack.Encoder()
encode: Final = _encoder.encode
decode_ask: Final = msgspec.msgpack.Decoder(Ask).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
