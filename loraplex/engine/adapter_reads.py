"""Reads an adapter's weights from another replica's host memory, or from its files if no replica has them.

Slabs of one version and one layout are the same bytes on every replica of a fleet, so that one replica can
copy them from another. A single engine has no other replicas, and reads files only.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from loraplex.adapters.slab import SlabLayout, slab_gaps
from loraplex.adapters.spec import AdapterSpec
from loraplex.engine.peers import Peers, ReadCounts, SlabKey

if TYPE_CHECKING:
    from loraplex.engine.peers import SlabBytes

ReadSlab = Callable[[AdapterSpec, SlabLayout, torch.Tensor], object]
"""Fills a slab; raises AdapterError or OSError if the weights cannot be read."""


class AdapterReads:
    """Fills slabs for an executor, on its loader threads."""

    def __init__(self, read_files: ReadSlab, peers: Peers | None = None) -> None:
        self._read_files = read_files
        self._peers = peers
        self._lock = threading.Lock()  # guards the counts below
        self._num_file_reads = 0
        self._num_fetches = 0
        self._num_bytes_fetched = 0

    @property
    def counts(self) -> ReadCounts:
        failures = 0 if self._peers is None else self._peers.num_failures
        with self._lock:
            return ReadCounts(self._num_file_reads, self._num_fetches, self._num_bytes_fetched, failures)

    def read(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        """Fill a slab that is not kept. Raises ComesLaterError, and as `ReadSlab` does."""
        if (peers := self._joined()) is None:
            self._read(spec, layout, slab)
        else:
            self._fetch_or_read(peers, spec, layout, slab, keeps=False)

    def keep(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        """Fill a slab that other replicas may copy, until its memory is filled again or `forget` is called.
        Raises as `read` does."""
        if (peers := self._joined()) is None:
            self._read(spec, layout, slab)
        else:
            peers.withdraw(bytes_of(slab))
            self._fetch_or_read(peers, spec, layout, slab, keeps=True)

    def forget(self, version: str) -> None:
        """Record that a kept version is evicted and its memory reused."""
        if self._peers is not None:
            self._peers.forget(version)

    def _joined(self) -> Peers | None:
        return self._peers if self._peers is not None and self._peers.is_joined else None

    def _fetch_or_read(
        self, peers: Peers, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor, *, keeps: bool
    ) -> None:
        key, memory = slab_key(spec, layout, slab.dtype), bytes_of(slab)
        try:
            digest = peers.fetch(key, memory)
            if digest is None:
                peers.reading(key)
                for begin, end in slab_gaps(layout):  # gaps are hashed with the rest
                    slab[begin:end] = 0
                self._read(spec, layout, slab)
            else:
                with self._lock:
                    self._num_fetches += 1
                    self._num_bytes_fetched += memory.nbytes
            if keeps:
                peers.offer(key, memory, digest)
        finally:
            peers.settle(key)

    def _read(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        with self._lock:
            self._num_file_reads += 1
        self._read_files(spec, layout, slab)


def slab_key(spec: AdapterSpec, layout: SlabLayout, dtype: torch.dtype) -> SlabKey:
    """Return the key that only slabs with the same bytes share."""
    laid_out = f"{layout.shape} {dtype} {layout.num_elements}"
    return SlabKey(spec.version, hashlib.sha256(laid_out.encode()).hexdigest()[:16])


def bytes_of(slab: torch.Tensor) -> SlabBytes:
    found: SlabBytes = slab.view(-1).view(torch.uint8).numpy()
    return found
