"""Where adapters are: on which replicas' devices, and in which replicas' host memory."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

_NO_REPLICAS: Final[frozenset[int]] = frozenset()


class AdapterTiers:
    """Which replicas hold an adapter, by tier; what each of them reports, or is seen to do."""

    def __init__(self) -> None:
        self._device: dict[int, set[int]] = {}
        self._host: dict[int, set[int]] = {}

    def on_device(self, adapter: int) -> Set[int]:
        """The replicas that can compute with it at once, or are loading it."""
        return self._device.get(adapter, _NO_REPLICAS)

    def on_host(self, adapter: int) -> Set[int]:
        """The replicas whose host memory holds it, or to which it is being copied."""
        return self._host.get(adapter, _NO_REPLICAS)

    def adapters_on_device(self, replica: int) -> frozenset[int]:
        """All adapters that a replica can compute with; this looks at every adapter that is on any device."""
        return frozenset(adapter for adapter, replicas in self._device.items() if replica in replicas)

    def loaded(self, replica: int, adapter: int) -> None:
        self._device.setdefault(adapter, set()).add(replica)

    def evicted(self, replica: int, adapter: int) -> None:
        _discard(self._device, adapter, replica)

    def staged(self, replica: int, adapter: int) -> None:
        self._host.setdefault(adapter, set()).add(replica)

    def dropped(self, replica: int, adapter: int) -> None:
        """The replica's host memory holds it no more."""
        _discard(self._host, adapter, replica)


def _discard(holders: dict[int, set[int]], adapter: int, replica: int) -> None:
    found = holders.get(adapter)
    if found is not None:
        found.discard(replica)
        if not found:
            del holders[adapter]
