"""Adapters on their way into the arena, and where they are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import torch

from loraplex.adapters.slab import touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.modules import MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.adapter_block import block_bytes, layer_ends, table_bytes
from loraplex.engine.cuda.bus import Bus, Copy
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.host_blocks import HostBlocks
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.kernels.lora import TABLE_COLUMNS, LoraWeights

_FIRST_COPY_BYTES: Final = 1 << 20
_LARGEST_COPY_BYTES: Final = 16 << 20
"""The table comes alone, and the first layers do, as the step waits for them; the further a layer is from its
turn, the more of them share a copy, which has a cost of its own."""


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
    after: Moment | None
    assisted_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """An adapter that is being copied to the device. Steps that wait for it may use its weights.

    `tickets`: the copy that brings the last of its table, and of each layer; `done`: when all are there.
    """

    shipment: Shipment
    weights: LoraWeights
    tickets: tuple[int, ...]
    done: Moment


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
        self._passing_stream = SideStream(device)

    @property
    def ticket_1(self) -> torch.Tensor:
        """On the device: the number of the last copy that is complete."""
        return self._bus.ticket_1

    def num_bytes(self, spec: AdapterSpec) -> int:
        if self._padding is not None:
            return self._padding.num_bytes(spec)
        return block_bytes(spec, self._shape, self._dtype)

    def read(self, spec: AdapterSpec, place: int) -> None:
        """From its folder to a place in the host's memory; on a reader's thread."""
        self._host_blocks.read(spec, place)

    def start(self, shipments: Sequence[Shipment]) -> list[Arrival]:
        """Begin to copy, the first parts of all of them before the next ones of any."""
        cuts = [_cut(self._part_ends(shipment.spec)) for shipment in shipments]
        tickets: list[list[int]] = [[] for _ in shipments]
        for number in range(max((len(cut) for cut in cuts), default=0)):
            for shipment, cut, own in zip(shipments, cuts, tickets, strict=True):
                if number < len(cut):
                    last = self._bus.carry(self._copies(shipment, cut[number]), shipment.after)
                    own += [last] * cut[number].num_parts
        done = self._bus.moment()
        return [
            Arrival(
                shipment=shipment,
                weights=self._weights(shipment.spec, shipment.place),
                tickets=tuple(own),
                done=done,
            )
            for shipment, own in zip(shipments, tickets, strict=True)
        ]

    def load(self, spec: AdapterSpec, place: int, after: Moment | None) -> LoraWeights:
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

    def _part_ends(self, spec: AdapterSpec) -> Sequence[int]:
        """Of a block: up to which byte the table needs it, and each layer."""
        if self._padding is not None:  # every copy of it has all layers
            return [self._padding.num_bytes(spec)] * (1 + self._shape.num_layers)
        return [table_bytes(self._shape), *layer_ends(spec, self._shape, self._dtype)]

    def _copies(self, shipment: Shipment, cut: _Cut) -> list[Copy]:
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
            touched=touched_groups(spec),
            copies={} if self._padding is None else self._padding.offsets(spec),
        )

    def _table_at(self, place: int) -> torch.Tensor:
        table = self._arena.span(place, table_bytes(self._shape)).view(torch.int64)
        return table.view(self._shape.num_layers, len(MODULES), TABLE_COLUMNS)


class _Cut(NamedTuple):
    """Bytes [begin, end) of a block, which are copied at once, and how many of its parts end there."""

    begin: int
    end: int
    num_parts: int


def _cut(ends: Sequence[int]) -> list[_Cut]:
    """`ends`: of the parts, in their order."""
    cuts: list[_Cut] = []
    begin, wanted_bytes, num_parts = 0, 0, 0
    for part, end in enumerate(ends):
        num_parts += 1
        if end - begin < wanted_bytes and part + 1 < len(ends):
            continue
        cuts.append(_Cut(begin, end, num_parts))
        wanted_bytes = min(max(2 * wanted_bytes, _FIRST_COPY_BYTES), _LARGEST_COPY_BYTES)
        begin, num_parts = end, 0
    return cuts
