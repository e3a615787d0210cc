"""An engine's view of the other replicas: their host memory, from which adapters may be copied.

Imports neither torch nor numpy: an engine process has other work to start first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    SlabBytes = npt.NDArray[np.uint8]


class SlabKey(NamedTuple):
    """Identifies slabs with the same bytes. `layout`: a hash of their memory layout."""

    version: str
    layout: str


class ComesLaterError(Exception):
    """Another replica is about to have the slab: try again in a moment."""


class Peers(Protocol):
    """The host memory of the other replicas, and the slabs they may copy from here. Thread-safe."""

    @property
    def is_joined(self) -> bool:
        """Return whether there are other replicas."""
        ...

    @property
    def num_failures(self) -> int:
        """Number of failed copies from other replicas."""
        ...

    def withdraw(self, memory: SlabBytes) -> None:
        """Stop offering slabs that overlap this memory, because it is about to be overwritten."""
        ...

    def fetch(self, key: SlabKey, target: SlabBytes) -> bytes | None:
        """Copy a slab here from another replica, and return the SHA-256 of its bytes.

        Returns None if no replica has it; `target` may hold anything then. Raises ComesLaterError.
        """
        ...

    def reading(self, key: SlabKey) -> None:
        """Let other replicas know that this one is reading the slab, until `settle`."""
        ...

    def offer(self, key: SlabKey, slab: SlabBytes, digest: bytes | None) -> None:
        """Offer a slab to other replicas until `withdraw` or `forget`. `digest`: its SHA-256, if known."""
        ...

    def settle(self, key: SlabKey) -> None:
        """Record that a read or copy of a slab has ended, successfully or not."""
        ...

    def forget(self, version: str) -> None:
        """Stop offering a version, because its memory is reused."""
        ...


class ReadCounts(NamedTuple):
    """Counts of weights files read, slabs and bytes copied from other replicas, and failed copies."""

    num_file_reads: int
    num_fetches: int
    num_bytes_fetched: int
    num_fetch_failures: int
