from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.core.modules import GROUPS
from loraplex.engine.cuda.graph_queue import GraphKey, GraphQueue
from loraplex.engine.cuda.step_runner import _traits
from loraplex.engine.cuda.step_sizes import (
    DECODE_ROWS,
    NARROW_TABLE,
    all_graph_sizes,
    coarse_graph_sizes,
    decode_sizes,
    fewest_graph_sizes,
)

NUM_LAYERS = 2
QKV, MLP = frozenset({"qkv"}), frozenset({"gate_up", "down"})
ALL = frozenset(GROUPS)


def key(rows: int, groups: frozenset[str] = frozenset(), *, shares: bool = False) -> GraphKey:
    return GraphKey(decode_sizes(rows, NARROW_TABLE), groups, shares)


def queue(*families: frozenset[str], max_blocks: int = NARROW_TABLE) -> GraphQueue[str]:
    made: GraphQueue[str] = GraphQueue(max_blocks, NUM_LAYERS)
    for groups in families:
        made.expect(groups)
    return made


def capture(graphs: GraphQueue[str], *, required_only: bool) -> list[GraphKey]:
    captured = []
    while (found := graphs.next()) is not None and (graphs.num_required > 0 or not required_only):
        graphs.put(found, f"graph {len(captured)}")
        captured.append(found)
    return captured


@pytest.mark.parametrize("wide", [False, True])
def test_the_fewest_sizes_cover_the_coarse_ones_and_are_some_of_them(*, wide: bool) -> None:
    max_blocks = 4 * NARROW_TABLE
    fewest = fewest_graph_sizes(max_blocks, NUM_LAYERS, wide=wide)
    coarse = coarse_graph_sizes(max_blocks, NUM_LAYERS, wide=wide)
    assert set(fewest) < set(coarse)
    for wanted in coarse:
        covering = [sizes for sizes in fewest if sizes.covers(wanted)]
        assert covering
        assert min(sizes.rows for sizes in covering) <= max(2 * wanted.rows, 64)


@pytest.mark.parametrize("max_blocks", [4, NARROW_TABLE, 4 * NARROW_TABLE])
def test_coarse_sizes_cover_all_sizes_and_are_some_of_them(max_blocks: int) -> None:
    coarse, every = coarse_graph_sizes(max_blocks, NUM_LAYERS), all_graph_sizes(max_blocks, NUM_LAYERS)
    assert set(coarse) < set(every)
    assert len(coarse) == len(set(coarse)) < 0.6 * len(every)
    for wanted in every:
        assert any(sizes.covers(wanted) for sizes in coarse)


def test_a_graph_covers_fewer_rows_groups_and_sharing_but_no_other_kind_of_step() -> None:
    assert key(8, QKV).covers(key(8, QKV))
    assert key(8, QKV).covers(key(4))
    assert key(8, QKV).covers(key(8, QKV, shares=True))
    assert not key(8, QKV, shares=True).covers(key(8, QKV))
    assert not key(4, QKV).covers(key(8, QKV))
    assert not key(8, QKV).covers(key(8, QKV | MLP))
    mixed = GraphKey(all_graph_sizes(NARROW_TABLE, NUM_LAYERS)[0], ALL, False)
    assert not mixed.covers(key(1))
    assert not key(DECODE_ROWS[-1], ALL).covers(mixed)


def test_what_is_required_covers_all_that_is_known() -> None:
    graphs = queue(QKV, MLP)
    captured = capture(graphs, required_only=True)
    assert graphs.num_required == 0
    assert {found.groups for found in captured} == {QKV | MLP, ALL}
    for groups in (frozenset[str](), QKV, MLP, QKV | MLP):
        for sizes in all_graph_sizes(NARROW_TABLE, NUM_LAYERS):
            choice = graphs.choose(GraphKey(sizes, groups, False))
            assert choice is not None
            assert choice.key.groups == QKV | MLP


def test_what_is_required_covers_adapters_that_come_later_and_long_contexts() -> None:
    graphs = queue(QKV, max_blocks=4 * NARROW_TABLE)
    capture(graphs, required_only=True)
    for sizes in all_graph_sizes(4 * NARROW_TABLE, NUM_LAYERS):
        assert graphs.choose(GraphKey(sizes, ALL, False)) is not None
        assert graphs.choose(GraphKey(replace(sizes, table_width=4 * NARROW_TABLE), ALL, False)) is not None


def test_an_adapter_with_other_groups_makes_more_required() -> None:
    graphs = queue(QKV)
    capture(graphs, required_only=True)
    graphs.expect(ALL)
    coarse, fewest = (f(NARROW_TABLE, NUM_LAYERS) for f in (coarse_graph_sizes, fewest_graph_sizes))
    assert graphs.num_required == len(coarse) - len(fewest)
    assert {found.groups for found in capture(graphs, required_only=True)} == {ALL}


def test_a_step_gets_the_graph_that_costs_it_least() -> None:
    graphs = queue()
    for found in (key(32, ALL), key(16, ALL), key(16, QKV), key(8, QKV), key(16, QKV, shares=True)):
        graphs.put(found, str(found))

    def chosen(wanted: GraphKey) -> GraphKey:
        choice = graphs.choose(wanted)
        assert choice is not None
        assert choice.graph == str(choice.key)
        return choice.key

    assert chosen(key(4)) == key(8, QKV)
    assert chosen(key(9, QKV)) == key(16, QKV)
    assert chosen(key(9, QKV, shares=True)) == key(16, QKV, shares=True)
    assert chosen(key(9, MLP)) == key(16, ALL)
    assert chosen(key(17)) == key(32, ALL)
    graphs.put(key(4), str(key(4)))
    assert chosen(key(4)) == key(4), "a better one came since"


def test_what_a_step_missed_is_captured_next_and_once() -> None:
    graphs = queue(QKV)
    capture(graphs, required_only=True)
    missed = [key(24, QKV), key(1), GraphKey(decode_sizes(8, 4 * NARROW_TABLE), QKV, False)]
    for wanted in (*missed, *missed):
        graphs.choose(wanted)
    for wanted in missed:
        assert graphs.next() == wanted
        graphs.put(wanted, "")
    assert graphs.next() not in missed


def test_in_the_end_everything_known_has_a_graph_of_its_own_and_anything_else_one_that_covers_it() -> None:
    graphs = queue(QKV, MLP, max_blocks=4 * NARROW_TABLE)
    captured = capture(graphs, required_only=False)
    assert len(captured) == len(set(captured)) == len(graphs)
    for sizes in all_graph_sizes(4 * NARROW_TABLE, NUM_LAYERS):
        for groups in (frozenset[str](), QKV, MLP, QKV | MLP):
            wanted = GraphKey(sizes, groups, False)
            choice = graphs.choose(wanted)
            assert choice is not None
            assert choice.key == wanted
        assert graphs.choose(GraphKey(sizes, ALL, False)) is not None
    assert graphs.choose(GraphKey(decode_sizes(3, 4 * NARROW_TABLE), QKV, False)) is not None, "wide tables"
    assert graphs.choose(key(8, QKV, shares=True)).key.shares  # type: ignore[union-attr]


def test_without_memory_nothing_more_is_asked_for() -> None:
    graphs = queue(QKV)
    graphs.put(key(256, ALL), "")
    graphs.stop()
    assert (graphs.num_required, graphs.next()) == (0, None)
    assert graphs.choose(key(1, QKV)) is not None


def merged_key(rows: int, merged: frozenset[str]) -> GraphKey:
    return GraphKey(decode_sizes(rows, NARROW_TABLE), frozenset(), False, merged)


def test_a_graph_over_merged_weights_covers_only_steps_on_the_same_groups() -> None:
    assert merged_key(8, QKV).covers(merged_key(4, QKV))
    assert not merged_key(8, QKV).covers(merged_key(8, MLP))
    assert not merged_key(8, QKV | MLP).covers(merged_key(8, QKV))
    assert not merged_key(8, QKV).covers(key(8))
    assert not key(8, ALL).covers(merged_key(8, QKV))


def test_steps_on_merged_weights_have_graphs_only_where_that_is_asked_for() -> None:
    plain, merging = queue(QKV), GraphQueue[str](NARROW_TABLE, NUM_LAYERS, captures_merged=True)
    merging.expect(QKV)
    for graphs in (plain, merging):
        graphs.expect_merged(QKV)
    before = capture(queue(QKV), required_only=True)
    assert plain.choose(merged_key(3, QKV)) is None
    assert capture(plain, required_only=True) == before, "start-up captures other graphs than without"
    assert not any(graph.merged for graph in capture(plain, required_only=False))
    required = capture(merging, required_only=True)
    assert required[: len(before)] == before
    assert {graph.merged for graph in required[len(before) :]} == {QKV}
    for sizes in all_graph_sizes(NARROW_TABLE, NUM_LAYERS):
        assert merging.choose(GraphKey(sizes, frozenset(), False, QKV)) is not None
    assert merging.choose(merged_key(3, MLP)) is None


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_a_capture_that_shares_adapters_launches_other_kernels(rows: int) -> None:
    """Kernels that were loaded for launches without sharing are not all of those with it."""
    apart, shared = (set(_traits(key(rows, QKV, shares=shares))) for shares in (False, True))
    assert shared - apart
    assert apart - shared
