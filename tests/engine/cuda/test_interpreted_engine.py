"""The GPU's engine with its kernels interpreted, against the plain one: requests of all kinds, one text."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_engines import BLOCK_SIZE, CONFIG, SHAPE, RunAgain, fill_slab, interpreted, record_with, weights
from driving import Finished, run_to_end, step

from loraplex.adapters.slab import slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import random_specs
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.core.modules import MODULES
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.adapter_loader import slab_weights
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_block import block_bytes, table_bytes
from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
from loraplex.engine.cuda.graphs import Run
from loraplex.engine.cuda.host_blocks import HostPool
from loraplex.engine.cuda.host_memory import HostMemory
from loraplex.engine.cuda.padding import Padding
from loraplex.engine.cuda.step_lora import StepLora, split_segments
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.lora import LoraWeights
from loraplex.kernels.reference import TorchKernels
from loraplex.kernels.triton import lora_blocks
from loraplex.model.decoder import Decoder, KVCache
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory

SPECS = [
    *random_specs("q", "tiny", num_adapters=2, ranks=[1, 7], modules="q"),
    *random_specs("all", "tiny", num_adapters=1, ranks=[20], modules="all"),
    *random_specs("mlp", "tiny", num_adapters=1, ranks=[16], modules="gate,down"),
]


def read(spec: AdapterSpec) -> LoraWeights:
    layout = slab_layout(spec, SHAPE)
    slab = torch.empty(layout.num_elements)
    fill_slab(spec, layout, slab)
    return slab_weights(slab, layout, spec.max_rank)


def plain() -> Engine:
    kernels, num_blocks = TorchKernels(), 200
    return Engine(
        config=SchedulerConfig(max_model_len=128),
        memory=SeparateMemory(num_blocks=num_blocks, block_size=BLOCK_SIZE, adapter_bytes=1 << 24),
        executor=TorchExecutor(
            decoder=Decoder(CONFIG, weights(), kernels, 128),  # type: ignore[arg-type]
            caches=[KVCache.zeros(SHAPE, num_blocks, BLOCK_SIZE, torch.float32) for _ in range(2)],
            builder=BatchBuilder(kernels, BLOCK_SIZE),
            dtype=torch.float32,
            read=read,
        ),
    )


def requests() -> list[EngineRequest]:
    rng = random.Random(3)
    settings: list[dict[str, object]] = [{}, {}, {"frequency_penalty": 0.6}, {"logprobs": 2}]
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=[rng.randrange(256) for _ in range(rng.randrange(1, 20))],
            params=SamplingParams(
                max_tokens=rng.randrange(1, 4),
                temperature=0.0,
                **settings[index % len(settings)],  # type: ignore[arg-type]
            ),
            adapter=(None, *(spec.version for spec in SPECS))[index % 5],
        )
        for index in range(5)
    ]


def texts(build: Callable[[], Engine], specs: Sequence[AdapterSpec] = SPECS) -> dict[str, list[int]]:
    engine = build()
    for spec in specs:
        engine.add_adapter(spec)
    known = (None, *(spec.version for spec in specs))
    for request in requests():
        if request.adapter not in known:
            continue
        engine.add_request(request)
    done = run_to_end(engine)
    engine.close()
    return {name: list(found.token_ids) for name, found in done.items()}


@pytest.mark.parametrize(
    "cold_start", [pytest.param(ColdStart.OVERLAP, marks=pytest.mark.slow), ColdStart.PIPELINED]
)
def test_every_request_gets_the_text_of_the_plain_engine(cold_start: ColdStart) -> None:
    assert texts(lambda: interpreted(cold_start=cold_start)) == texts(plain)


@pytest.mark.slow
def test_memory_for_one_adapter_at_a_time_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = []
    move = DeviceArena.move
    monkeypatch.setattr(DeviceArena, "move", lambda arena, all_: (moves.extend(all_), move(arena, all_)))
    largest = max(block_bytes(slab_layout(spec, SHAPE), SHAPE, torch.float32) for spec in SPECS)
    num_pages = largest // page_bytes(SHAPE, BLOCK_SIZE, torch.float32) + 5
    assert texts(lambda: interpreted(num_pages)) == texts(plain)
    assert moves


class OutOfMemory:
    def record(self, run: Run, *, warm: bool) -> Run:
        raise torch.OutOfMemoryError("none left")


def get_ready(engine: Engine) -> None:
    """Prepare, as the engine process does before it takes requests."""
    while engine.num_required > 0:
        assert engine.prepare()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is in padding rows may overflow
@pytest.mark.parametrize("prepared", ["as far as required", "to the end"])
@pytest.mark.slow
def test_graphs_of_padded_sizes_change_no_text(
    recorder: RunAgain, prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that cover a step, which may cut prompts otherwise, nor those captured for it."""
    monkeypatch.setattr(lora_blocks, "_FEW_PROMPT_ROWS", 16)
    num_recorded: list[int] = []

    def build() -> Engine:
        engine = interpreted()
        for spec in SPECS[:2]:
            engine.add_adapter(spec)
        if prepared == "to the end":
            engine.warm_up()
        else:
            get_ready(engine)
        num_recorded.append(recorder.num_recorded)
        return engine

    assert texts(build, SPECS[:2]) == texts(plain, SPECS[:2])
    assert num_recorded == [recorder.num_recorded], "a graph was captured within a step"
    assert num_recorded[0] > 1


@pytest.mark.slow
def test_decoding_rows_in_the_tiles_of_prompts_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(engine: Engine) -> dict[str, list[int]]:
        """Three requests on one adapter decode when a prompt on it joins them."""
        engine.add_adapter(SPECS[0])
        done: dict[str, Finished] = {}
        for index in range(4):
            while index == 3 and len(done) < 3:
                step(engine, done)
            engine.add_request(
                EngineRequest(
                    request_id=str(index),
                    prompt_token_ids=[index + 1] * (3 + index),
                    params=SamplingParams(max_tokens=6, temperature=0.0),
                    adapter=SPECS[0].version,
                )
            )
        while engine.has_work():
            step(engine, done)
        engine.close()
        return {name: found.token_ids for name, found in done.items()}

    expected = served(plain())
    num_with_decodes = 0

    def noting(batch: KernelBatch, **options: Any) -> StepLora:
        nonlocal num_with_decodes
        lora = split_segments(batch, **options)
        num_with_decodes += bool((lora.span_tiles[0][:, 0] < batch.decode_rows_D.shape[0]).any())
        return lora

    monkeypatch.setattr("loraplex.engine.cuda.step_lora.SHARED_BESIDE_PROMPTS", 3)
    monkeypatch.setattr("loraplex.engine.cuda.step_sizes.SHARED_BESIDE_PROMPTS", 3)
    monkeypatch.setattr("loraplex.engine.cuda.step_runner.split_segments", noting)
    assert served(interpreted()) == expected
    assert num_with_decodes == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.slow
def test_groups_that_were_never_seen_are_captured_after_the_step(recorder: RunAgain) -> None:
    engine = interpreted()
    engine.add_adapter(SPECS[0])
    get_ready(engine)
    num_recorded = recorder.num_recorded
    engine.add_adapter(SPECS[3])  # of the feed-forward layers
    for adapter in (None, SPECS[0].version, SPECS[3].version):
        params = SamplingParams(max_tokens=2, temperature=0.0)
        engine.add_request(
            EngineRequest(request_id=str(adapter), prompt_token_ids=[5, 6, 7], params=params, adapter=adapter)
        )
        assert len(run_to_end(engine)[str(adapter)].token_ids) == 2
    assert recorder.num_recorded == num_recorded, "a graph was captured within a step"
    assert engine.num_required > 0
    get_ready(engine)
    assert recorder.num_recorded > num_recorded
    engine.close()


def test_without_memory_for_graphs_steps_run_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    record_with(OutOfMemory(), monkeypatch)
    engine = interpreted()
    assert engine.num_required > 0
    assert engine.prepare()
    assert not engine.prepare(), "it is tried again and again"
    assert engine.num_required == 0
    params = SamplingParams(max_tokens=2, temperature=0.0)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=params))
    assert len(run_to_end(engine)["a"].token_ids) == 2
    engine.close()


def test_a_padded_adapter_has_the_same_product_and_reads_the_rank_of_its_batch() -> None:
    padding = Padding(shape=SHAPE, dtype=torch.float32, max_rank=32)
    spec = SPECS[1]  # rank 7
    plain_block = HostPool(SHAPE, torch.float32, HostMemory(0, pinned=False), fill_slab).passing(spec)
    block = padding.block(spec, plain_block)
    offsets = padding.offsets(spec)
    assert list(offsets) == [8, 16, 32]
    own = deltas(plain_block)
    for rank, offset in offsets.items():
        found = deltas(block[offset:])
        assert found.keys() == own.keys()
        assert {ranks for ranks, _ in found.values()} == {rank}
        for place, (_, delta) in found.items():
            torch.testing.assert_close(delta, own[place][1])
    weights = LoraWeights(groups=(), table_LM=block, max_rank=7, touched=frozenset(), copies=offsets)
    assert weights.table_address(17) == block.data_ptr() + offsets[32]


def deltas(block: torch.Tensor) -> dict[tuple[int, int], tuple[int, torch.Tensor]]:
    """Rank and scale * B A of every layer and module that a block's table knows."""
    table = block[: table_bytes(SHAPE)].view(torch.int64).view(SHAPE.num_layers, len(MODULES), -1)
    found = {}
    for layer, module in table[..., 2].nonzero().tolist():
        a, b, rank, _, out_features, bits = table[layer, module].tolist()
        in_features = SHAPE.in_features(MODULES[module])
        a_RI = block[a : a + 4 * rank * in_features].view(torch.float32).view(rank, in_features)
        b_RO = block[b : b + 4 * rank * out_features].view(torch.float32).view(rank, out_features)
        scale = struct.unpack("f", struct.pack("i", bits))[0]
        found[layer, module] = (rank, scale * b_RO.t() @ a_RI)
    return found


@pytest.mark.slow
def test_padding_changes_no_text() -> None:
    def padded() -> Engine:
        return interpreted(padded_to=32)

    assert texts(padded, SPECS[:2]) == texts(plain, SPECS[:2])


def test_a_rank_above_the_padded_one_is_refused() -> None:
    engine = interpreted(padded_to=16)
    with pytest.raises(CapacityError, match="rank 20, ranks are padded to 16"):
        engine.add_adapter(SPECS[2])
    engine.close()


def test_an_adapter_larger_than_the_arena_is_refused_by_size() -> None:
    engine = interpreted(num_pages=4)
    with pytest.raises(CapacityError, match="--memory-fraction"):
        engine.add_adapter(SPECS[2])
    engine.close()


@pytest.mark.slow
def test_a_seed_gives_its_text_whatever_else_is_in_the_batch() -> None:
    def text(*, beside: bool) -> list[int]:
        engine = interpreted()
        params = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, seed=1)
        engine.add_request(EngineRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=params))
        if beside:
            other = SamplingParams(max_tokens=4, temperature=1.0, seed=9)
            engine.add_request(EngineRequest(request_id="b", prompt_token_ids=[1] * 20, params=other))
        done = run_to_end(engine)
        engine.close()
        return list(done["a"].token_ids)

    assert text(beside=False) == text(beside=True)


def test_a_rank_beyond_the_kernels_is_refused_by_number() -> None:
    engine = interpreted()
    (spec,) = random_specs("wide", "tiny", num_adapters=1, ranks=[513], modules="q")
    with pytest.raises(CapacityError, match="rank 513"):
        engine.add_adapter(spec)
    engine.close()


def test_a_version_that_comes_back_with_another_content_is_refused() -> None:
    engine = interpreted()
    (small,) = random_specs("small", "tiny", num_adapters=1, ranks=[4], modules="q")
    (large,) = random_specs("large", "tiny", num_adapters=1, ranks=[16], modules="q")
    for _ in range(2):
        engine.add_adapter(small)
        engine.remove_adapter(small.version)
        engine.take_removed_adapters()
    with pytest.raises(AssertionError, match="a version has one content"):
        engine.add_adapter(replace(large, version=small.version))
    engine.close()
