"""The sizes of steps, and of the graphs that they replay.

Few sizes mean few graphs; fine ones mean little padding. Rows cost arithmetic, so they are rounded finely;
padding decodes, spans and tiles cost programs that return at once, so they are rounded coarsely. Even those
take time: in a graph of a step's own sizes, decodes are padded to at most twice as many, or to 32 beside
prompts.

A few of the sizes cover all others (`coarse_graph_sizes`): an engine is ready when it has those, and captures
the others while it is idle. Still fewer cover them with more padding (`fewest_graph_sizes`); those are for
steps that were not announced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from loraplex.engine.batch import BuiltBatch
from loraplex.engine.cuda.step_buffers import StepSizes
from loraplex.engine.cuda.step_lora import SHARED_BESIDE_PROMPTS, StepLora
from loraplex.kernels.triton.lora_blocks import BlocksLaunch
from loraplex.perf.assist_split import MAX_SPANS
from loraplex.perf.graph_limits import MAX_GRAPH_ROWS

DECODE_ROWS: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
"""Rows of graphs in which every row decodes."""
COARSE_DECODE_ROWS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""The `DECODE_ROWS` that are captured before an engine is ready."""
FEWEST_DECODE_ROWS: Final = (8, 16, 32, 64, 128, 256)
"""The `DECODE_ROWS` of graphs for adapters and contexts that are not known yet."""
MIXED_ROWS: Final = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, MAX_GRAPH_ROWS)
"""Rows of graphs with prompts. Larger steps compute for longer than it takes to launch them kernel by kernel,
which needs no padding."""
FEWEST_MIXED_ROWS: Final = (64, 128, 256, 512, MAX_GRAPH_ROWS)
"""The `MIXED_ROWS` of graphs for adapters and contexts that are not known yet."""
COARSE_ABOVE: Final = 640
"""Rows above which an engine starts with one graph each, for the most decodes and spans."""
MIXED_DECODES: Final = (32, 64, 128, 256)
MIXED_SPANS: Final = (4, 32)
NARROW_TABLE: Final = 512
"""Width of narrow block tables, in blocks of a sequence: wide ones are megabytes to fill and copy, and few
sequences need them."""


def graph_sizes(built: BuiltBatch, max_blocks: int, num_layers: int, num_assisted: int) -> StepSizes | None:
    """Return the sizes of the graph for a step; None if none is made for such a step. `num_assisted`: spans
    that CPU workers assist with."""
    batch = built.batch
    num_rows, num_spans = batch.token_ids_T.shape[0], batch.span_starts_S.shape[0]
    if built.rows_of:
        return None
    widest = max(batch.decode_blocks_DB.shape[1], batch.span_blocks_SB.shape[1])
    table_width = max_blocks if widest > NARROW_TABLE else min(NARROW_TABLE, max_blocks)
    if num_spans == 0:
        rows = _round_up(num_rows, DECODE_ROWS)
        return None if rows is None else decode_sizes(rows, table_width)
    rows = _round_up(num_rows, MIXED_ROWS)
    decodes = _round_up(batch.decode_rows_D.shape[0], MIXED_DECODES)
    spans = _round_up(num_spans, MIXED_SPANS)
    if rows is None or decodes is None or spans is None:
        return None
    assists = MAX_SPANS if num_assisted > 0 else 0
    return mixed_sizes(rows, decodes, spans, table_width, num_layers, assists)


def coarse_graph_sizes(max_blocks: int, num_layers: int, *, wide: bool = False) -> list[StepSizes]:
    """Return some of `all_graph_sizes`, or the same with wide tables, such that one of them covers whatever
    graph a step asks for; the largest first."""
    table_width = max_blocks if wide else min(NARROW_TABLE, max_blocks)
    mixed = [
        mixed_sizes(rows, decodes, spans, table_width, num_layers)
        for rows in MIXED_ROWS
        for decodes, spans in _coarse_within(rows)
    ]
    return [*reversed(mixed), *(decode_sizes(rows, table_width) for rows in reversed(COARSE_DECODE_ROWS))]


def fewest_graph_sizes(max_blocks: int, num_layers: int, *, wide: bool = False) -> list[StepSizes]:
    """Return as few of `coarse_graph_sizes` as cover them all without padding a step to more than twice its
    rows, except for the smallest."""
    table_width = max_blocks if wide else min(NARROW_TABLE, max_blocks)
    mixed = [
        mixed_sizes(rows, _decodes_within(rows)[-1], MIXED_SPANS[-1], table_width, num_layers)
        for rows in FEWEST_MIXED_ROWS
    ]
    return [*reversed(mixed), *(decode_sizes(rows, table_width) for rows in reversed(FEWEST_DECODE_ROWS))]


def assisted_graph_sizes(max_blocks: int, num_layers: int) -> list[StepSizes]:
    """Return sizes that cover steps with narrow tables in which CPU workers assist; the largest first."""
    table_width = min(NARROW_TABLE, max_blocks)
    return [
        mixed_sizes(rows, _decodes_within(rows)[-1], MIXED_SPANS[-1], table_width, num_layers, MAX_SPANS)
        for rows in reversed(MIXED_ROWS)
    ]


def all_graph_sizes(max_blocks: int, num_layers: int) -> list[StepSizes]:
    """Return the sizes of every graph with narrow tables; the largest first, so that the others fit into its
    memory."""
    table_width = min(NARROW_TABLE, max_blocks)
    mixed = [
        mixed_sizes(rows, decodes, spans, table_width, num_layers)
        for rows in MIXED_ROWS
        for decodes in _decodes_within(rows)
        for spans in MIXED_SPANS
    ]
    return [*reversed(mixed), *(decode_sizes(rows, table_width) for rows in reversed(DECODE_ROWS))]


def _coarse_within(rows: int) -> list[tuple[int, int]]:
    """Return (decodes, spans) of the graphs with this many rows that an engine starts with."""
    decodes = _decodes_within(rows)
    most = decodes[-1], MIXED_SPANS[-1]
    # Beside many rows padding costs little; steps with few rows have few prompts as a rule.
    return [most] if rows > COARSE_ABOVE else [*((count, MIXED_SPANS[0]) for count in decodes), most]


def _decodes_within(rows: int) -> list[int]:
    """Return the sizes for the decodes of a step with this many rows."""
    return [
        decodes for fewer, decodes in zip((0, *MIXED_DECODES), MIXED_DECODES, strict=False) if fewer < rows
    ]


def decode_sizes(rows: int, table_width: int) -> StepSizes:
    """Return the sizes of a graph in which every row decodes."""
    return StepSizes(
        rows=rows,
        decodes=rows,
        spans=0,
        table_width=table_width,
        logits=rows,
        decode_tiles=rows,
        span_tiles=0,
        gates=0,
    )


def mixed_sizes(
    rows: int, decodes: int, spans: int, table_width: int, num_layers: int, assists: int = 0
) -> StepSizes:
    """Return the sizes of a graph with prompts. Each span, and each adapter whose decoding rows are computed
    in tiles, has one tile that is not full at most."""
    return StepSizes(
        rows=rows,
        decodes=decodes,
        spans=spans,
        table_width=table_width,
        logits=decodes + spans,
        decode_tiles=decodes,
        span_tiles=spans + decodes // SHARED_BESIDE_PROMPTS + rows // BlocksLaunch.for_prompts(rows).block_m,
        gates=1 + num_layers,
        assists=assists,
    )


def exact_sizes(built: BuiltBatch, lora: StepLora, num_layers: int, num_assisted: int) -> StepSizes:
    """Return the sizes of a step without padding, except for the spans that CPU workers assist with."""
    batch = built.batch
    return StepSizes(
        rows=batch.token_ids_T.shape[0],
        decodes=batch.decode_rows_D.shape[0],
        spans=batch.span_starts_S.shape[0],
        table_width=max(batch.decode_blocks_DB.shape[1], batch.span_blocks_SB.shape[1]),
        logits=batch.logit_rows_L.shape[0],
        decode_tiles=len(lora.decode_tiles[1]),
        span_tiles=len(lora.span_tiles[1]),
        gates=1 + num_layers if batch.span_starts_S.shape[0] > 0 else 0,
        assists=MAX_SPANS if num_assisted > 0 else 0,
    )


def _round_up(count: int, sizes: Sequence[int]) -> int | None:
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
