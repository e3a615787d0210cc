"""A cache that tenants share, and in which none can displace another's entries by having many."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TenantCache(Generic[K, V]):
    """At most `max_entries` values. Beyond them, a tenant with the most entries loses the one that was used
    longest ago. Thread-safe."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[str, V]] = OrderedDict()  # last those used last
        self._num_of: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.num_made = 0

    def get(self, key: K, tenant: str, make: Callable[[], V]) -> V:
        """Return the value of `key`, made for this tenant if there is none. What `make` raises is not
        kept."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][1]
        value = make()  # two threads may make the same at a time
        with self._lock:
            self.num_made += 1
            if key not in self._entries:
                self._num_of[tenant] += 1
                self._entries[key] = tenant, value
                if len(self._entries) > self._max_entries:
                    self._evict()
        return value

    def _evict(self) -> None:
        most = max(self._num_of.values())
        victim, tenant = next(
            (key, tenant) for key, (tenant, _) in self._entries.items() if self._num_of[tenant] == most
        )
        del self._entries[victim]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
