"""The location of adapters: on which replicas' devices, and in which replicas' host memory."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

_NO_REPLICAS: Final[frozenset[int]] = frozenset()


class AdapterTiers:
    """The replicas that hold an adapter, by tier, as they report it or as it follows from requests."""

    def __init__(self) -> None:
        self._device: dict[int, set[int]] = {}
        self._host: dict[int, set[int]] = {}

    def on_device(self, adapter: int) -> Set[int]:
        """Return the replicas that can compute with it at once, or are loading it."""
        return self._device.get(adapter, _NO_REPLICAS)

    def on_host(self, adapter: int) -> Set[int]:
        """Return the replicas whose host memory holds it, or to which it is being copied."""
        return self._host.get(adapter, _NO_REPLICAS)

    def adapters_on_device(self, replica: int) -> frozenset[int]:
        """Return all adapters that a replica can compute with. Iterates over every adapter on any device."""
        return frozenset(adapter for adapter, replicas in self._device.items() if replica in replicas)

    def loaded(self, replica: int, adapter: int) -> None:
        self._device.setdefault(adapter, set()).add(replica)

    def evicted(self, replica: int, adapter: int) -> None:
        _discard(self._device, adapter, replica)

    def staged(self, replica: int, adapter: int) -> None:
        self._host.setdefault(adapter, set()).add(replica)

    def dropped(self, replica: int, adapter: int) -> None:
        """Record that the replica's host memory no longer holds it."""
        _discard(self._host, adapter, replica)


def _discard(holders: dict[int, set[int]], adapter: int, replica: int) -> None:
    found = holders.get(adapter)
    if found is not None:
        found.discard(replica)
        if not found:
            del holders[adapter]
