"""What CPU LoRA workers are asked to compute, and how it is written down in shared memory.

A record is int64s of a fixed number: ticket, sizes and strides, one boundary more than there are slots, then
the parts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_PARTS: Final = 8
_HEAD_WORDS: Final = 8
_PART_WORDS: Final = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistPart:
    """One module: y[:, out_start : out_start + out_features] = scale * (x A^T) B_t.

    A is (rank, in) and B_t (rank, out), each without gaps, at those bytes of a block of weights.
    """

    weights: int
    a_offset_bytes: int
    b_offset_bytes: int
    rank: int
    scale: float
    out_start: int
    out_features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistTask:
    """Rows of x and y in their blocks, in elements. Columns of y that belong to no part stay as they are."""

    num_rows: int
    in_features: int
    x_start: int
    x_stride: int
    y_start: int
    y_stride: int
    parts: tuple[AssistPart, ...]


def record_words(num_slots: int) -> int:
    return _HEAD_WORDS + num_slots + 1 + MAX_PARTS * _PART_WORDS


def encode(ticket: int, task: AssistTask, bounds: Sequence[int]) -> list[int]:
    """`bounds[s]` and the one after it: the rows of slot s."""
    assert len(task.parts) <= MAX_PARTS
    words = [
        ticket,
        task.num_rows,
        task.in_features,
        task.x_start,
        task.x_stride,
        task.y_start,
        task.y_stride,
    ]
    words += [len(task.parts), *bounds]
    for part in task.parts:
        scale_bits = struct.unpack("q", struct.pack("d", part.scale))[0]
        words += [part.weights, part.a_offset_bytes, part.b_offset_bytes, part.rank, scale_bits]
        words += [part.out_start, part.out_features]
    return words


def decode(words: Sequence[int], num_slots: int) -> tuple[int, AssistTask, list[int]]:
    """Ticket, task and bounds."""
    ticket, num_rows, in_features, x_start, x_stride, y_start, y_stride, num_parts = words[:_HEAD_WORDS]
    parts_start = _HEAD_WORDS + num_slots + 1
    parts = []
    for start in range(parts_start, parts_start + num_parts * _PART_WORDS, _PART_WORDS):
        weights, a_offset, b_offset, rank, scale_bits, out_start, out_features = words[start : start + 7]
        parts.append(
            AssistPart(
                weights=weights,
                a_offset_bytes=a_offset,
                b_offset_bytes=b_offset,
                rank=rank,
                scale=struct.unpack("d", struct.pack("q", scale_bits))[0],
                out_start=out_start,
                out_features=out_features,
            )
        )
    task = AssistTask(
        num_rows=num_rows,
        in_features=in_features,
        x_start=x_start,
        x_stride=x_stride,
        y_start=y_start,
        y_stride=y_stride,
        parts=tuple(parts),
    )
    return ticket, task, list(words[_HEAD_WORDS:parts_start])
