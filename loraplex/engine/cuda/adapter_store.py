"""Copies adapters from host memory into the arena, part by part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Final, NamedTuple, Protocol

import torch

from loraplex.adapters.slab import slab_layout, touched_groups
from loraplex.adapters.spec import AdapterSpec, LoraModule
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
"""Maps the bytes of each layer to copy groups: the number of layers in each, in copy order."""


class Padding(Protocol):
    """The methods of `padding.Padding` that the store calls, for comparisons."""

    def num_bytes(self, spec: AdapterSpec) -> int: ...

    def offsets(self, spec: AdapterSpec) -> dict[int, int]:
        """Return rank -> first byte of the copy padded to it, in the adapter's block."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A copy of a version from byte `source` of host memory to byte `place` of the arena, not before the
    moment `after`. `assisted_layers`: number of its first layers that CPU workers may compute meanwhile."""

    spec: AdapterSpec
    source: int
    place: int
    after: Moment
    assisted_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferBatch:
    """Adapters that are copied in turns: the moment at which the first copy began, and their total bytes."""

    begun: Moment
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """An adapter that is being copied to the device. Steps that wait for its copies may use its weights.

    `tickets`: number of the copy that completes its table, then of the one that completes each layer. `done`:
    the moment at which its copies are complete, and those of adapters that were copied in turns with it.
    """

    transfer: Transfer
    weights: LoraWeights
    tickets: tuple[int, ...]
    done: Moment
    transfer_batch: TransferBatch


class AdapterStore:
    """Copies adapters from host memory into the arena."""

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
        """`padding`: set if `host_blocks` holds padded adapters. `max_copy_bytes_per_s`: a rate to slow
        copies down to, for comparison."""
        self._padding = padding
        self._shape = shape
        self._dtype = dtype
        self._arena = arena
        self._host_blocks = host_blocks
        self._bus = Bus(device, max_copy_bytes_per_s)
        self._cuts_of = lru_cache(_MAX_PLANS)(partial(cuts_of, plan_groups=plan_groups))  # most are alike
        self._outlining = threading.Lock()
        self._outlines: dict[str, _Outline] = {}  # by version: they are slow to compute
        self._passing_stream = SideStream(device)

    @property
    def ticket_1(self) -> torch.Tensor:
        """The number of the last complete copy, on the device."""
        return self._bus.ticket_1

    def num_bytes(self, spec: AdapterSpec) -> int:
        """Return the bytes of an adapter that is registered now."""
        assert self._outline(spec).modules == spec.modules, "a version has one content, but is given another"
        if self._padding is not None:
            return self._padding.num_bytes(spec)
        return self._outline(spec).ends[-1]

    def read(self, spec: AdapterSpec, place: int) -> None:
        """Read a version into a place in host memory; called on a reader's thread."""
        self._host_blocks.read(spec, place)

    def start(self, transfers: Sequence[Transfer]) -> list[Arrival]:
        """Begin to copy, the first parts of all versions before the second parts of any."""
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
        """Copy a version that is not kept in host memory to its place, not before the moment `after`, and
        wait until that is complete; called on a reader's thread."""
        host = self._host_blocks.passing(spec)
        with self._passing_stream.entered():
            self._passing_stream.wait_for(after)
            self._arena.span(place, host.numel()).copy_(host, non_blocking=True)
        self._passing_stream.synchronize()
        return self._weights(spec, place)

    def prepare(self) -> bool:
        return self._host_blocks.prepare()

    def close(self, *, frees_memory: bool) -> None:
        """Wait for the copies and close the host blocks; call it after the last load. `frees_memory`: False
        if a read into host memory is still in progress."""
        try:
            self._bus.synchronize()
        finally:
            self._host_blocks.close(frees_memory=frees_memory)

    def moved(self, weights: LoraWeights, place: int) -> LoraWeights:
        """Return the weights of the same adapter after its block was copied to another place."""
        return replace(weights, table_LM=self._table_at(place))

    def _cuts(self, transfer: Transfer) -> list[Cut]:
        return self._cuts_of(self._outline(transfer.spec).ends, transfer.assisted_layers)

    def _outline(self, spec: AdapterSpec) -> _Outline:
        """Return the outline of a version, cached. May be called on any thread."""
        with self._outlining:
            found = self._outlines.get(spec.version)
            if found is None:
                found = self._outlines[spec.version] = _Outline(
                    tuple(self._part_ends(spec)), spec.max_rank, touched_groups(spec), spec.modules
                )
                if len(self._outlines) > _MAX_KNOWN:
                    del self._outlines[next(iter(self._outlines))]
            return found

    def _part_ends(self, spec: AdapterSpec) -> Sequence[int]:
        if self._padding is not None:  # each padded copy has all layers: one part is all
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
    """The bytes at which the table and each layer of an adapter's block end; the adapter's largest rank; the
    groups of linears that it touches; and the modules that this follows from."""

    ends: tuple[int, ...]
    max_rank: int
    touched: frozenset[str]
    modules: tuple[LoraModule, ...]


class Cut(NamedTuple):
    """Bytes [begin, end) of a block that are copied at once, and its parts: 0 is the table, then layers."""

    begin: int
    end: int
    parts: range


def cuts_of(ends: Sequence[int], assisted_layers: int, plan_groups: PlanGroups) -> list[Cut]:
    """Return the cuts of a block whose table and layers end at `ends`, in copy order: the table, then layers
    in groups, then the first layers if CPU workers may compute them."""
    computed = 1 + assisted_layers
    layer_bytes = tuple(end - begin for begin, end in pairwise(ends[assisted_layers:]))
    stops = accumulate(plan_groups(layer_bytes), initial=computed)
    groups = [(0, 1), *pairwise(stops), *([(1, computed)] if assisted_layers > 0 else [])]
    return [
        Cut(ends[first - 1] if first > 0 else 0, ends[stop - 1], range(first, stop)) for first, stop in groups
    ]
