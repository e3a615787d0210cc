"""Runs steps on the device as captured graphs, so that a step takes almost no time of the host.

A step replays the graph that was captured for its sizes and the groups of linears that its adapters touch, or
one that covers them (`graph_queue`); which adapters those are, and their ranks, is data. Graphs are captured
before the first request and while the engine is idle, never within a step. All graphs share one memory pool
and one set of buffers, because they never run at the same time. Steps too large for a graph, those that no
graph covers yet, and those that score prompts run kernel by kernel; so do all where kernels are interpreted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from loraplex.engine.batch import BuiltBatch
from loraplex.engine.cuda.cpu_assist import AssistedStep, AssistedTasks
from loraplex.engine.cuda.graph_queue import Choice, GraphKey, GraphQueue
from loraplex.engine.cuda.graphs import Recorder, Run
from loraplex.engine.cuda.step_buffers import DeviceBlock, HostBlock, StepSizes
from loraplex.engine.cuda.step_lora import StepLora, StepScratch, no_tiles, split_segments
from loraplex.engine.cuda.step_sizes import all_graph_sizes, assisted_graph_sizes, exact_sizes, graph_sizes
from loraplex.kernels.triton.assist import AssistMemory, AssistSpans
from loraplex.kernels.triton.lora_blocks import BlocksLaunch
from loraplex.kernels.triton.lora_rows import FEW_SEGMENTS
from loraplex.kernels.triton.lora_step import LoraStep
from loraplex.kernels.triton.tokens import greedy_tokens, pick_tokens
from loraplex.model.decoder import Decoder, KVCache, Linears, WeightMemory
from loraplex.perf.assist_split import MAX_SPANS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Results on the device: logits of the logit rows, (token, finite) of the greedy choice, and final states
    if the step ran without a graph. A graph's tensors are overwritten by the next one.

    `host_block`: on the host; the caller must keep it until the step is over, because nothing else does.
    """

    host_block: HostBlock
    logits_LV: torch.Tensor
    tokens_L2: torch.Tensor
    states_LH: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    block: DeviceBlock
    replay: Run
    logits_LV: torch.Tensor
    tokens_L2: torch.Tensor


class _SharedBuffers:
    """Memory outside the graphs' own pool that they read or write, large enough for the largest graph."""

    def __init__(self, decoder: Decoder, max_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = decoder.config.shape
        sizes = [
            *all_graph_sizes(max_blocks, shape.num_layers),
            *assisted_graph_sizes(max_blocks, shape.num_layers),
        ]
        num_logits = max(size.logits for size in sizes)
        num_integers = max(replace(size, table_width=max_blocks).num_integers for size in sizes)
        self.integers = torch.zeros(num_integers, dtype=torch.int64, device=device)
        self.logits_LV = torch.empty(num_logits, shape.vocab_size, dtype=dtype, device=device)
        self.tokens_L2 = torch.empty(num_logits, 2, dtype=torch.int64, device=device)
        self.scratch = StepScratch.for_sizes(shape, sizes, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSeats:
    """The seats of a step: of each row, and whether its token is the one in it; of each logit row, the seat
    that its token is written to."""

    follows: Sequence[bool]
    rows: Sequence[int]
    logits: Sequence[int]


class StepRunner:
    """Owns the graphs and the seats' tokens."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        caches: list[KVCache],
        num_seats: int,
        max_blocks: int,
        scratch_slot: int,
        ticket_1: torch.Tensor,
        device: torch.device,
        recorder: Recorder | None,
        assist: AssistMemory | None = None,
        merged_memory: WeightMemory | None = None,
        captures_merged: bool = False,
    ) -> None:
        """`ticket_1`: number of the last complete copy to the device. `recorder`: None to run all steps
        kernel by kernel. `assist`: memory shared with CPU workers, if there are any. `merged_memory`: where
        merged weights lie; None if no step runs on them. `captures_merged`: such steps have graphs, too."""
        self._decoder = decoder
        self._num_layers = decoder.config.shape.num_layers
        self._caches = caches
        self._max_blocks = max_blocks
        self._scratch_slot = scratch_slot
        self._ticket_1 = ticket_1
        self._device = device
        self.last_tokens = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._graphs: GraphQueue[_Graph] = GraphQueue(
            max_blocks, self._num_layers, assisted=assist is not None, captures_merged=captures_merged
        )
        self._merged_memory = merged_memory
        self._merged_linears: dict[frozenset[str], Linears] = {}  # by the groups that are merged
        self._launched: set[tuple[object, ...]] = set()  # what was run before a capture (`_traits`)
        self._recorder = recorder
        self._assist = assist
        self._modes_S = torch.zeros(MAX_SPANS, dtype=torch.int64, device=device)
        self._buffers: _SharedBuffers | None = None
        if recorder is not None:
            self._buffers = _SharedBuffers(decoder, max_blocks, caches[0].k.dtype, device)

    def run(
        self,
        built: BuiltBatch,
        seats: RowSeats,
        wanted_copies: npt.NDArray[np.int64] | None = None,
        assisted: AssistedTasks | None = None,
        merged: frozenset[str] = frozenset(),
    ) -> StepOutput:
        """Launch a step after those launched before. `wanted_copies`: numbers of the copies that it waits
        for, by place (`kernels.triton.gate`); only for steps with prompts. `assisted`: tasks that were
        submitted to CPU workers for it. `merged`: groups of linears that use merged weights, for a batch
        without LoRA products."""
        lora = split_segments(built.batch)
        num_assisted = 0 if assisted is None else len(assisted.spans)
        choice = self._choose_graph(built, lora, num_assisted, merged)
        if choice is not None:
            graph = choice.graph
            lora = self._cut_for(choice.key, built, lora)
            host_block = self._fill(graph.block.sizes, built, lora, seats, wanted_copies, assisted)
            graph.block.upload(host_block)
            graph.replay()
            return StepOutput(host_block=host_block, logits_LV=graph.logits_LV, tokens_L2=graph.tokens_L2)
        sizes = exact_sizes(built, lora, self._num_layers, num_assisted)
        memory = torch.empty(sizes.num_integers, dtype=torch.int64, device=self._device)
        block = DeviceBlock(sizes, memory)
        host_block = self._fill(sizes, built, lora, seats, wanted_copies, assisted)
        block.upload(host_block)
        states_LH, logits_LV = self._forward(block, self._lora_steps(lora, block), merged)
        tokens_L2 = torch.empty(logits_LV.shape[0], 2, dtype=torch.int64, device=self._device)
        self._choose_greedily(block, logits_LV, tokens_L2)
        return StepOutput(
            host_block=host_block, logits_LV=logits_LV, tokens_L2=tokens_L2, states_LH=states_LH
        )

    @property
    def has_assist_kernels(self) -> bool:
        """Return whether any step has the kernels of CPU workers."""
        return self._buffers is None or self._graphs.has_assisted

    def assists(self, built: BuiltBatch) -> bool:
        """Return whether CPU workers may assist with a step: a captured graph has their kernels, or no step
        has a graph. Kernel by kernel, launching them takes longer than workers save."""
        return self._buffers is None or self._choose_graph(built, split_segments(built.batch), 1) is not None

    def _cut_for(self, key: GraphKey, built: BuiltBatch, lora: StepLora) -> StepLora:
        """Return the LoRA work of a step as the graph that it replays cuts it."""
        if (lora.shares, lora.span_launch) == (key.shares, BlocksLaunch.for_prompts(key.sizes.rows)):
            return lora
        return split_segments(built.batch, may_share=key.shares, num_rows=key.sizes.rows)

    def expect(self, groups: frozenset[str]) -> None:
        """Announce steps whose adapters touch these groups of linears."""
        self._graphs.expect(groups)

    def expect_merged(self, groups: frozenset[str]) -> None:
        """Announce steps on merged weights of adapters that touch these groups."""
        self._graphs.expect_merged(groups)

    @property
    def num_required(self) -> int:
        """Number of graphs still to be captured before every expected step has one to replay."""
        return 0 if self._recorder is None else self._graphs.num_required

    def prepare(self) -> bool:
        """Capture one graph, the most useful of those missing; return False if none is left."""
        key = None if self._recorder is None else self._graphs.next()
        if key is None:
            return False
        try:
            self._graphs.put(key, self._capture(key))
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            logger.warning("the device has no memory for more graphs; some steps will be slower")
            self._graphs.stop()
        return True

    def launch_padding(self, key: GraphKey) -> None:
        """Launch, kernel by kernel, what a graph for `key` would: a step of padding alone."""
        block = DeviceBlock(
            key.sizes, torch.empty(key.sizes.num_integers, dtype=torch.int64, device=self._device)
        )
        block.upload(self._host_block(key.sizes))
        lora = no_tiles(key.groups, shares=key.shares, num_rows=key.sizes.rows)
        _, logits_LV = self._forward(block, self._lora_steps(lora, block), key.merged)
        tokens_L2 = torch.empty(logits_LV.shape[0], 2, dtype=torch.int64, device=self._device)
        self._choose_greedily(block, logits_LV, tokens_L2)

    def _choose_graph(
        self,
        built: BuiltBatch,
        lora: StepLora,
        num_assisted: int,
        merged: frozenset[str] = frozenset(),
    ) -> Choice[_Graph] | None:
        """Return the graph that a step replays; None if none covers it."""
        if self._buffers is None:
            return None
        sizes = graph_sizes(built, self._max_blocks, self._num_layers, num_assisted)
        if sizes is None:
            return None
        return self._graphs.choose(GraphKey(sizes, lora.groups, lora.shares, merged))

    def _lora_steps(
        self, lora: StepLora, block: DeviceBlock, scratch: StepScratch | None = None
    ) -> tuple[LoraStep | AssistedStep, ...]:
        """Return the LoRA steps over a block. CPU workers assist with prompts if it has room for that."""
        steps = lora.steps(self._decoder.config.shape, block, scratch)
        if block.sizes.assists == 0 or not steps:
            return steps
        assert self._assist is not None
        spans = AssistSpans(
            head_4=block["assist_head"],
            groups_G=block["assist_groups"],
            spans_S3=block["assist_spans"],
            copies_SL=block["assist_copies"],
            row_spans_T=block["row_spans"],
            modes_S=self._modes_S,
            ticket_1=self._ticket_1,
            memory=self._assist,
        )
        return (*steps[:-1], AssistedStep(on_device=steps[-1], spans=spans))

    def _forward(
        self,
        block: DeviceBlock,
        lora: tuple[LoraStep | AssistedStep, ...],
        merged: frozenset[str] = frozenset(),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the model; return final states and logits. `merged`: groups that use merged weights."""
        token_ids_T = pick_tokens(
            block["token_ids"], block["follows"], block["token_seats"], self.last_tokens
        )
        gate = block.gate(self._ticket_1)
        if gate is not None and lora:
            gate.await_tables()
        for step in lora:
            step.gather()
        max_span_len = block.sizes.rows if block.sizes.spans > 0 else 0
        batch = block.batch(token_ids_T, max_span_len, lora, gate)
        states_LH = self._decoder.forward(batch, self._caches, self._linears(merged))
        return states_LH, self._decoder.logits(states_LH)

    def _linears(self, merged: frozenset[str]) -> Linears | None:
        """Return the linears over the merged weights of these groups; None for the base model's."""
        if not merged:
            return None
        if merged not in self._merged_linears:
            assert self._merged_memory is not None
            self._merged_linears[merged] = self._decoder.linears_over(merged, self._merged_memory)
        return self._merged_linears[merged]

    def _choose_greedily(self, block: DeviceBlock, logits_LV: torch.Tensor, tokens_L2: torch.Tensor) -> None:
        if logits_LV.shape[0] > 0:
            greedy_tokens(logits_LV, block["logit_seats"], self.last_tokens, tokens_L2)

    def _capture(self, key: GraphKey) -> _Graph:
        buffers, sizes = self._buffers, key.sizes
        assert buffers is not None
        assert self._recorder is not None
        block = DeviceBlock(sizes, buffers.integers)
        block.tensor.copy_(self._host_block(sizes).tensor)
        lora = no_tiles(key.groups, shares=key.shares, num_rows=key.sizes.rows)
        steps = self._lora_steps(lora, block, buffers.scratch)
        logits_LV, tokens_L2 = buffers.logits_LV[: sizes.logits], buffers.tokens_L2[: sizes.logits]

        def run() -> None:
            # Copied: the pool's memory that holds a graph's result could not be used by other graphs.
            logits_LV.copy_(self._forward(block, steps, key.merged)[1])
            self._choose_greedily(block, logits_LV, tokens_L2)

        traits = set(_traits(key))
        replay = self._recorder.record(run, warm=traits <= self._launched)
        self._launched |= traits
        return _Graph(block=block, replay=replay, logits_LV=logits_LV, tokens_L2=tokens_L2)

    def _host_block(
        self, sizes: StepSizes, block_tables: Mapping[str, npt.NDArray[np.int64]] | None = None
    ) -> HostBlock:
        pinned = self._device.type == "cuda"
        return HostBlock(sizes, self._scratch_slot, pinned, block_tables)

    def _fill(
        self,
        sizes: StepSizes,
        built: BuiltBatch,
        lora: StepLora,
        seats: RowSeats,
        wanted_copies: npt.NDArray[np.int64] | None,
        assisted: AssistedTasks | None,
    ) -> HostBlock:
        batch = built.batch
        tables = {
            "decode_blocks": batch.decode_blocks_DB.numpy(),
            "span_blocks": batch.span_blocks_SB.numpy(),
        }
        block = self._host_block(sizes, tables)
        block["token_ids"] = batch.token_ids_T.numpy()
        block["follows"] = seats.follows
        block["token_seats"] = seats.rows
        block["positions"] = batch.positions_T.numpy()
        block["slots"] = batch.slots_T.numpy()
        block["decode_rows"] = batch.decode_rows_D.numpy()
        block["decode_context"] = batch.decode_context_D.numpy()
        block["span_starts"] = batch.span_starts_S.numpy()
        block["span_lens"] = batch.span_lens_S.numpy()
        block["span_context"] = batch.span_context_S.numpy()
        block["logit_rows"] = batch.logit_rows_L.numpy()
        block["logit_seats"] = seats.logits
        block["decode_tiles"], block["decode_tables"] = lora.decode_tiles
        block["span_tiles"], block["span_tables"] = lora.span_tiles
        if wanted_copies is not None:
            block["wanted_copies"] = wanted_copies
        for field, values in assisted.fields().items() if assisted is not None else ():
            block[field] = values
        return block


def _traits(key: GraphKey) -> Iterator[tuple[object, ...]]:
    """Yield all that decides which kernels a graph launches. A capture cannot load a kernel: if all of its
    traits were launched before, by any graphs, there is none to load. Libraries choose kernels by rows."""
    sizes = key.sizes
    yield "rows", sizes.rows
    yield "logits", sizes.logits
    yield "decodes", sizes.decodes, sizes.spans > 0
    for group in key.groups:
        if sizes.decode_tiles > 0:
            is_large = sizes.decode_tiles > FEW_SEGMENTS
            yield group, BlocksLaunch.for_decode(sizes.decodes) if key.shares else is_large
        if sizes.span_tiles > 0:
            yield group, BlocksLaunch.for_prompts(sizes.rows)
        if sizes.assists > 0:
            yield group, sizes.span_tiles


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error is an OutOfMemoryError, or was raised while one was handled: what ends a
    failed capture may fail too."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None
