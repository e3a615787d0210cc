"""LoRA of prompts whose adapters are still being copied to the device, computed by CPU workers.

A step has a few such prompts (`perf.assist_split.MAX_SPANS`). For each group of linears of a layer:

    choose    beside the base product    find spans whose weights have not arrived; LoRA kernels skip these
    send                                 write the inputs of those spans to host memory that the workers share
    signal                               let the workers start on the group's tasks, or skip them
    collect   after the base product     wait for the workers' outputs and add them

The choice is made on the device, when the layer is reached, by the number of the last complete copy. So a
captured graph serves whatever is on its way, and no thread of the host takes part.

    head_4       ticket before the step's first task; spans, groups and layers that have tasks
    groups_G     place of each group of linears among those that have tasks, or -1
    spans_S3     rows (0: no span), layers that workers may compute, address of the adapter's table
    copies_SL    the copy that brings each layer of the span's adapter
    row_spans_T  1 + the span of each row, or 0
    modes_S      1 for a span that workers compute in this group
    words        the control words of `engine.assist.control`, in host memory

The task of layer l, group place g and span s has the ticket head[0] + 1 + (l * groups + g) * spans + s.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.core.modules import GROUPS
from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.lora_entries import COLUMNS, first_row, module_of_block

_GROUP_PLACES = {group: place for place, group in enumerate(GROUPS)}
_SEND_BLOCK = 1024
_ADD_BLOCK = 512
_FOREVER = tl.constexpr((1 << 63) - 1)


@triton.jit
def _tasks_of(head, groups, layer, GROUP: tl.constexpr):
    """Return the ticket before this group's first task, and the number of its tasks; 0 if it has none."""
    num_spans = tl.load(head + 1)
    place = tl.load(groups + GROUP)
    first = tl.load(head) + (layer * tl.load(head + 2) + place) * num_spans
    return first, tl.where((place >= 0) & (layer < tl.load(head + 3)), num_spans, 0)


@Kernel
@triton.jit(
    do_not_specialize=["layer", "table_row", "num_layers", "num_tiles"],
    do_not_specialize_on_alignment=["ticket", "spans", "copies", "row_spans", "tiles", "entries", "modes"],
)
def _choose(
    ticket, spans, copies, row_spans, tiles, entries, modes, layer, table_row, num_layers, num_tiles,
    SPANS: tl.constexpr, TILES: tl.constexpr, NUM_MODULES: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, SPANS)
    is_used = tl.load(spans + place * 3) > 0
    is_planned = is_used & (layer < tl.load(spans + place * 3 + 1))
    wanted = tl.load(copies + place * num_layers + layer)
    # Layers that workers have no tasks for are waited for.
    awaited = tl.max(tl.where(is_used & (is_planned == 0), wanted, 0), 0)
    seen = tl.load(ticket, volatile=True)
    while seen < awaited:
        seen = tl.load(ticket, volatile=True)
    is_assisted = is_planned & (seen < wanted)
    tl.store(modes + place, is_assisted.to(tl.int64))
    at = tl.arange(0, TILES)
    num_rows = tl.load(tiles + 2 * at + 1, mask=at < num_tiles, other=0)
    start = tl.load(tiles + 2 * at, mask=num_rows > 0, other=0)
    span = tl.load(row_spans + start, mask=num_rows > 0, other=0)
    is_left = (span[:, None] == place[None, :] + 1) & is_assisted[None, :]
    is_tile_left = tl.sum(is_left.to(tl.int32), 1) > 0
    for m in tl.static_range(NUM_MODULES):
        rank = entries + ((table_row + m) * num_tiles + at) * COLUMNS + 2
        tl.store(rank, 0, mask=is_tile_left)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["row_spans", "modes"])
def _send(x, x_stride, x_host, row_spans, modes, IN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    span = tl.load(row_spans + row)
    if span == 0:
        return
    if tl.load(modes + span - 1) == 0:
        return
    for start in range(0, IN, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_stride + at, mask=at < IN)
        tl.store(x_host + row * IN + at, values, mask=at < IN)


@Kernel
@triton.jit(
    do_not_specialize=["layer", "ring_size", "skips"],
    do_not_specialize_on_alignment=["head", "groups", "modes", "words"],
)
def _signal(
    head, groups, modes, words, layer, ring_size, skips,
    GROUP: tl.constexpr, SPANS: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    first, count = _tasks_of(head, groups, layer, GROUP)
    if count == 0:
        return
    place = tl.arange(0, SPANS)
    task = first + 1 + place
    is_task = place < count
    is_skipped = tl.load(modes + place) == 0
    skip = tl.where(is_skipped, task, 0)
    # Beyond the last task there is one word that nobody reads.
    where = words + skips + tl.where(is_task, task % ring_size, ring_size)
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.s64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [where.to(tl.int64), skip],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()
        # The inputs were written by the launch before: this orders them, too, before the word.
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.s64 [$1], $2; mov.u32 $0, 0;", "=r,l,l",
            [words.to(tl.int64), first + count], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(where, skip)
        tl.store(words, first + count)


@Kernel
@triton.jit(
    do_not_specialize=["layer", "done", "num_slots"],
    do_not_specialize_on_alignment=["head", "groups", "modes", "words"],
)
def _collect(
    head, groups, modes, words, layer, done, num_slots,
    GROUP: tl.constexpr, SPANS: tl.constexpr, SLOTS: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    first, count = _tasks_of(head, groups, layer, GROUP)
    if count == 0:
        return
    if tl.max(tl.load(modes + tl.arange(0, SPANS)), 0) == 0:
        return
    slot = tl.arange(0, SLOTS)
    at = words + done + 8 * slot
    reached = tl.min(tl.load(at, mask=slot < num_slots, other=_FOREVER, volatile=True), 0)
    while reached < first + count:
        reached = tl.min(tl.load(at, mask=slot < num_slots, other=_FOREVER, volatile=True), 0)
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@Kernel
@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["spans", "row_spans", "modes"])
def _add(
    y, y_stride, y_host, spans, row_spans, modes, table_row,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.load(row_spans + row)
    if span == 0:
        return
    if tl.load(modes + span - 1) == 0:
        return
    module, block, out, out_start = module_of_block(tl.program_id(1), OUT0, OUT1, OUT2, BLOCK_N)
    address = tl.load(spans + (span - 1) * 3 + 2)
    table = address.to(tl.pointer_type(tl.int64))
    if tl.load(table + (table_row + module) * COLUMNS + 2) == 0:
        return  # workers leave the columns of other modules as they are
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < out
    host = y_host + row * (OUT0 + OUT1 + OUT2) + out_start + columns
    found = tl.load(host, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
    target = y + row * y_stride + out_start + columns
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + found).to(y.dtype.element_ty), mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistMemory:
    """Host memory that workers share: inputs, outputs and control words. `done` and `skips`: the places of
    the workers' done words, one cache line each, and of the skip words among the control words."""

    x: torch.Tensor
    y: torch.Tensor
    words: torch.Tensor
    done: int
    skips: int
    ring_size: int
    num_slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistSpans:
    """A step's assisted spans on the device, with the names of this module's docstring. `ticket_1`: the
    number of the last copy that is complete."""

    head_4: torch.Tensor
    groups_G: torch.Tensor
    spans_S3: torch.Tensor
    copies_SL: torch.Tensor
    row_spans_T: torch.Tensor
    modes_S: torch.Tensor
    ticket_1: torch.Tensor
    memory: AssistMemory

    def send(
        self, x_TI: torch.Tensor, tiles_N2: torch.Tensor, entries: torch.Tensor, layer: int, group: str
    ) -> None:
        """Choose the spans that workers compute, and hand their inputs over. `entries` of their tiles are
        changed so that the LoRA kernels skip them in this group."""
        modules, num_tiles = GROUPS[group], tiles_N2.shape[0]
        num_spans, num_layers = self.copies_SL.shape
        _choose[(1,)](
            self.ticket_1, self.spans_S3, self.copies_SL, self.row_spans_T, tiles_N2, entries, self.modes_S,
            layer, first_row(layer, group), num_layers, num_tiles, SPANS=num_spans,
            TILES=triton.next_power_of_2(num_tiles), NUM_MODULES=len(modules), num_warps=1,
        )  # fmt: skip
        _send[(x_TI.shape[0],)](
            x_TI, x_TI.stride(0), self.memory.x, self.row_spans_T, self.modes_S,
            IN=x_TI.shape[1], BLOCK=_SEND_BLOCK,
        )  # fmt: skip
        memory = self.memory
        _signal[(1,)](
            self.head_4, self.groups_G, self.modes_S, memory.words, layer, memory.ring_size, memory.skips,
            GROUP=_GROUP_PLACES[group], SPANS=num_spans, ON_DEVICE=x_TI.device.type != "cpu", num_warps=1,
        )  # fmt: skip

    def collect(self, y_TO: torch.Tensor, out_features: tuple[int, ...], layer: int, group: str) -> None:
        """Wait for the workers, and add their outputs; `out_features` of the group's modules."""
        memory, num_spans = self.memory, self.copies_SL.shape[0]
        _collect[(1,)](
            self.head_4, self.groups_G, self.modes_S, memory.words, layer, memory.done, memory.num_slots,
            GROUP=_GROUP_PLACES[group], SPANS=num_spans, SLOTS=triton.next_power_of_2(memory.num_slots),
            ON_DEVICE=y_TO.device.type != "cpu", num_warps=1,
        )  # fmt: skip
        out0, out1, out2 = (*out_features, 0, 0)[:3]
        blocks = sum(triton.cdiv(out, _ADD_BLOCK) for out in out_features)
        _add[(y_TO.shape[0], blocks)](
            y_TO, y_TO.stride(0), memory.y, self.spans_S3, self.row_spans_T, self.modes_S,
            first_row(layer, group), OUT0=out0, OUT1=out1, OUT2=out2, BLOCK_N=_ADD_BLOCK,
        )  # fmt: skip
