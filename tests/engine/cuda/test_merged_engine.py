"""Merged steps of the GPU's engine, its kernels interpreted: the adapters' answers, in memory that others use
before and after."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from cuda_engines import CONFIG, SHAPE, RunAgain, fill_slab, greedy, interpreted, weights
from driving import Finished, run_to_end
from merging import Merging

from loraplex.adapters.merged_layout import layout_bytes
from loraplex.adapters.slab import slab_layout, touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import random_specs
from loraplex.core.batching import Batching
from loraplex.core.modules import GROUPS
from loraplex.core.request import EngineRequest
from loraplex.engine.cuda.adapter_block import adapter_block, table_bytes
from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
from loraplex.engine.cuda.merge_buffer import MergeBuffer
from loraplex.kernels.lora import TABLE_COLUMNS, LoraWeights
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.decoder import Decoder, Linears
from loraplex.scheduling.plan import Move

SPECS = [
    *random_specs("q", "tiny", num_adapters=1, ranks=[7], modules="q"),
    *random_specs("all", "tiny", num_adapters=1, ranks=[20], modules="all"),
    *random_specs("mlp", "tiny", num_adapters=1, ranks=[16], modules="gate,down"),
]
VERSIONS = [spec.version for spec in SPECS]
PAGE_BYTES = page_bytes(SHAPE, 16, torch.float32)


def merging_of(**options: object) -> Merging:
    engine = interpreted(**options)  # type: ignore[arg-type]
    for spec in SPECS:
        engine.add_adapter(spec)
    return Merging(engine, SPECS)


def with_logprobs(request: EngineRequest) -> EngineRequest:
    return replace(request, params=replace(request.params, logprobs=0))


def answers(merging: Merging, requests: Sequence[EngineRequest]) -> dict[str, Finished]:
    for request in requests:
        merging.engine.add_request(request)
    return run_to_end(merging.engine)


def test_a_merged_step_equals_the_unmerged_one_within_rounding() -> None:
    merging, found = merging_of(), {}
    for wanted in (False, True):
        for version in VERSIONS:
            merging.wanted = version if wanted else None
            request = with_logprobs(greedy(version, version, prompt=9, tokens=3))
            found[version, wanted] = answers(merging, [request])[version]
    assert merging.num_merged_steps == 9
    assert merging.engine._memory.merged_bytes >= layout_bytes(touched_groups(SPECS[2]), SHAPE, 4)
    for version in VERSIONS:
        unmerged, merged = found[version, False], found[version, True]
        assert merged.token_ids == unmerged.token_ids
        assert [one.logprob for one in merged.logprobs] == pytest.approx(
            [one.logprob for one in unmerged.logprobs], abs=1e-3
        )
    merging.engine.close()


@pytest.mark.parametrize("num_pages", [pytest.param(1000, marks=pytest.mark.slow), 72])
def test_switching_beside_other_requests_changes_no_text(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory, merged weights make adapters move and leave, and the reverse."""
    moves: list[Move] = []
    move = DeviceArena.move
    monkeypatch.setattr(DeviceArena, "move", lambda arena, all_: (moves.extend(all_), move(arena, all_)))
    query, every, mlp = VERSIONS
    merging = merging_of(num_pages=num_pages)
    alone = {
        name: answers(merging, [greedy("a", name, tokens=3)])["a"].token_ids for name in (None, *VERSIONS)
    }
    steps = [(query, query), (every, mlp), (mlp, mlp), (None, query), (every, every)]
    for wanted, beside in steps:
        merging.wanted = wanted
        requests = [greedy("a", wanted, tokens=3), greedy("b", beside, tokens=2)]
        for request_id, done in answers(merging, requests).items():
            adapter = wanted if request_id == "a" else beside
            assert done.token_ids == alone[adapter][: len(done.token_ids)]
            assert done.error is None
    assert merging.num_merged_steps > 3
    assert [plan.merge for plan in merging.plans if plan.merge is not None] == [query, every, mlp, every]
    if num_pages < 1000:
        assert any(each.version is not None for each in moves), "no adapter was in the way"
    merging.engine.close()


def test_merged_steps_without_graphs_of_their_own_run_kernel_by_kernel(recorder: RunAgain) -> None:
    merging = merging_of()
    merging.engine.get_ready()
    num_recorded = recorder.num_recorded
    merging.wanted = VERSIONS[0]
    answers(merging, [greedy("load", VERSIONS[0])])
    num_replayed = recorder.num_replayed
    answers(merging, [greedy("a", VERSIONS[0])])
    assert merging.num_merged_steps >= 2
    assert recorder.num_replayed == num_replayed
    merging.engine.get_ready()
    assert recorder.num_recorded == num_recorded, "graphs of merged steps were not asked for"
    merging.engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is in padding rows may overflow
def test_graphs_over_merged_weights_change_no_text(recorder: RunAgain) -> None:
    expected = [greedy("abc", VERSIONS[0], tokens=3), greedy("abc", VERSIONS[2], tokens=3)]
    unmerged = merging_of()
    texts = [answers(unmerged, [request])["abc"].token_ids for request in expected]
    unmerged.engine.close()
    merging = merging_of(batching=Batching.MERGED)
    merging.engine.get_ready()
    num_recorded = recorder.num_recorded
    for request, text in zip(expected, texts, strict=True):
        assert request.adapter is not None
        merging.wanted = None
        answers(merging, [greedy("load", request.adapter)])
        merging.wanted = request.adapter
        num_replayed, num_merged = recorder.num_replayed, merging.num_merged_steps
        assert answers(merging, [request])["abc"].token_ids == text
        assert merging.num_merged_steps - num_merged == 3
        assert recorder.num_replayed - num_replayed == 3, "a merged step ran kernel by kernel"
    assert recorder.num_recorded == num_recorded, "a graph was captured within a step"
    merging.engine.close()


def test_padded_adapters_are_merged_too() -> None:
    engine = interpreted(padded_to=32)
    engine.add_adapter(SPECS[0])
    merging, texts = Merging(engine, SPECS[:1]), []
    for wanted in (None, VERSIONS[0]):
        merging.wanted = wanted
        texts.append(answers(merging, [greedy("a", VERSIONS[0])])["a"].token_ids)
    assert merging.num_merged_steps == 2
    assert texts[0] == texts[1]
    engine.close()


def test_adapters_whose_merged_weights_never_fit_are_not_merged() -> None:
    everything = layout_bytes(GROUPS, SHAPE, 4)
    engine = interpreted(num_pages=everything // PAGE_BYTES)
    assert engine._executor.why_not_merged is None
    assert engine._executor.merge_bytes(SPECS[1]) is None
    assert engine._executor.merge_bytes(SPECS[0]) == layout_bytes({"qkv"}, SHAPE, 4)
    engine.close()
    tiny = interpreted(num_pages=5)
    assert tiny._executor.merge_bytes(SPECS[0]) is None
    assert "raise --memory-fraction" in (tiny._executor.why_not_merged or "")
    tiny.close()


@pytest.mark.slow
def test_many_merges_change_no_bit() -> None:
    """Into one buffer, as the engine does: base weights and each adapter's merged ones are those of the
    start."""
    device = torch.device("cpu")
    decoder = Decoder(CONFIG, weights(), TritonKernels(SHAPE, device), 64)
    num_pages = layout_bytes(GROUPS, SHAPE, 4) // PAGE_BYTES + 2
    arena = DeviceArena(SHAPE, num_pages=num_pages, block_size=16, dtype=torch.float32, device=device)
    memory = MergeBuffer(SHAPE, torch.float32, arena).weight
    adapters = [on_device(spec) for spec in SPECS]

    def snapshot(linears: Linears) -> list[torch.Tensor]:
        return [linear.weight().clone() for layer in linears for linear in layer.values()]

    base = snapshot(decoder._linears)
    at_start = [snapshot(decoder.merge(each, memory)) for each in adapters]
    rng = random.Random(0)
    for _ in range(40):
        index = rng.randrange(len(adapters))
        found = snapshot(decoder.merge(adapters[index], memory))
        assert all(map(torch.equal, found, at_start[index]))
    assert all(map(torch.equal, snapshot(decoder._linears), base))


def on_device(spec: AdapterSpec) -> LoraWeights:
    def read(spec: AdapterSpec, layout: object, slab: torch.Tensor) -> None:
        fill_slab(spec, slab_layout(spec, SHAPE), slab)

    block = adapter_block(spec, SHAPE, torch.float32, read, lambda size: torch.zeros(size, dtype=torch.uint8))
    table_LM = block[: table_bytes(SHAPE)].view(torch.int64).view(SHAPE.num_layers, -1, TABLE_COLUMNS)
    return LoraWeights(groups=(), table_LM=table_LM, max_rank=spec.max_rank, touched=touched_groups(spec))


@pytest.mark.parametrize("distance", [-3, 3, -500, 500])
def test_overlapping_moves_in_either_direction_keep_every_byte(
    distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = DeviceArena(SHAPE, num_pages=4, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(arena, "_staging", torch.empty(7, dtype=torch.uint8))
    content = torch.randint(0, 256, (100,), dtype=torch.uint8)
    arena.span(600, 100).copy_(content)
    arena.move([Move(source_byte=600, target_byte=600 + distance, num_bytes=100)])
    assert torch.equal(arena.span(600 + distance, 100), content)
