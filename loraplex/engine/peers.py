"""What an engine knows of the replicas beside it: their host memory, which adapters may be copied from.

Imports neither torch nor numpy: the process of an engine begins other things before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    SlabBytes = npt.NDArray[np.uint8]


class SlabKey(NamedTuple):
    """Slabs with the same key hold the same bytes. `layout`: a hash of what they are laid out for."""

    version: str
    layout: str


class ComesLaterError(Exception):
    """Another replica is about to have the slab: ask again in a moment."""


class Peers(Protocol):
    """The host memory of the other replicas, and what they may copy from here. Called on any thread."""

    @property
    def is_joined(self) -> bool:
        """Tell whether there are other replicas."""
        ...

    @property
    def num_failures(self) -> int:
        """How many copies from another replica came to nothing."""
        ...

    def withdraw(self, memory: SlabBytes) -> None:
        """Let others copy nothing any more that overlaps this memory, as it is about to be filled."""
        ...

    def fetch(self, key: SlabKey, target: SlabBytes) -> bytes | None:
        """Copy a slab here from another replica, and return the SHA-256 that its bytes were found to have.

        None if no replica has it: `target` may hold anything then. Raises ComesLaterError.
        """
        ...

    def reading(self, key: SlabKey) -> None:
        """Tell others who ask for a slab that it comes, until `settle`."""
        ...

    def offer(self, key: SlabKey, slab: SlabBytes, digest: bytes | None) -> None:
        """Let others copy a slab until `withdraw` or `forget`. `digest`: its SHA-256, if it is known."""
        ...

    def settle(self, key: SlabKey) -> None:
        """Record that a slab is not on its way any more, whether it has come or not."""
        ...

    def forget(self, version: str) -> None:
        """Let others copy a version no more, as its memory is given away."""
        ...


class ReadCounts(NamedTuple):
    """How often weights files were opened, slabs were copied from other replicas, and such copies failed."""

    num_file_reads: int
    num_fetches: int
    num_bytes_fetched: int
    num_fetch_failures: int
