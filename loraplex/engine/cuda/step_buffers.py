"""All integers of a step in one block of memory: laid out on the host, fetched by the device.

A graph is captured over the views of one block, and replayed after the next step's block was copied into
it; a step that runs without a graph gets a block of its own size. Rows beyond those of the step are padding:
they read and write the scratch block and the scratch seat, have no context and no adapter, and their results
are ignored. Padding decodes and spans have no context, and padding logit rows, which refer to the first row,
have the scratch seat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.modules import GROUPS
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.triton.fetch import fetch
from loraplex.kernels.triton.gate import Gate

SCRATCH_SEAT = 0
"""Seat that the tokens of padding rows are written to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Capacity of a block: rows, decoding rows, spans of other rows, the width of both block tables, logit
    rows, the LoRA tiles of the decoding rows and of the spans, gates where the step may wait for weights
    (none if it has no spans), and spans that CPU workers assist with (`kernels.triton.assist`)."""

    rows: int
    decodes: int
    spans: int
    table_width: int
    logits: int
    decode_tiles: int
    span_tiles: int
    gates: int
    assists: int = 0

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each field, in their order in memory."""
        has_assists = min(self.assists, 1)
        return {
            "token_ids": (self.rows,),
            "follows": (self.rows,),
            "token_seats": (self.rows,),
            "positions": (self.rows,),
            "slots": (self.rows,),
            "decode_rows": (self.decodes,),
            "decode_context": (self.decodes,),
            "decode_blocks": (self.decodes, self.table_width),
            "span_starts": (self.spans,),
            "span_lens": (self.spans,),
            "span_context": (self.spans,),
            "span_blocks": (self.spans, self.table_width),
            "logit_rows": (self.logits,),
            "logit_seats": (self.logits,),
            "decode_tiles": (self.decode_tiles, 2),
            "decode_tables": (self.decode_tiles,),
            "span_tiles": (self.span_tiles, 2),
            "span_tables": (self.span_tiles,),
            "wanted_copies": (self.gates,),
            "assist_head": (4 * has_assists,),
            "assist_groups": (len(GROUPS) * has_assists,),
            "assist_spans": (self.assists, 3),
            "assist_copies": (self.assists, (self.gates - 1) * has_assists),
            "row_spans": (self.rows * has_assists,),
        }

    def covers(self, other: StepSizes) -> bool:
        """Return whether a step of the other sizes fits, with padding for the rest. A step without prompts
        never fits one with prompts, nor the reverse: they run different kernels. Its tiles of prompts fit if
        its rows, decodes and spans do: they are cut as in the larger step."""
        if (self.spans == 0) != (other.spans == 0):
            return False
        compared = (name for name in self.__slots__ if name != "span_tiles")
        return all(getattr(self, name) >= getattr(other, name) for name in compared)

    @property
    def num_integers(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.fields().values())


class HostBlock:
    """A step's block while it is filled, in pinned memory that the device fetches."""

    def __init__(
        self,
        sizes: StepSizes,
        scratch_slot: int,
        pinned: bool,
        block_tables: Mapping[str, npt.NDArray[np.int64]] | None = None,
    ) -> None:
        """`block_tables`: by field; other fields begin as padding. They are nearly all of a block and grow
        with context, so each of their entries is written only once."""
        self.tensor = torch.empty(sizes.num_integers, dtype=torch.int64, pin_memory=pinned)
        self._views = _split(self.tensor.numpy(), sizes)
        tables = block_tables or {}
        for field, view in self._views.items():
            # By numpy: torch would wake its threads for a megabyte, which takes longer than writing it.
            if field in tables:
                _write_table(view, tables[field])
            else:
                view.fill(0)
        self._views["slots"][:] = scratch_slot
        self._views["token_seats"][:] = SCRATCH_SEAT
        self._views["logit_seats"][:] = SCRATCH_SEAT

    def __setitem__(self, field: str, values: npt.ArrayLike) -> None:
        """Write the first entries of a field; the rest stays padding."""
        array = np.asarray(values, dtype=np.int64)
        if array.size > 0:
            view = self._views[field]
            view[tuple(slice(0, length) for length in array.shape)] = array


def _write_table(view: npt.NDArray[np.int64], table: npt.NDArray[np.int64]) -> None:
    """Write a table to the corner of a larger one, and zeros around it."""
    num_rows, width = table.shape
    view[:num_rows, :width] = table
    view[:num_rows, width:] = 0
    view[num_rows:] = 0


class DeviceBlock:
    """The same block on the device, as tensors."""

    def __init__(self, sizes: StepSizes, memory: torch.Tensor) -> None:
        """`memory`: integers on the device, at least as many as the block has."""
        self.sizes = sizes
        self.tensor = memory[: sizes.num_integers]
        self._views = _split(self.tensor, sizes)

    def __getitem__(self, field: str) -> torch.Tensor:
        return self._views[field]

    def upload(self, host: HostBlock) -> None:
        """Fetch the host's block, which must be kept until that is done."""
        fetch(self.tensor, host.tensor)

    def gate(self, ticket_1: torch.Tensor) -> Gate | None:
        """Return the gate at which the step waits for copies; None for a step without prompts. `ticket_1`:
        the number of the last complete copy."""
        return Gate(ticket_1=ticket_1, wanted_G=self["wanted_copies"]) if self.sizes.gates > 0 else None

    def batch(
        self,
        token_ids_T: torch.Tensor,
        max_span_len: int,
        lora: tuple[Any, ...],
        gate: Gate | None,
    ) -> KernelBatch:
        """Return the kernels' view of the block. `token_ids_T`: the tokens, picked by the caller."""
        return KernelBatch(
            token_ids_T=token_ids_T,
            positions_T=self["positions"],
            slots_T=self["slots"],
            decode_rows_D=self["decode_rows"],
            decode_context_D=self["decode_context"],
            decode_blocks_DB=self["decode_blocks"],
            span_starts_S=self["span_starts"],
            span_lens_S=self["span_lens"],
            span_context_S=self["span_context"],
            span_blocks_SB=self["span_blocks"],
            max_span_len=max_span_len,
            lora=lora,
            gate=gate,
            logit_rows_L=self["logit_rows"],
        )


_Flat = TypeVar("_Flat", torch.Tensor, npt.NDArray[np.int64])


def _split(flat: _Flat, sizes: StepSizes) -> dict[str, _Flat]:
    views, start = {}, 0
    for name, shape in sizes.fields().items():
        size = int(np.prod(shape))
        views[name] = flat[start : start + size].reshape(shape)
        start += size
    return views
