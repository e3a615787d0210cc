"""The slabs in this process's host memory that other replicas may copy.

Nothing is pinned for them: a slab is withdrawn before it is evicted, and its readers go elsewhere. So a slow
reader never keeps memory from the requests of this replica. Bytes are copied out in pieces, and a piece
counts only if the slab was still offered when its copy had ended.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Final

from loraplex.engine.peers import SlabKey

if TYPE_CHECKING:
    from loraplex.engine.peers import SlabBytes

_HASHED_BYTES: Final = 4 << 20
"""Bytes hashed between two checks that the slab is still offered."""


class Offer:
    """One slab. `digest`: its SHA-256, once known; `is_asked_for`: the digest is being computed."""

    def __init__(self, key: SlabKey, memory: SlabBytes, digest: bytes | None) -> None:
        self.key = key
        self.num_bytes = memory.nbytes
        self.digest = digest
        self.is_asked_for = False
        self._memory: SlabBytes | None = memory
        self._begin = memory.ctypes.data

    @property
    def is_there(self) -> bool:
        return self._memory is not None

    def overlaps(self, begin: int, end: int) -> bool:
        """Return whether it overlaps this range of addresses."""
        return self._begin < end and begin < self._begin + self.num_bytes

    def withdraw(self) -> None:
        self._memory = None

    def copy(self, begin: int, end: int) -> SlabBytes | None:
        """Return a copy of bytes [begin, end); None if the slab was withdrawn."""
        memory = self._memory
        if memory is None:
            return None
        piece = memory[begin:end].copy()
        return piece if self.is_there else None

    def compute_digest(self) -> None:
        """Set `digest`, unless the slab is withdrawn meanwhile."""
        found = hashlib.sha256()
        for begin in range(0, self.num_bytes, _HASHED_BYTES):
            memory = self._memory
            if memory is None:
                return
            found.update(memory[begin : begin + _HASHED_BYTES].data)
        if self.is_there:
            self.digest = found.digest()


class Offers:
    """All offered slabs, and the keys of those being read or copied here. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._offers: dict[SlabKey, Offer] = {}
        self._coming: set[SlabKey] = set()

    def find(self, key: SlabKey) -> Offer | None:
        with self._lock:
            return self._offers.get(key)

    def is_coming(self, key: SlabKey) -> bool:
        with self._lock:
            return key in self._coming

    def comes(self, key: SlabKey) -> None:
        with self._lock:
            self._coming.add(key)

    def settle(self, key: SlabKey) -> None:
        with self._lock:
            self._coming.discard(key)

    def add(self, key: SlabKey, slab: SlabBytes, digest: bytes | None) -> None:
        with self._lock:
            self._offers[key] = Offer(key, slab, digest)

    def withdraw(self, memory: SlabBytes) -> None:
        """Withdraw all slabs that overlap this memory."""
        begin = memory.ctypes.data
        with self._lock:
            self._remove([o for o in self._offers.values() if o.overlaps(begin, begin + memory.nbytes)])

    def forget(self, version: str) -> None:
        with self._lock:
            self._remove([offer for offer in self._offers.values() if offer.key.version == version])

    def clear(self) -> None:
        with self._lock:
            self._remove(list(self._offers.values()))

    def _remove(self, offers: list[Offer]) -> None:
        for offer in offers:
            offer.withdraw()
            del self._offers[offer.key]
