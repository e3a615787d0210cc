"""What replicas say to each other about slabs: ranged reads, as HTTP has them, over CurveZMQ.

    replica without it                           replica that has it
    ──────────────────                           ───────────────────
    Ask (bytes [begin, end) of a slab) ────────▶
                                       ◀──────── Answer, and the bytes if it has them

Every Ask is answered by itself, so that a copy that broke off goes on from where it was, over another
connection or from another replica. One side asks for a few pieces ahead; more are never on their way.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

PIECE_BYTES: Final = 1 << 20
"""The most that is asked for at a time."""
MAX_ASK_BYTES: Final = 4096
MAX_ANSWER_BYTES: Final = PIECE_BYTES + 4096


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A replica that has a version in its host memory, or is about to. `awaited`: it was not seen there yet,
    and will come, as requests for it are there. `number`: the replica's, for logs."""

    address: str
    awaited: bool = False
    number: int | None = None

    @property
    def shown(self) -> str:
        """Return the name that logs have for it."""
        known_as = "the replica" if self.number is None else f"replica {self.number}"
        return f"{known_as} at {self.address}"


class SlabState(StrEnum):
    """What a replica says of a slab. COMES: it is being read or copied there at this moment."""

    HELD = "held"
    COMES = "comes"
    ABSENT = "absent"
    OUT_OF_RANGE = "out of range"


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [begin, end) of the slab of a version; see `engine.peers.SlabKey`."""

    version: str
    layout: str
    begin: int
    end: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """`num_bytes`: of the whole slab. `digest`: its SHA-256, None while it is being computed."""

    state: SlabState
    num_bytes: int = 0
    digest: bytes | None = None


_encoder: Final = msgspec.msgpack.Encoder()
encode: Final = _encoder.encode
decode_ask: Final = msgspec.msgpack.Decoder(Ask).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
