"""The captured graphs: which one a step replays, and which are captured next.

A graph is captured for sizes rounded up (`step_sizes`), for the groups of linears that adapters touch, for
whether decoding rows share adapters, and for the groups whose merged weights it reads. One with larger sizes
or more touched groups can be replayed in its place: the difference is padding, whose programs return at once.
So a few graphs cover all steps with the known adapters, and the engine is ready when it has them; the exact
ones are captured while it is idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from loraplex.core.modules import GROUPS
from loraplex.engine.cuda.step_buffers import StepSizes
from loraplex.engine.cuda.step_sizes import (
    NARROW_TABLE,
    all_graph_sizes,
    assisted_graph_sizes,
    coarse_graph_sizes,
    fewest_graph_sizes,
)

_ALL_GROUPS = frozenset(GROUPS)

G = TypeVar("G")


class GraphKey(NamedTuple):
    """The properties that a graph is captured for: sizes, the groups of linears that adapters touch, whether
    decoding rows share adapters, and the groups that read merged weights instead of the base model's."""

    sizes: StepSizes
    groups: frozenset[str]
    shares: bool
    merged: frozenset[str] = frozenset()

    def covers(self, other: GraphKey) -> bool:
        """Return whether a step that asks for the other graph may replay this one. Rows that share an adapter
        may also be computed one by one."""
        return (
            self.merged == other.merged
            and self.groups >= other.groups
            and (other.shares or not self.shares)
            and self.sizes.covers(other.sizes)
        )

    @property
    def cost(self) -> tuple[int, ...]:
        """A sort key for graphs that cover the same step, by the cost of padding: rows cost arithmetic,
        groups cost launches, the rest costs programs that return at once."""
        sizes = self.sizes
        return (
            sizes.rows,
            sizes.assists,
            len(self.groups),
            not self.shares,
            sizes.decodes,
            sizes.spans,
            sizes.table_width,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Generic[G]):
    """A graph to replay, and the key that it was captured for."""

    key: GraphKey
    graph: G


class GraphQueue(Generic[G]):
    """The graphs of one device."""

    def __init__(
        self, max_blocks: int, num_layers: int, *, assisted: bool = False, captures_merged: bool = False
    ) -> None:
        """`assisted`: there are CPU workers, so graphs of steps with them are captured too.
        `captures_merged`: so are graphs of steps on merged weights; otherwise these steps have none."""
        self._max_blocks = max_blocks
        self._num_layers = num_layers
        self._assisted = assisted
        self._captures_merged = captures_merged
        self._merged_families: set[frozenset[str]] = set()  # groups that single adapters are merged into
        self._graphs: dict[GraphKey, G] = {}
        self._choices: dict[GraphKey, Choice[G] | None] = {}
        self._families: set[frozenset[str]] = set()  # groups that single adapters touch
        self._wanted: dict[GraphKey, None] = {}  # missing ones that steps asked for, in order
        self._is_full = False
        self.has_assisted = False  # whether a captured graph has the kernels of CPU workers

    def __len__(self) -> int:
        return len(self._graphs)

    def expect(self, groups: frozenset[str]) -> None:
        """Announce adapters that touch these groups of linears."""
        self._families.add(groups)

    def expect_merged(self, groups: frozenset[str]) -> None:
        """Announce steps on merged weights of adapters that touch these groups."""
        if self._captures_merged:
            self._merged_families.add(groups)

    def choose(self, key: GraphKey) -> Choice[G] | None:
        """Return the graph for a step, or the one that covers it at the least cost; None if there is none. A
        missing graph is captured when the engine is idle."""
        if key.merged and not self._captures_merged:
            return None
        if key not in self._choices:
            covering = min((k for k in self._graphs if k.covers(key)), key=lambda k: k.cost, default=None)
            self._choices[key] = (
                None if covering is None else Choice(key=covering, graph=self._graphs[covering])
            )
            if covering != key:
                self._wanted[key] = None
        return self._choices[key]

    def put(self, key: GraphKey, graph: G) -> None:
        self._graphs[key] = graph
        self._wanted.pop(key, None)
        self._choices.clear()
        self.has_assisted |= key.sizes.assists > 0

    def stop(self) -> None:
        """Capture no more: the device has no memory for it."""
        self._is_full = True

    @property
    def num_required(self) -> int:
        """Number of graphs still to be captured before the engine is ready."""
        return 0 if self._is_full else sum(key not in self._graphs for key in self._required())

    def next(self) -> GraphKey | None:
        """Return the most useful graph that is missing; None if there is none."""
        if self._is_full:
            return None
        return next((key for key in self._in_order() if key not in self._graphs), None)

    def _in_order(self) -> Iterator[GraphKey]:
        yield from self._required()
        yield from self._wanted
        sizes = all_graph_sizes(self._max_blocks, self._num_layers)
        coarse = coarse_graph_sizes(self._max_blocks, self._num_layers)
        union = self._union
        # Most steps only decode, with adapters or without.
        for groups in (union, frozenset[str]()):
            yield from (GraphKey(size, groups, False) for size in sizes if size.spans == 0)
        yield from (GraphKey(size, _ALL_GROUPS, False) for size in coarse)  # adapters not known yet
        for size in coarse_graph_sizes(self._max_blocks, self._num_layers, wide=True):
            yield GraphKey(size, union, False)
        for groups in dict.fromkeys((union, frozenset[str](), *sorted(self._families, key=sorted))):
            for size in sizes:
                yield GraphKey(size, groups, False)
                if groups and size.spans == 0:
                    yield GraphKey(size, groups, True)
        for merged in self._merged_sets:
            yield from (GraphKey(size, frozenset(), False, merged) for size in sizes)

    def _required(self) -> dict[GraphKey, None]:
        """Return the graphs without which the engine is not ready, in the order of capture."""
        coarse = coarse_graph_sizes(self._max_blocks, self._num_layers)
        # Under constant load the engine is never idle: adapters with other groups that are registered later,
        # and contexts too long for a narrow table, have a graph from the start.
        fewest = fewest_graph_sizes(self._max_blocks, self._num_layers)
        if self._max_blocks > NARROW_TABLE:
            fewest += fewest_graph_sizes(self._max_blocks, self._num_layers, wide=True)
        assisted = assisted_graph_sizes(self._max_blocks, self._num_layers) if self._assisted else []
        return dict.fromkeys(
            (
                *(GraphKey(size, self._union, False) for size in coarse),
                *(GraphKey(size, self._union, False) for size in assisted if self._union),
                *(GraphKey(size, _ALL_GROUPS, False) for size in fewest),
                *(
                    GraphKey(size, frozenset(), False, merged)
                    for merged in self._merged_sets
                    for size in coarse
                ),
            )
        )

    @property
    def _merged_sets(self) -> list[frozenset[str]]:
        return sorted(self._merged_families, key=sorted)

    @property
    def _union(self) -> frozenset[str]:
        """Groups that any known adapter touches."""
        return frozenset().union(*self._families)
