"""Adapters on their way into the arena, and where they are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final, NamedTuple, Protocol

import torch

from loraplex.adapters.slab import slab_layout, touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.modules import MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.adapter_block import part_ends, table_bytes
from loraplex.engine.cuda.bus import Bus, Copy
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.host_blocks import HostBlocks
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.kernels.lora import TABLE_COLUMNS, LoraWeights

_FIRST_COPY_BYTES: Final = 1 << 20
_LARGEST_COPY_BYTES: Final = 16 << 20
"""The table comes alone, and the first layers do, as the step waits for them; the further a layer is from its
turn, the more of them share a copy, which has a cost of its own."""

_MAX_KNOWN: Final = 10_000


class Padding(Protocol):
    """`padding.Padding`, for comparisons."""

    def num_bytes(self, spec: AdapterSpec) -> int: ...

    def offsets(self, spec: AdapterSpec) -> dict[int, int]:
        """Of the copies in an adapter's block."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipment:
    """A version to copy from a byte of the host's memory to one of the arena, not before that moment.
    `assisted_layers`: as many of its first ones are computed by CPU workers meanwhile."""

    spec: AdapterSpec
    source: int
    place: int
    after: Moment
    assisted_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Freight:
    """Adapters that are copied in turns: when the first copy began, and how many bytes there are in all."""

    begun: Moment
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """An adapter that is being copied to the device. Steps that wait for it may use its weights.

    `tickets`: the copy that brings the last of its table, and of each layer; `done`: when all are there, and
    those that were copied in turns with it.
    """

    shipment: Shipment
    weights: LoraWeights
    tickets: tuple[int, ...]
    done: Moment
    freight: Freight


class AdapterStore:
    """Brings adapters from the host's memory into the arena."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        arena: DeviceArena,
        host_blocks: HostBlocks,
        padding: Padding | None = None,
    ) -> None:
        """`padding`: how adapters are padded to their batches, if they are; `host_blocks` has them so."""
        self._padding = padding
        self._shape = shape
        self._dtype = dtype
        self._arena = arena
        self._host_blocks = host_blocks
        self._bus = Bus(device)
        self._outlines: dict[str, _Outline] = {}  # by version, as it takes a while to find them
        self._passing_stream = SideStream(device)

    @property
    def ticket_1(self) -> torch.Tensor:
        """On the device: the number of the last copy that is complete."""
        return self._bus.ticket_1

    def num_bytes(self, spec: AdapterSpec) -> int:
        if self._padding is not None:
            return self._padding.num_bytes(spec)
        return self._outline(spec).ends[-1]

    def read(self, spec: AdapterSpec, place: int) -> None:
        """From its folder to a place in the host's memory; on a reader's thread."""
        self._host_blocks.read(spec, place)

    def start(self, shipments: Sequence[Shipment]) -> list[Arrival]:
        """Begin to copy, the first parts of all of them before the next ones of any."""
        cuts = [
            cuts_of(self._outline(shipment.spec).ends, shipment.assisted_layers) for shipment in shipments
        ]
        tickets: list[dict[int, int]] = [{} for _ in shipments]
        self._bus.wait_for(shipment.after for shipment in shipments)
        freight = Freight(
            begun=self._bus.moment(), num_bytes=sum(cut.end - cut.begin for cut in chain.from_iterable(cuts))
        )
        for turn in zip_longest(*cuts):
            ticket = self._bus.carry(
                copy
                for shipment, cut in zip(shipments, turn, strict=True)
                if cut is not None
                for copy in self._copies(shipment, cut)
            )
            for own, cut in zip(tickets, turn, strict=True):
                own |= dict.fromkeys(cut.parts if cut is not None else (), ticket)
        done = self._bus.moment()
        return [
            Arrival(
                shipment=shipment,
                weights=self._weights(shipment.spec, shipment.place),
                tickets=tuple(own[part] for part in sorted(own)),
                done=done,
                freight=freight,
            )
            for shipment, own in zip(shipments, tickets, strict=True)
        ]

    def load(self, spec: AdapterSpec, place: int, after: Moment) -> LoraWeights:
        """Copy a version that is not kept in the host's memory to its place, not before that moment, and wait
        until it is there; on a reader's thread."""
        host = self._host_blocks.passing(spec)
        with self._passing_stream.entered():
            self._passing_stream.wait_for(after)
            self._arena.span(place, host.numel()).copy_(host, non_blocking=True)
        self._passing_stream.synchronize()
        return self._weights(spec, place)

    def prepare(self) -> bool:
        return self._host_blocks.prepare()

    def close(self) -> None:
        """After the last load."""
        self._bus.synchronize()
        self._host_blocks.close()

    def moved(self, weights: LoraWeights, place: int) -> LoraWeights:
        """The same adapter after its block was copied to another place."""
        return replace(weights, table_LM=self._table_at(place))

    def _outline(self, spec: AdapterSpec) -> _Outline:
        found = self._outlines.get(spec.version)
        if found is None:
            found = self._outlines[spec.version] = _Outline(self._part_ends(spec), touched_groups(spec))
            if len(self._outlines) > _MAX_KNOWN:
                del self._outlines[next(iter(self._outlines))]
        return found

    def _part_ends(self, spec: AdapterSpec) -> Sequence[int]:
        if self._padding is not None:  # every copy of it has all layers
            return [self._padding.num_bytes(spec)] * (1 + self._shape.num_layers)
        return part_ends(slab_layout(spec, self._shape), self._shape, self._dtype)

    def _copies(self, shipment: Shipment, cut: Cut) -> list[Copy]:
        copies, cursor = [], shipment.place + cut.begin
        for part in self._host_blocks.parts(shipment.spec, shipment.source, cut.begin, cut.end):
            copies.append(Copy(target=self._arena.span(cursor, part.numel()), source=part))
            cursor += part.numel()
        return copies

    def _weights(self, spec: AdapterSpec, place: int) -> LoraWeights:
        return LoraWeights(
            groups=(),
            table_LM=self._table_at(place),
            max_rank=spec.max_rank,
            touched=self._outline(spec).touched,
            copies={} if self._padding is None else self._padding.offsets(spec),
        )

    def _table_at(self, place: int) -> torch.Tensor:
        table = self._arena.span(place, table_bytes(self._shape)).view(torch.int64)
        return table.view(self._shape.num_layers, len(MODULES), TABLE_COLUMNS)


class _Outline(NamedTuple):
    """Of an adapter's block: up to which byte the table needs it, and each layer; and the groups of linears
    that it changes."""

    ends: Sequence[int]
    touched: frozenset[str]


class Cut(NamedTuple):
    """Bytes [begin, end) of a block, which are copied at once, and which of its parts end there."""

    begin: int
    end: int
    parts: range


def cuts_of(ends: Sequence[int], assisted_layers: int = 0) -> list[Cut]:
    """What is copied at once of a block whose table and layers end there, in this order: the first layers, if
    CPU workers compute them, come last."""
    computed = 1 + assisted_layers
    return [
        *_cut(ends[:1], first=0, begin=0),
        *_cut(ends[computed:], first=computed, begin=ends[computed - 1]),
        *_cut(ends[1:computed], first=1, begin=ends[0]),
    ]


def _cut(ends: Sequence[int], *, first: int, begin: int) -> list[Cut]:
    """`ends`: of parts that follow each other, the first of which has that number and begin."""
    cuts: list[Cut] = []
    wanted_bytes = _FIRST_COPY_BYTES
    for part, end in enumerate(ends, start=first):
        if end - begin < wanted_bytes and part + 1 < first + len(ends):
            continue
        done = cuts[-1].parts.stop if cuts else first
        cuts.append(Cut(begin, end, range(done, part + 1)))
        wanted_bytes = min(2 * wanted_bytes, _LARGEST_COPY_BYTES)
        begin = end
    return cuts
