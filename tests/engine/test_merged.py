"""Steps on merged weights: the adapter's answers, and a base model that no merge changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Finished, run_to_end
from merging import Merging
from tiny import ALL_LINEARS, load_adapter, make_model, save_adapter, save_model

from loraplex.adapters.merged_layout import touched_bytes
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.adapter_loader import read_weights
from loraplex.engine.adapter_reads import AdapterReads
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.engine.slab_reader import read_slab
from loraplex.kernels.cpu.numba_kernels import NumbaKernels, PackedFloat32Linear
from loraplex.kernels.interface import Kernels
from loraplex.kernels.reference import TorchKernels
from loraplex.model.config import load_config
from loraplex.model.decoder import Decoder, KVCache, Linears
from loraplex.model.weights import load_weights
from loraplex.scheduling.plan import Chunk

PROMPT = [(11 * index + 5) % 256 for index in range(40)]
ADAPTERS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "all": (16, ALL_LINEARS, {}),
    "query": (3, ["q_proj", "v_proj"], {"use_rslora": True}),
    "mixed": (5, ["k_proj", "o_proj", "up_proj"], {"rank_pattern": {"o_proj": 11}}),
    "layers": (40, r".*layers\.(0|2)\..*(q|down)_proj", {"lora_alpha": 100}),
}
"""Name -> rank, modules, settings."""


class Served:
    """A model with adapters, in a folder."""

    def __init__(self, root: Path, family: str) -> None:
        self.base = save_model(root / "base", family)
        self.family = family
        self.root = root
        self.config = load_config(root / "base")
        self.specs: dict[str, AdapterSpec] = {}
        for seed, (name, (rank, targets, settings)) in enumerate(ADAPTERS.items(), start=1):
            settings = dict(settings)
            alpha = settings.pop("lora_alpha", None)
            save_adapter(root / name, self.base, rank=rank, targets=targets, seed=seed, **settings)
            if alpha is not None:
                change_alpha(root / name, alpha)
            self.specs[name] = read_adapter(root / name, self.config.shape)


def change_alpha(folder: Path, alpha: int) -> None:
    path = folder / "adapter_config.json"
    text = path.read_text()
    assert text.count('"lora_alpha": 80') == 1
    path.write_text(text.replace('"lora_alpha": 80', f'"lora_alpha": {alpha}'))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp(f"merged-{request.param}"), request.param)


@pytest.fixture
def merging(served: Served) -> Iterator[Merging]:
    engine = build(served)
    yield Merging(engine, list(served.specs.values()))
    engine.close()


def build(served: Served, **options: Any) -> Engine:
    given = {"kv_memory_bytes": 1 << 20, **options}
    engine = build_core(EngineOptions(model=str(served.root / "base"), **given))
    for spec in served.specs.values():
        engine.add_adapter(spec)
    return engine


def request_of(request_id: str, adapter: str | None, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        params=SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **params}),
        adapter=adapter,
    )


def answer(merging: Merging, adapter: str | None, request_id: str = "a", **params: Any) -> Finished:
    merging.engine.add_request(request_of(request_id, adapter, **params))
    return run_to_end(merging.engine)[request_id]


def logprobs_of(done: Finished) -> list[float]:
    assert done.prompt_logprobs is not None
    return [entry.logprob for entry in [*done.prompt_logprobs[1:], *done.logprobs] if entry is not None]


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_answer_is_that_of_pefts_merge_and_unload(
    served: Served, merging: Merging, name: str
) -> None:
    version = served.specs[name].version
    merging.wanted = version
    answer(merging, version, "load")  # from now on it is resident
    num_before = merging.num_merged_steps
    done = answer(merging, version, logprobs=0, prompt_logprobs=0)
    assert merging.num_merged_steps - num_before == 6, "a step ran unmerged"
    whole = [*PROMPT, *done.token_ids]
    fresh = make_model(served.family)
    merged = load_adapter(fresh, served.root / name).merge_and_unload()
    with torch.no_grad():
        expected = torch.log_softmax(merged(torch.tensor([whole])).logits[0], dim=-1)
    for position, found in enumerate(logprobs_of(done)):
        assert found == pytest.approx(float(expected[position, whole[position + 1]]), abs=1e-3)
    for position in range(len(PROMPT) - 1, len(whole) - 1):
        assert int(expected[position].argmax()) == whole[position + 1]


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_step_equals_the_unmerged_one_within_rounding(
    served: Served, merging: Merging, name: str
) -> None:
    version = served.specs[name].version
    unmerged = answer(merging, version, logprobs=0, prompt_logprobs=0)
    assert merging.num_merged_steps == 0
    merging.wanted = version
    merged = answer(merging, version, logprobs=0, prompt_logprobs=0)
    assert merging.num_merged_steps > 0
    assert merged.token_ids == unmerged.token_ids
    assert logprobs_of(merged) == pytest.approx(logprobs_of(unmerged), abs=1e-4)


def test_requests_of_others_beside_it_run_unmerged_and_get_their_answers(
    served: Served, merging: Merging
) -> None:
    """Steps switch between merged and unmerged as requests come and go."""
    names: list[str | None] = [None, *(spec.version for spec in served.specs.values())]
    alone = {name: answer(merging, name).token_ids for name in names}
    rng = random.Random(1)
    runs = [rng.choice(names) for _ in range(10)]
    asked = {str(index): runs[index // 4] for index in range(40)}  # some steps are of one adapter alone
    done: dict[str, list[int]] = {}
    for index, (request_id, adapter) in enumerate(asked.items()):
        merging.engine.add_request(request_of(request_id, adapter, max_tokens=rng.randrange(1, 7)))
        if index % 4 == 0:
            merging.wanted = adapter if rng.random() < 0.7 else rng.choice(names)
        for _ in range(rng.randrange(6)):
            for output in merging.engine.step():
                done.setdefault(output.request_id, []).extend(output.token_ids)
            merging.engine.take_removed_adapters()
            merging.engine.check_integrity()
    for request_id, finished in run_to_end(merging.engine).items():
        done.setdefault(request_id, []).extend(finished.token_ids)
    assert merging.num_merged_steps > 10
    assert sum(plan.merge is not None for plan in merging.plans) > 3
    assert sum(plan.drops_merged for plan in merging.plans) > 0
    for request_id, adapter in asked.items():
        assert done[request_id] == alone[adapter][: len(done[request_id])], adapter


def test_the_merged_weights_take_memory_that_adapters_have_to_leave(served: Served) -> None:
    sizes = {name: touched_bytes(spec, served.config.shape, 4) for name, spec in served.specs.items()}
    engine = build(served, host_adapter_memory_bytes=max(sizes["query"] + 60_000, 200_000))
    merging = Merging(engine, list(served.specs.values()))
    version = served.specs["query"].version
    for name in ("query", "mixed", "layers"):
        answer(merging, served.specs[name].version)
    held = engine._table.serving.room.used_bytes
    assert held + sizes["query"] > engine._table.serving.room.budget_bytes
    merging.wanted = version
    answer(merging, version)
    assert merging.merged == version
    assert engine._memory.merged_bytes == sizes["query"]
    assert any(plan.adapter_evictions for plan in merging.plans)
    assert not engine._memory.take_merged(sizes["all"]), "there is no room for all linears"
    assert engine._memory.merged_bytes == sizes["query"]
    merging.wanted = None
    answer(merging, version)
    assert engine._memory.merged_bytes == 0
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_thousand_merges_change_no_bit(served: Served, dtype: torch.dtype) -> None:
    """Logits of the base model and of each merged adapter are those of the start, bit for bit."""
    kernels: Kernels = TorchKernels() if dtype is not torch.float32 else NumbaKernels(16)
    weights = load_weights(served.root / "base", served.config, dtype)
    decoder = Decoder(served.config, weights, kernels, 64)
    reads = AdapterReads(read_slab)
    adapters = {
        name: read_weights(spec, served.config.shape, dtype, reads.keep)
        for name, spec in served.specs.items()
    }

    def logits(merged: Linears | None) -> torch.Tensor:
        caches = [KVCache.zeros(served.config.shape, 1, 16, dtype) for _ in decoder._linears]
        built = BatchBuilder(kernels, 16).build([Chunk("a", None, 0, PROMPT[:10], [0], True)], None, {"a"})
        return decoder.logits(decoder.forward(built.batch, caches, merged))

    memory = {}
    if dtype is not torch.float32:  # written into one buffer again and again, as on a GPU
        for layer, linears in enumerate(decoder._linears):
            for group, linear in linears.items():
                memory[layer, group] = torch.empty_like(linear.weight())
    place = (lambda layer, group: memory[layer, group]) if memory else None
    at_start = {name: logits(decoder.merge(each, place)) for name, each in adapters.items()}
    at_start["base"] = logits(None)
    assert len({tuple(found.flatten().tolist()) for found in at_start.values()}) == 1 + len(adapters)
    rng = random.Random(0)
    for index in range(1000 if served.family == "llama" else 100):
        name = rng.choice(list(adapters))
        merged = decoder.merge(adapters[name], place)
        if index % 20 < 2:
            assert torch.equal(logits(merged), at_start[name])
            assert torch.equal(logits(None), at_start["base"])
    for name, each in adapters.items():
        assert torch.equal(logits(decoder.merge(each, place)), at_start[name])
    assert torch.equal(logits(None), at_start["base"])


def test_weights_that_cannot_be_unpacked_are_refused_in_words(
    served: Served, merging: Merging, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = merging.engine._executor
    assert executor.why_not_merged is None
    monkeypatch.setattr(PackedFloat32Linear, "weight", lambda linear: torch.zeros(37, 53))
    del executor._decoder._kernels.why_not_merged
    assert "does not give back weights exactly" in executor.why_not_merged
    assert executor.merge_bytes(served.specs["all"]) is None
