"""Replicas' parts in an adapter pool, in one process, for tests to drive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from loraplex.engine.peers import ComesLaterError, SlabKey
from loraplex.server.engine_sockets import CurveKeys
from loraplex.server.pool.messages import Holder
from loraplex.server.pool.replica_pool import ReplicaPool

SlabBytes = npt.NDArray[np.uint8]
LOOPBACK = "127.0.0.1"
KEY = SlabKey("v1", "float32")
NUM_BYTES = (3 << 20) + 77
"""Four pieces, the last of them short."""
WAIT_S = 60.0


@contextmanager
def joined(count: int, keys: CurveKeys | None = None) -> Iterator[list[tuple[ReplicaPool, str]]]:
    """So many of them, and their addresses."""
    keys = keys or CurveKeys.make()
    pools = [ReplicaPool() for _ in range(count)]
    try:
        yield [(pool, pool.join(keys, LOOPBACK)) for pool in pools]
    finally:
        for pool in pools:
            pool.close()


def slab(seed: int = 0, num_bytes: int = NUM_BYTES) -> SlabBytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def fetch(
    pool: ReplicaPool, *addresses: str, key: SlabKey = KEY, num_bytes: int = NUM_BYTES, awaited: bool = False
) -> SlabBytes | None:
    """Copy an adapter to a replica from the first of these that has it, and wait for it as a loader does."""
    pool.locate(key.version, [Holder(address, awaited) for address in addresses])
    target = np.zeros(num_bytes, dtype=np.uint8)
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            return None if pool.fetch(key, target) is None else target
        except ComesLaterError:
            time.sleep(0.001)
    raise AssertionError("the slab did not come")
