"""Answer ranged reads of the slabs that this process offers.

A dedicated thread copies pieces out without the GIL; ZeroMQ's threads encrypt and send them. The engine's
steps wait for neither. Only holders of the fleet's key can connect.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Final

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from loraplex.engine.peers import SlabKey
from loraplex.server.engine_sockets import KEY_ENCODING, Context, CurveKeys, Socket, bind_any_port
from loraplex.server.pool.messages import (
    MAX_ASK_BYTES,
    PIECE_BYTES,
    Answer,
    Ask,
    SlabState,
    decode_ask,
    encode,
)
from loraplex.server.pool.offers import Offer, Offers
from loraplex.server.remote_sockets import OnlyKey

logger = logging.getLogger(__name__)

_MAX_QUEUED: Final = 16
"""Number of pieces queued for one reader. Further requests of it are dropped, and it has to ask again."""
_HANDSHAKE_MS: Final = 5000
"""Milliseconds within which a connection must show the key, or be closed."""
_STOP_ADDRESS: Final = "inproc://stop"
_NOTHING: Final = memoryview(b"")


class SlabServer:
    """A server for slabs. `address`: where other replicas connect to."""

    def __init__(self, offers: Offers, keys: CurveKeys, host: str) -> None:
        """`host`: an address of this machine. `keys`: the key pair that all replicas of the fleet share.

        Raises zmq.ZMQError if nothing can listen there.
        """
        self._offers = offers
        self._context: Context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=OnlyKey(keys.public))
        self._asks = self._context.socket(zmq.ROUTER)
        self._asks.set_hwm(_MAX_QUEUED)
        self._asks.setsockopt(zmq.MAXMSGSIZE, MAX_ASK_BYTES)
        self._asks.linger = 0
        self._asks.curve_server = True
        self._asks.curve_publickey = keys.public.encode(KEY_ENCODING)
        self._asks.curve_secretkey = keys.secret.encode(KEY_ENCODING)
        self._asks.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        try:
            self.address = bind_any_port(self._asks, host)
        except zmq.ZMQError:
            self._guard.stop()
            self._context.destroy()
            raise
        self._stopped = self._context.socket(zmq.PAIR)
        self._stopped.bind(_STOP_ADDRESS)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.connect(_STOP_ADDRESS)
        self._unhashed: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name="slab-server", daemon=True),
            threading.Thread(target=self._hash, name="slab-digest", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop answering; when this returns, no thread accesses a slab."""
        self._stop.send(b"")
        self._offers.clear()
        self._unhashed.put(None)
        for thread in self._threads:
            thread.join()
        self._guard.stop()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asks, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                return
            try:
                self._answer_next(self._asks)
            except Exception:  # one reader's failure must not end the copies of others
                logger.exception("a bug while another replica copied an adapter")

    def _answer_next(self, asks: Socket) -> None:
        reader, *rest = asks.recv_multipart()
        try:
            ask = decode_ask(b"".join(rest))
        except msgspec.DecodeError:
            logger.warning("another replica asked for an adapter in words of another version of loraplex")
            return
        answer, piece = self._answer(ask)
        asks.send(reader, zmq.SNDMORE)
        asks.send(encode(answer), zmq.SNDMORE)
        asks.send(piece, copy=False)

    def _answer(self, ask: Ask) -> tuple[Answer, memoryview]:
        key = SlabKey(ask.version, ask.layout)
        offer = self._offers.find(key)
        if offer is None:
            comes = self._offers.is_coming(key)
            return Answer(SlabState.COMES if comes else SlabState.ABSENT), _NOTHING
        if not 0 <= ask.begin <= ask.end <= offer.num_bytes or ask.end - ask.begin > PIECE_BYTES:
            return Answer(SlabState.OUT_OF_RANGE, offer.num_bytes), _NOTHING
        if offer.digest is None and not offer.is_asked_for:
            offer.is_asked_for = True
            self._unhashed.put(offer)
        piece = offer.copy(ask.begin, ask.end)
        if piece is None:
            return Answer(SlabState.ABSENT), _NOTHING
        return Answer(SlabState.HELD, offer.num_bytes, offer.digest), piece.data

    def _hash(self) -> None:
        """Compute requested hashes in parallel to the copies, so that a hash takes no longer than all the
        bytes."""
        while (offer := self._unhashed.get()) is not None:
            offer.compute_digest()
