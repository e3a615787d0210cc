"""Copy a slab from another replica, piece by piece, and verify its hash."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from loraplex.engine.peers import SlabKey
from loraplex.server.engine_sockets import KEY_ENCODING, Context, CurveKeys
from loraplex.server.pool.messages import (
    MAX_ANSWER_BYTES,
    PIECE_BYTES,
    Answer,
    Ask,
    SlabState,
    decode_answer,
    encode,
)

if TYPE_CHECKING:
    from loraplex.engine.peers import SlabBytes

_PIECES_AHEAD: Final = 4
_STALL_S: Final = 1.0
"""Seconds without an answer after which a replica is given up."""
_LEAST_S: Final = 5.0
_LEAST_BYTES_PER_S: Final = 10e6
"""A copy that takes longer than `_LEAST_S` plus its bytes at this rate is given up, however steadily it
proceeds."""
_HASH_AGAIN_S: Final = 0.005


class CopyError(Exception):
    """A copy failed. The message says what was wrong with the replica it came from."""


class NoAnswerError(CopyError):
    """The replica does not answer."""


class WrongBytesError(CopyError):
    """The bytes received differ from the replica's: the whole slab must be copied again."""


class Link:
    """A connection to a replica. `stall_s`: seconds to wait for an answer."""

    def __init__(self, context: Context, address: str, keys: CurveKeys, stall_s: float = _STALL_S) -> None:
        self._stall_s = stall_s
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        # A connection that the other side refused, because its keys differ, cannot take anything any more.
        self._socket.sndtimeo = round(stall_s * 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        self._socket.curve_serverkey = self._socket.curve_publickey = keys.public.encode(KEY_ENCODING)
        self._socket.curve_secretkey = keys.secret.encode(KEY_ENCODING)
        self._socket.connect(address)

    def ask(self, key: SlabKey, begin: int, end: int) -> None:
        """Send a question. Raises NoAnswerError if nobody takes it."""
        try:
            self._socket.send(encode(Ask(key.version, key.layout, begin, end)))
        except zmq.Again as error:
            raise self._no_answer() from error

    def answer(self) -> tuple[Answer, memoryview]:
        """Return the next answer and its bytes. Raises CopyError if there is none, or an invalid one."""
        if not self._socket.poll(int(self._stall_s * 1000)):
            raise self._no_answer()
        frames = self._socket.recv_multipart(copy=False)
        try:
            answer = decode_answer(frames[0].buffer)
            piece = frames[1].buffer
        except (msgspec.DecodeError, IndexError) as error:
            raise CopyError("its answer makes no sense; is it of the same version of loraplex?") from error
        return answer, piece

    def close(self) -> None:
        self._socket.close()

    def _no_answer(self) -> NoAnswerError:
        return NoAnswerError(f"it did not answer for {self._stall_s:g} s")


class SlabCopy:
    """A slab being copied here, over one or several connections, one after the other."""

    def __init__(self, key: SlabKey, target: SlabBytes, on_first: Callable[[], None]) -> None:
        """`on_first`: called when the first bytes have arrived."""
        self._key = key
        self._target = target
        self._on_first = on_first
        self._until_s = time.monotonic() + _LEAST_S + target.nbytes / _LEAST_BYTES_PER_S
        self.restart()

    @property
    def digest(self) -> bytes:
        """The hash of the bytes received so far."""
        return self._hash.digest()

    @property
    def is_late(self) -> bool:
        """Return whether the copy has taken longer than allowed, over all replicas."""
        return time.monotonic() > self._until_s

    def restart(self) -> None:
        """Start again with the first byte."""
        self.num_done = 0
        self._hash = hashlib.sha256()

    def go_on(self, link: Link) -> SlabState:
        """Copy everything missing from a replica; return HELD when all of it is here and verified, or the
        state that the replica reports if it does not have the slab.

        Raises CopyError; the bytes received until then are kept.
        """
        num_bytes, num_asked, num_ahead = self._target.nbytes, self.num_done, 0
        answer, is_held = Answer(SlabState.ABSENT), False
        while not is_held or self.num_done < num_bytes:
            # The first answer shows whether the slab is there at all.
            while num_ahead < (_PIECES_AHEAD if is_held else 1) and (not is_held or num_asked < num_bytes):
                end = min(num_asked + PIECE_BYTES, num_bytes)
                link.ask(self._key, num_asked, end)
                num_asked, num_ahead = end, num_ahead + 1
            answer, piece = self._answer(link)
            num_ahead -= 1
            if answer.state is not SlabState.HELD:
                if is_held:
                    raise CopyError("it has let the adapter go")
                return answer.state
            is_held = True
            self._take(answer, piece)
        self._verify(link, answer)
        return SlabState.HELD

    def _answer(self, link: Link) -> tuple[Answer, memoryview]:
        if self.is_late:
            raise CopyError("it takes too long")
        return link.answer()

    def _take(self, answer: Answer, piece: memoryview) -> None:
        begin, num_bytes = self.num_done, self._target.nbytes
        if answer.num_bytes != num_bytes:
            raise CopyError(f"it has {answer.num_bytes} bytes, not {num_bytes}")
        if piece.nbytes != min(PIECE_BYTES, num_bytes - begin):
            raise CopyError(f"it sent {piece.nbytes} bytes instead of those that were asked for")
        self._target[begin : begin + piece.nbytes] = piece
        # Hash the bytes in `target`, not those received: the copy within this process may go wrong too.
        self._hash.update(self._target[begin : begin + piece.nbytes].data)
        self.num_done += piece.nbytes
        if begin == 0:
            self._on_first()

    def _verify(self, link: Link, answer: Answer) -> None:
        while answer.digest is None:
            time.sleep(_HASH_AGAIN_S)
            link.ask(self._key, self.num_done, self.num_done)
            answer, _ = self._answer(link)
            if answer.state is not SlabState.HELD:
                raise CopyError("it has let the adapter go")
        if answer.digest != self.digest:
            raise WrongBytesError("its SHA-256 is not that of the bytes that came")
