"""The block tables of running requests, kept from step to step in one array.

Building them from Python lists would take time for every block of every request's context. Between two steps
a request gets at most one block, so that a step only appends a few numbers and gathers rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.scheduling.plan import Chunk

_FIRST_ROWS: Final = 16
_FIRST_WIDTH: Final = 16
Integers = npt.NDArray[np.int64]


class BlockTables:
    """A row for each request that was in a step, until `forget`; zeros after its last block.

    A row follows its request's list of blocks (`Chunk.block_ids`), to which the scheduler only appends. A
    different list means that the request was preempted. Changes within a list must be announced by
    `forget_contents`.
    """

    def __init__(self) -> None:
        self._table_RB: Integers = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), dtype=np.int64)
        self._row_of: dict[str, int] = {}
        self._free = list(reversed(range(_FIRST_ROWS)))
        # By row: the list that it follows, and the number of its blocks that the row has.
        self._lists: list[list[int] | None] = [None] * _FIRST_ROWS
        self._counts = [0] * _FIRST_ROWS

    @property
    def num_rows(self) -> int:
        """Number of rows that memory is allocated for."""
        return len(self._lists)

    def rows_of(self, chunks: Sequence[Chunk]) -> Integers:
        """Return the row of each chunk's request, brought up to date."""
        row_of, lists, counts = self._row_of, self._lists, self._counts
        rows = []
        for chunk in chunks:
            blocks = chunk.block_ids
            row = row_of.get(chunk.request_id)
            if row is None or lists[row] is not blocks or counts[row] != len(blocks):
                row = self._follow(chunk.request_id, blocks)
                lists, counts = self._lists, self._counts
            rows.append(row)
        return np.array(rows, dtype=np.int64)

    def blocks_at(self, rows_T: Integers, indices_T: Integers) -> Integers:
        """Return one block of each row."""
        found: Integers = self._table_RB[rows_T, indices_T]
        return found

    def gather(self, rows_D: Integers, width: int) -> Integers:
        """Return the first `width` blocks of these rows."""
        return np.ascontiguousarray(self._table_RB[rows_D, :width])

    def forget(self, request_id: str) -> None:
        """Free the row of a request that ended or was preempted. Unknown requests are ignored."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._lists[row] = None
            self._free.append(row)

    def forget_contents(self) -> None:
        """Record that blocks were moved: lists changed in place, and every row is read again."""
        self._lists = [None] * len(self._lists)

    def check_integrity(self, request_ids: Set[str]) -> None:
        assert self._row_of.keys() <= request_ids
        assert sorted([*self._row_of.values(), *self._free]) == list(range(self.num_rows))

    def _follow(self, request_id: str, blocks: list[int]) -> int:
        """Append the new part of a list to its row, or start a row with it. Return the row."""
        num_blocks = len(blocks)
        row = self._row_of.get(request_id)
        if row is None:
            if not self._free:
                self._add_rows()
            row = self._row_of[request_id] = self._free.pop()
        if num_blocks > self._table_RB.shape[1]:
            self._widen(num_blocks)
        first = self._counts[row]
        if self._lists[row] is not blocks or num_blocks < first:
            self._table_RB[row, :first] = 0
            first = 0
        self._table_RB[row, first:num_blocks] = blocks[first:]
        self._lists[row], self._counts[row] = blocks, num_blocks
        return row

    def _add_rows(self) -> None:
        count = len(self._lists)
        self._table_RB = np.concatenate([self._table_RB, np.zeros_like(self._table_RB)])
        self._free += reversed(range(count, 2 * count))
        self._lists += [None] * count
        self._counts += [0] * count

    def _widen(self, num_blocks: int) -> None:
        num_rows, width = self._table_RB.shape
        wider = np.zeros((num_rows, max(2 * width, num_blocks)), dtype=np.int64)
        wider[:, :width] = self._table_RB
        self._table_RB = wider
