"""Runs steps on the device as captured graphs, so that a step costs the host next to nothing.

A graph is captured on first use for sizes rounded up (`step_sizes`), for the groups of linears that the
step's adapters touch, and for whether decoding rows share adapters; which adapters those are, and their
ranks, is data. All graphs share one memory pool, as they never run at the same time. Steps too large for a
graph, and those that score prompts, run kernel by kernel; so do all where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from loraplex.engine.batch import BuiltBatch
from loraplex.engine.cuda.step_buffers import DeviceBlock, HostBlock, StepSizes
from loraplex.engine.cuda.step_lora import StepLora, no_tiles, split_segments
from loraplex.engine.cuda.step_sizes import all_graph_sizes, exact_sizes, graph_sizes
from loraplex.kernels.triton.lora_step import LoraStep
from loraplex.kernels.triton.tokens import greedy_tokens, pick_tokens
from loraplex.model.decoder import Decoder, KVCache

_WARM_UPS: Final = 2
"""Runs before a capture: the first compiles the kernels and makes the libraries' workspaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """On the device: final states and logits of the logit rows, and (token, finite) of the greedy choice.

    A graph's tensors are written again by its next replay.
    """

    states_LH: torch.Tensor
    logits_LV: torch.Tensor
    tokens_L2: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """A captured step, and all memory outside the graphs' own pool that it reads or writes."""

    block: DeviceBlock
    lora: tuple[LoraStep, ...]
    graph: torch.cuda.CUDAGraph
    output: StepOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSeats:
    """By row: whether it starts from its seat's token, and the seat. By logit row: the seat."""

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
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._max_blocks = max_blocks
        self._scratch_slot = scratch_slot
        self._device = device
        self._captures = device.type == "cuda"
        self.last_tokens = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[StepSizes, frozenset[str], bool], _Graph] = {}
        self._pool: Any = None

    def run(self, built: BuiltBatch, seats: RowSeats) -> StepOutput:
        """Launch a step behind those launched before."""
        lora = split_segments(built.batch)
        sizes = graph_sizes(built, self._max_blocks) if self._captures else None
        if sizes is not None:
            graph = self._graph_for(sizes, lora)
            graph.block.upload(self._fill(sizes, built, lora, seats))
            graph.graph.replay()
            return graph.output
        sizes = exact_sizes(built, lora)
        block = DeviceBlock(sizes, self._device)
        block.upload(self._fill(sizes, built, lora, seats))
        return self._forward(block, lora.steps(self._decoder.config.shape, block))

    def warm_up(self, groups: frozenset[str]) -> None:
        """Capture every graph for steps whose adapters touch these groups, none of them included."""
        for sizes in all_graph_sizes(self._max_blocks) if self._captures else ():
            for shares in (False, True) if groups and sizes.spans == 0 else (False,):
                self._graph_for(sizes, no_tiles(groups, shares=shares))

    def _forward(self, block: DeviceBlock, lora: tuple[LoraStep, ...]) -> StepOutput:
        token_ids_T = pick_tokens(
            block["token_ids"], block["follows"], block["token_seats"], self.last_tokens
        )
        for step in lora:
            step.gather()
        max_span_len = block.sizes.rows if block.sizes.spans > 0 else 0
        states_LH = self._decoder.forward(block.batch(token_ids_T, max_span_len, lora), self._caches)
        logits_LV = self._decoder.logits(states_LH)
        tokens_L2 = torch.empty(logits_LV.shape[0], 2, dtype=torch.int64, device=self._device)
        if logits_LV.shape[0] > 0:
            greedy_tokens(logits_LV, block["logit_seats"], self.last_tokens, tokens_L2)
        return StepOutput(states_LH=states_LH, logits_LV=logits_LV, tokens_L2=tokens_L2)

    def _graph_for(self, sizes: StepSizes, lora: StepLora) -> _Graph:
        key = (sizes, lora.groups, lora.shares)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(sizes, lora)
        return found

    def _capture(self, sizes: StepSizes, lora: StepLora) -> _Graph:
        block = DeviceBlock(sizes, self._device)
        block.upload(HostBlock(sizes, self._scratch_slot, pinned=self._captures))
        steps = lora.steps(self._decoder.config.shape, block)
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forward(block, steps)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._forward(block, steps)
        self._pool = graph.pool()
        return _Graph(block=block, lora=steps, graph=graph, output=output)

    def _fill(self, sizes: StepSizes, built: BuiltBatch, lora: StepLora, seats: RowSeats) -> HostBlock:
        batch = built.batch
        block = HostBlock(sizes, self._scratch_slot, pinned=self._captures)
        block["token_ids"] = batch.token_ids_T.numpy()
        block["follows"] = seats.follows
        block["token_seats"] = seats.rows
        block["positions"] = batch.positions_T.numpy()
        block["slots"] = batch.slots_T.numpy()
        block["decode_rows"] = batch.decode_rows_D.numpy()
        block["decode_context"] = batch.decode_context_D.numpy()
        block["decode_blocks"] = batch.decode_blocks_DB.numpy()
        block["span_starts"] = batch.span_starts_S.numpy()
        block["span_lens"] = batch.span_lens_S.numpy()
        block["span_context"] = batch.span_context_S.numpy()
        block["span_blocks"] = batch.span_blocks_SB.numpy()
        block["logit_rows"] = batch.logit_rows_L.numpy()
        block["logit_seats"] = seats.logits
        block["decode_tiles"], block["decode_tables"] = lora.decode_tiles
        block["span_tiles"], block["span_tables"] = lora.span_tiles
        return block
