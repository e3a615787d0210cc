"""The second set of weights, into which an adapter is merged: which version it holds, and its memory.

            hold                 hold(another)
    NONE ----------> HELD(v) ------------------> HELD(w)
      ^                 |
      `-- give_back ----'      memory is short, and the step runs on the base weights; or v was removed

The base weights are never written to. So a step may run on either set, and a version that is held stays as
good as new while unmerged steps run.
"""

from __future__ import annotations

from typing import Final

from loraplex.scheduling.memory import Memory

_RETRY_STEPS: Final = 256
"""Steps after memory was short until it is taken again."""


class MergedWeights:
    """Decides what the second set holds. `version`: the version that is held. `num_merges`: how often one
    was written."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._table = memory.table
        self._bytes: dict[str, int] = {}
        self.version: str | None = None
        self.num_merges = 0
        self._merge: str | None = None
        self._drops = False
        self._num_steps = 0
        self._not_before = 0

    def know(self, version: str, num_bytes: int) -> None:
        """Record the bytes that a version's merged weights take."""
        self._bytes[version] = num_bytes

    def bytes_of(self, version: str) -> int:
        """Return the bytes that writing a version's merged weights would fill: 0 if they are held."""
        return 0 if version == self.version else self._bytes[version]

    @property
    def bytes_to_write(self) -> int:
        """The bytes that are written before the step being decided."""
        return 0 if self._merge is None else self._bytes[self._merge]

    def can_hold(self, version: str) -> bool:
        """Return whether a step may run on a version: it is held, or could be written now, as far as is
        known, and memory was not short lately."""
        if self._num_steps < self._not_before:
            return False
        table = self._table
        is_resident = version in table.serving.resident and version not in table.streaming
        return version == self.version or (is_resident and version in self._bytes)

    def hold(self, version: str) -> bool:
        """Write a version before the next step, unless it is held. Return False if there is no memory."""
        if version == self.version:
            return True
        if not self._memory.take_merged(self._bytes[version]):
            self.short_of_memory()
            return False
        self.version = self._merge = version
        self.num_merges += 1
        return True

    def give_back(self) -> bool:
        """Give back the memory. Return False if there is none."""
        if self.version is None:
            return False
        self._memory.give_back_merged()
        self.version = self._merge = None
        self._drops = True
        self.short_of_memory()
        return True

    def short_of_memory(self) -> None:
        """Record that memory is short: for some time no step runs on merged weights, so that they can be
        given back."""
        self._not_before = self._num_steps + _RETRY_STEPS

    def forget(self, version: str) -> None:
        """Record that a version was removed."""
        self._bytes.pop(version, None)
        if version == self.version:
            self.give_back()
            self._not_before = 0

    def take_orders(self) -> tuple[str | None, bool]:
        """Return the version to write before the step that is decided, and whether memory was given back
        since the last step."""
        orders = self._merge, self._drops
        self._merge, self._drops = None, False
        self._num_steps += 1
        return orders

    def check_integrity(self) -> None:
        """Assert that there is memory for what is held."""
        assert self.version is None or self._memory.merged_bytes >= self._bytes[self.version] > 0
