"""The tasks of CPU LoRA workers, and their records in shared memory.

A record is a fixed number of int64 words:

    ticket, num_rows, in_features, x_start, x_stride, y_start, y_stride, num_parts
    shares: start, end, first_part, end_part for each slot (`perf.assist_split.Share`)
    parts: weights, a_offset_bytes, b_offset_bytes, rank, the bits of the scale in float32, out_start,
           out_features

The ticket and the shares are filled in when the record is submitted. A part of rank 0 is skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.perf.assist_split import Share

MAX_PARTS: Final = 8
TICKET, NUM_ROWS, IN_FEATURES, X_START, X_STRIDE, Y_START, Y_STRIDE, NUM_PARTS = range(8)
SHARES: Final = 8
SHARE_WORDS: Final = len(Share._fields)
PART_WORDS: Final = 7
RANK: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistPart:
    """One module: y[:, out_start : out_start + out_features] = scale * (x A^T) B_t.

    A is (rank, in) and B_t (rank, out), each contiguous, at their byte offsets in a block of weights.
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
    """Rows of x and y; starts and strides in elements of their blocks. Columns of y that belong to no part
    are not written."""

    num_rows: int
    in_features: int
    x_start: int
    x_stride: int
    y_start: int
    y_stride: int
    parts: tuple[AssistPart, ...]


def record_words(num_slots: int) -> int:
    return parts_start(num_slots) + MAX_PARTS * PART_WORDS


def parts_start(num_slots: int) -> int:
    """Return the word at which a record's parts begin."""
    return SHARES + num_slots * SHARE_WORDS


def encode(task: AssistTask, num_slots: int) -> IntArray:
    """Return a task's record, without its ticket and its shares."""
    assert len(task.parts) <= MAX_PARTS
    words = [
        0,
        task.num_rows,
        task.in_features,
        task.x_start,
        task.x_stride,
        task.y_start,
        task.y_stride,
    ]
    words += [len(task.parts), *[0] * (num_slots * SHARE_WORDS)]
    for part in task.parts:
        scale_bits = struct.unpack("i", struct.pack("f", part.scale))[0]
        words += [part.weights, part.a_offset_bytes, part.b_offset_bytes, part.rank, scale_bits]
        words += [part.out_start, part.out_features]
    return np.array(words + [0] * (record_words(num_slots) - len(words)), dtype=np.int64)


def decode(words: Sequence[int], num_slots: int, slot: int) -> tuple[int, AssistTask, Share]:
    """Return a record's ticket, the task with one slot's parts alone, and the slot's share."""
    ticket, num_rows, in_features, x_start, x_stride, y_start, y_stride, _ = words[:SHARES]
    share = Share(*words[SHARES + slot * SHARE_WORDS :][:SHARE_WORDS])
    first = parts_start(num_slots)
    parts = []
    for part in range(share.first_part, share.end_part):
        start = first + part * PART_WORDS
        weights, a_offset, b_offset, rank, scale_bits, out_start, out_features = words[start : start + 7]
        if rank == 0:
            continue
        parts.append(
            AssistPart(
                weights=weights,
                a_offset_bytes=a_offset,
                b_offset_bytes=b_offset,
                rank=rank,
                scale=struct.unpack("f", struct.pack("i", scale_bits))[0],
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
    return ticket, task, share
