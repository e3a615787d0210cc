"""Adapters on their way into the arena, and where they are in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise, zip_longest
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

_MAX_KNOWN: Final = 10_000
_MAX_PLANS: Final = 256

PlanGroups = Callable[[Sequence[int]], Sequence[int]]
"""From the bytes of each layer: how many of them to copy at a time, one after the other."""


class Padding(Protocol):
    """`padding.Padding`, for comparisons."""

    def num_bytes(self, spec: AdapterSpec) -> int: ...

    def offsets(self, spec: AdapterSpec) -> dict[int, int]:
        """Of the copies in an adapter's block."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A version to copy from a byte of the host's memory to one of the arena, not before that moment.
    `assisted_layers`: as many of its first ones are computed by CPU workers meanwhile."""

    spec: AdapterSpec
    source: int
    place: int
    after: Moment
    assisted_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferBatch:
    """Adapters that are copied in turns: when the first copy began, and how many bytes there are in all."""

    begun: Moment
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """An adapter that is being copied to the device. Steps that wait for it may use its weights.

    `tickets`: the copy that brings the last of its table, and of each layer; `done`: when all are there, and
    those that were copied in turns with it.
    """

    transfer: Transfer
    weights: LoraWeights
    tickets: tuple[int, ...]
    done: Moment
    transfer_batch: TransferBatch


class AdapterStore:
    """Brings adapters from the host's memory into the arena."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        arena: DeviceArena,
        host_blocks: HostBlocks,
        plan_groups: PlanGroups,
        padding: Padding | None = None,
        max_copy_bytes_per_s: float | None = None,
    ) -> None:
        """`padding`: how adapters are padded to their batches, if they are; `host_blocks` has them so.
        `max_copy_bytes_per_s`: a rate to slow copies down to, for comparison."""
        self._padding = padding
        self._shape = shape
        self._dtype = dtype
        self._arena = arena
        self._host_blocks = host_blocks
        self._bus = Bus(device, max_copy_bytes_per_s)
        self._cuts_of = lru_cache(_MAX_PLANS)(partial(cuts_of, plan_groups=plan_groups))  # they are alike
        self._outlining = threading.Lock()
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

    def start(self, transfers: Sequence[Transfer]) -> list[Arrival]:
        """Begin to copy, the first parts of all of them before the next ones of any."""
        cuts = [self._cuts(transfer) for transfer in transfers]
        tickets: list[dict[int, int]] = [{} for _ in transfers]
        self._bus.wait_for(transfer.after for transfer in transfers)
        transfer_batch = TransferBatch(
            begun=self._bus.moment(), num_bytes=sum(cut.end - cut.begin for cut in chain.from_iterable(cuts))
        )
        for turn in zip_longest(*cuts):
            ticket = self._bus.carry(
                copy
                for transfer, cut in zip(transfers, turn, strict=True)
                if cut is not None
                for copy in self._copies(transfer, cut)
            )
            for own, cut in zip(tickets, turn, strict=True):
                own |= dict.fromkeys(cut.parts if cut is not None else (), ticket)
        done = self._bus.moment()
        return [
            Arrival(
                transfer=transfer,
                weights=self._weights(transfer.spec, transfer.place),
                tickets=tuple(own[part] for part in sorted(own)),
                done=done,
                transfer_batch=transfer_batch,
            )
            for transfer, own in zip(transfers, tickets, strict=True)
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

    def close(self, *, frees_memory: bool) -> None:
        """After the last load. `frees_memory`: False if a read into the host's memory is still under way."""
        try:
            self._bus.synchronize()
        finally:
            self._host_blocks.close(frees_memory=frees_memory)

    def moved(self, weights: LoraWeights, place: int) -> LoraWeights:
        """The same adapter after its block was copied to another place."""
        return replace(weights, table_LM=self._table_at(place))

    def _cuts(self, transfer: Transfer) -> list[Cut]:
        return self._cuts_of(self._outline(transfer.spec).ends, transfer.assisted_layers)

    def _outline(self, spec: AdapterSpec) -> _Outline:
        """On any thread."""
        with self._outlining:
            found = self._outlines.get(spec.version)
            if found is None:
                found = self._outlines[spec.version] = _Outline(
                    tuple(self._part_ends(spec)), spec.max_rank, touched_groups(spec)
                )
                if len(self._outlines) > _MAX_KNOWN:
                    del self._outlines[next(iter(self._outlines))]
            return found

    def _part_ends(self, spec: AdapterSpec) -> Sequence[int]:
        if self._padding is not None:  # every copy of it has all layers
            return [self._padding.num_bytes(spec)] * (1 + self._shape.num_layers)
        return part_ends(slab_layout(spec, self._shape), self._shape, self._dtype)

    def _copies(self, transfer: Transfer, cut: Cut) -> list[Copy]:
        copies, target = [], self._arena.address + transfer.place + cut.begin
        for stretch in self._host_blocks.parts(transfer.spec, transfer.source, cut.begin, cut.end):
            copies.append(Copy(target, stretch))
            target += stretch.num_bytes
        return copies

    def _weights(self, spec: AdapterSpec, place: int) -> LoraWeights:
        outline = self._outline(spec)
        return LoraWeights(
            groups=(),
            table_LM=self._table_at(place),
            max_rank=outline.max_rank,
            touched=outline.touched,
            copies={} if self._padding is None else self._padding.offsets(spec),
        )

    def _table_at(self, place: int) -> torch.Tensor:
        table = self._arena.span(place, table_bytes(self._shape)).view(torch.int64)
        return table.view(self._shape.num_layers, len(MODULES), TABLE_COLUMNS)


class _Outline(NamedTuple):
    """Of an adapter: up to which byte of its block the table needs it, and each layer; its largest rank, and
    the groups of linears that it changes."""

    ends: tuple[int, ...]
    max_rank: int
    touched: frozenset[str]


class Cut(NamedTuple):
    """Bytes [begin, end) of a block, which are copied at once, and which of its parts end there."""

    begin: int
    end: int
    parts: range


def cuts_of(ends: Sequence[int], assisted_layers: int, plan_groups: PlanGroups) -> list[Cut]:
    """What is copied at once of a block whose table and layers end there, in this order: the table, then
    layers in groups, then the first layers, if CPU workers compute them."""
    computed = 1 + assisted_layers
    layer_bytes = tuple(end - begin for begin, end in pairwise(ends[assisted_layers:]))
    stops = accumulate(plan_groups(layer_bytes), initial=computed)
    groups = [(0, 1), *pairwise(stops), *([(1, computed)] if assisted_layers > 0 else [])]
    return [
        Cut(ends[first - 1] if first > 0 else 0, ends[stop - 1], range(first, stop)) for first, stop in groups
    ]
