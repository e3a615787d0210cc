"""Graphs: there is one for every step that may come, padded to little more than it needs."""

from __future__ import annotations

from loraplex.engine.cuda.step_sizes import MIXED_DECODES, MIXED_ROWS, all_graph_sizes


def test_there_is_a_graph_for_every_mix_and_none_that_no_step_fits() -> None:
    mixed = {(sizes.rows, sizes.decodes) for sizes in all_graph_sizes(128, 2) if sizes.spans > 0}
    for num_decodes in range(MIXED_DECODES[-1] + 1):
        for prompt_tokens in (2, 17, 100, 1000):
            # One row is padding.
            rows = next((rows for rows in MIXED_ROWS if rows > num_decodes + prompt_tokens), None)
            decodes = next(decodes for decodes in MIXED_DECODES if decodes >= num_decodes)
            assert rows is None or (rows, decodes) in mixed
            assert decodes <= max(2 * num_decodes, MIXED_DECODES[0])
    fewest = dict(zip(MIXED_DECODES, (0, *MIXED_DECODES), strict=False))
    assert all(rows > fewest[decodes] for rows, decodes in mixed), "more decodes than rows"
