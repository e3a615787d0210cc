"""Graphs: there is one for every step that may come, padded to little more than it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from loraplex.engine.cuda.step_sizes import MIXED_DECODES, MIXED_ROWS, all_graph_sizes, graph_sizes

BLOCKS, LAYERS = 128, 2


def step(num_decodes: int, prompts: tuple[int, ...]) -> Any:
    """A batch, as far as its sizes go."""
    batch = SimpleNamespace(
        token_ids_T=torch.zeros(num_decodes + sum(prompts)),
        decode_rows_D=torch.zeros(num_decodes),
        span_starts_S=torch.zeros(len(prompts)),
        decode_blocks_DB=torch.zeros(num_decodes, 4),
        span_blocks_SB=torch.zeros(len(prompts), 4),
    )
    return SimpleNamespace(batch=batch, rows_of={})


def test_every_step_finds_its_graph_among_those_that_are_captured() -> None:
    captured = all_graph_sizes(BLOCKS, LAYERS)
    for num_decodes in range(MIXED_DECODES[-1] + 1):
        for prompts in ((2,), (17,), (100, 30), (768,)):
            sizes = graph_sizes(step(num_decodes, prompts), BLOCKS, LAYERS, 0)
            assert sizes in captured
            assert num_decodes + sum(prompts) <= sizes.rows
            assert num_decodes <= sizes.decodes <= max(2 * num_decodes, MIXED_DECODES[0])
        if num_decodes:
            assert graph_sizes(step(num_decodes, ()), BLOCKS, LAYERS, 0) in captured


def test_no_graph_is_captured_that_no_step_fits() -> None:
    least = dict(zip(MIXED_DECODES, (0, *MIXED_DECODES), strict=False))
    mixed = [sizes for sizes in all_graph_sizes(BLOCKS, LAYERS) if sizes.spans > 0]
    assert all(sizes.rows > least[sizes.decodes] for sizes in mixed), "more decodes than rows"
    assert len(mixed) == len(set(mixed)) < 2 * len(MIXED_ROWS) * len(MIXED_DECODES)
