"""Functions that the processes of shards may call to build; a module, since they import it."""

from __future__ import annotations

from typing import Any

from loraplex.core.errors import CapacityError


class NoExecutor:
    num_pending_loads = 0

    def poll_adapters(self, timeout_s: float) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def build_but_one(shard: Any, collective: object, report: object, failing: int) -> Any:
    if shard.index == failing:
        raise CapacityError(f"no room for shard {failing}")
    return NoExecutor()
