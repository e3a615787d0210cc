"""The engine as a whole, on a tiny model: what requests get, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Finished, run_to_end, step
from safetensors.torch import load_file, save_file
from tiny import save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import CONFIG_FILE, AdapterSpec
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.core.shape import ModelShape
from loraplex.engine import cpu_build, slab_reader
from loraplex.engine.adapter_loader import resident_bytes
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config

PROMPT = [(11 * index + 5) % 256 for index in range(40)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("base")
    return folder, save_model(folder)


@pytest.fixture(scope="module")
def specs(base, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterSpec]:
    folder, model = base
    shape = load_config(folder).shape
    found = []
    for rank in (2, 8, 16, 5):
        path = tmp_path_factory.mktemp(f"adapter-{rank}")
        save_adapter(path, model, rank=rank, seed=rank)
        found.append(read_adapter(path, shape))
    return found


@pytest.fixture
def engine(base) -> Iterator[Engine]:
    core = build(base)
    yield core
    assert core.stats().num_kv_blocks_used == 0, "blocks leaked"
    assert all(adapter.in_flight == 0 for adapter in core.stats().adapters), "pins leaked"
    core.close()


def build(base, **options: Any) -> Engine:
    return build_core(EngineOptions(model=str(base[0]), **{"kv_memory_bytes": 1 << 20, **options}))


def add(
    engine: Engine, request_id: str, prompt: list[int] = PROMPT, adapter: str | None = None, **params: Any
):
    engine.add_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params}),
            adapter=adapter,
            eos_token_ids=(2,),
        )
    )


def alone(engine: Engine, **request: Any) -> Finished:
    add(engine, "alone", **request)
    return run_to_end(engine)["alone"]


def test_logprobs_of_prompt_and_output_equal_transformers(engine: Engine, base) -> None:
    done = alone(engine, logprobs=2, prompt_logprobs=1)
    whole = [*PROMPT, *done.token_ids]
    with torch.no_grad():
        expected = torch.log_softmax(base[1](torch.tensor([whole])).logits[0], dim=-1)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    scored = [*done.prompt_logprobs[1:], *done.logprobs]
    assert [entry.token_id for entry in scored] == whole[1:]
    for position, entry in enumerate(scored):
        assert entry.logprob == pytest.approx(float(expected[position, whole[position + 1]]), abs=1e-3)
        assert entry.top[0][0] == int(expected[position].argmax())


def test_prompt_logprobs_are_whole_when_the_prompt_is_chunked(base, engine: Engine) -> None:
    chunked = build(base, max_step_tokens=7)
    whole, cut = (alone(core, prompt_logprobs=0).prompt_logprobs for core in (engine, chunked))
    chunked.close()
    assert whole is not None
    assert cut is not None
    assert [e and e.token_id for e in whole] == [e and e.token_id for e in cut]
    assert [e.logprob for e in whole[1:] if e] == pytest.approx([e.logprob for e in cut[1:] if e], abs=1e-4)


def test_a_seeded_text_is_the_same_in_any_company(engine: Engine, specs: list[AdapterSpec]) -> None:
    engine.add_adapter(specs[0])
    request = {"adapter": specs[0].version, "seed": 42, "temperature": 1.3, "top_p": 0.95, "max_tokens": 30}
    expected = alone(engine, **request)
    for index in range(6):
        add(engine, f"other{index}", PROMPT[index:], temperature=1.0)
    add(engine, "same", **request)
    assert run_to_end(engine)["same"].token_ids == expected.token_ids


def test_a_repeated_prompt_is_served_from_the_prefix_cache_with_the_same_text(engine: Engine) -> None:
    first, second = alone(engine), alone(engine)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 32
    assert second.token_ids == first.token_ids


def test_requests_that_begin_together_compute_their_prompt_each(engine: Engine) -> None:
    for index in range(3):
        add(engine, f"sibling{index}")
    texts = run_to_end(engine)
    assert [texts[f"sibling{index}"].num_cached_tokens for index in range(3)] == [0, 0, 0]


def test_the_prefix_cache_is_kept_apart_by_adapter(engine: Engine, specs: list[AdapterSpec]) -> None:
    for spec in specs[:2]:
        engine.add_adapter(spec)
    texts = [alone(engine, adapter=spec.version) for spec in specs[:2]]
    assert [text.num_cached_tokens for text in texts] == [0, 0]
    assert texts[0].token_ids != texts[1].token_ids
    assert alone(engine, adapter=specs[0].version).num_cached_tokens == 32


def test_memory_pressure_preempts_and_changes_no_text(base, engine: Engine) -> None:
    prompts = [PROMPT[index : index + 20] for index in range(6)]
    expected = [alone(engine, prompt=prompt, max_tokens=40).token_ids for prompt in prompts]
    tight = build(base, kv_memory_bytes=120 * 768)  # 120 tokens for six times 60
    for index, prompt in enumerate(prompts):
        add(tight, str(index), prompt, max_tokens=40)
    done = run_to_end(tight)
    assert tight.stats().num_preemptions > 0
    tight.close()
    assert [done[str(index)].token_ids for index in range(6)] == expected


def test_cancelling_frees_everything_at_once(engine: Engine, specs: list[AdapterSpec]) -> None:
    engine.add_adapter(specs[0])
    add(engine, "a", adapter=specs[0].version, max_tokens=400)
    done: dict[str, Finished] = {}
    while not done:
        step(engine, done)
    assert engine.stats().num_kv_blocks_used > 0
    engine.cancel("a")
    engine.check_integrity()
    assert engine.stats().num_kv_blocks_used == 0
    assert not engine.has_work()


def test_adapters_beyond_the_budget_come_and_go(base, specs: list[AdapterSpec], engine: Engine) -> None:
    for spec in specs:
        engine.add_adapter(spec)
    expected = {spec.version: alone(engine, adapter=spec.version).token_ids for spec in specs}
    largest = max(adapter.num_bytes for adapter in engine.stats().adapters)
    tight = build(base, host_adapter_memory_bytes=largest)
    for spec in specs:
        tight.add_adapter(spec)
    for round_index in range(3):
        for spec in specs:
            add(tight, f"{spec.version}/{round_index}", adapter=spec.version)
    done = run_to_end(tight)
    assert tight.stats().host_adapter_bytes <= largest
    assert sum(adapter.loads for adapter in tight.stats().adapters) > len(specs)
    tight.close()
    for request_id, finished in done.items():
        assert finished.token_ids == expected[request_id.split("/")[0]]


def test_adapters_share_what_the_weights_have_left(base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what there was before they were read: a large model would leave less than it seems."""
    available = [8 << 30]
    load_weights = cpu_build.load_weights

    def load(*args: Any) -> Any:
        available[0] = 2 << 30
        return load_weights(*args)

    monkeypatch.setattr(cpu_build, "available_bytes", lambda: available[0])
    monkeypatch.setattr(cpu_build, "load_weights", load)
    core = build(base)
    assert core.stats().host_adapter_budget_bytes == 1 << 29
    core.close()


def test_an_adapter_larger_than_the_host_budget_is_refused_by_size(base, specs: list[AdapterSpec]) -> None:
    core = build(base, host_adapter_memory_bytes=1000)
    with pytest.raises(CapacityError, match="--host-adapter-memory"):
        core.add_adapter(specs[0])
    core.close()


def test_removing_an_adapter_in_use_drains_first(engine: Engine, specs: list[AdapterSpec]) -> None:
    engine.add_adapter(specs[1])
    add(engine, "a", adapter=specs[1].version, max_tokens=20)
    done: dict[str, Finished] = {}
    while not done:
        step(engine, done)
    engine.remove_adapter(specs[1].version)
    assert not engine.take_removed_adapters()
    removed: list[str] = []
    while engine.has_work():
        for output in engine.step():
            done[output.request_id].token_ids += output.token_ids
        removed += engine.take_removed_adapters()
    assert len(done["a"].token_ids) == 20
    assert removed == [specs[1].version]
    assert engine.stats().host_adapter_bytes == 0


def test_weights_that_vanished_fail_their_requests_alone(
    engine: Engine, base, specs: list[AdapterSpec], tmp_path: Path
) -> None:
    save_adapter(tmp_path / "gone", base[1], rank=4, seed=9)
    spec = read_adapter(tmp_path / "gone", load_config(base[0]).shape)
    engine.add_adapter(spec)
    spec.weights_path.unlink()
    add(engine, "lost", adapter=spec.version)
    add(engine, "fine")
    done = run_to_end(engine)
    assert done["lost"].finish_reason is FinishReason.ERROR
    assert done["lost"].error_param == "model"
    assert "restore them or load it again" in str(done["lost"].error)
    assert str(tmp_path) not in str(done["lost"].error)
    assert done["fine"].finish_reason is FinishReason.LENGTH


def test_a_version_in_two_folders_is_loaded_from_the_one_that_is_left(
    engine: Engine, base, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "first", base[1], rank=4, seed=9)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    shape = load_config(base[0]).shape
    specs = [read_adapter(tmp_path / name, shape) for name in ("first", "second")]
    assert specs[0].version == specs[1].version
    for spec in specs:
        engine.add_adapter(spec)
    shutil.rmtree(tmp_path / "first")
    assert alone(engine, adapter=specs[0].version).finish_reason is not FinishReason.ERROR


def test_weights_that_changed_after_registration_are_not_served(engine: Engine, base, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", base[1], rank=4, seed=9)
    spec = read_adapter(tmp_path / "a", load_config(base[0]).shape)
    engine.add_adapter(spec)
    save_adapter(tmp_path / "a", base[1], rank=4, seed=10)
    done = alone(engine, adapter=spec.version)
    assert done.finish_reason is FinishReason.ERROR
    assert "changed on disk" in str(done.error)


def test_a_config_that_changed_after_registration_is_not_served_by_the_old_one(
    engine: Engine, base, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a", base[1], rank=4, seed=9)
    spec = read_adapter(tmp_path / "a", load_config(base[0]).shape)
    engine.add_adapter(spec)
    path = spec.path / CONFIG_FILE
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    done = alone(engine, adapter=spec.version)
    assert done.finish_reason is FinishReason.ERROR
    assert "changed on disk" in str(done.error)


@pytest.mark.parametrize("num_shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_files_with_the_same_content_are_the_same_version(base, tmp_path: Path, num_shards: int) -> None:
    """Those that were put back after they were gone, and those that were only touched."""
    save_adapter(tmp_path / "a", base[1], rank=4, seed=9)
    spec = read_adapter(tmp_path / "a", load_config(base[0]).shape)
    engine = build(base, tensor_parallel=num_shards)
    engine.add_adapter(spec)
    shutil.copytree(spec.path, tmp_path / "kept")
    shutil.rmtree(spec.path)
    assert "restore them" in str(alone(engine, adapter=spec.version).error)
    shutil.copytree(tmp_path / "kept", spec.path)
    for file in spec.path.iterdir():
        os.utime(file, ns=(1, 1))
    done = alone(engine, adapter=spec.version)
    assert done.error is None
    assert len(done.token_ids) > 0
    engine.close()


def test_a_file_that_changes_while_it_is_read_again_is_not_served(
    engine: Engine, base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was hashed is not the one that is open."""
    save_adapter(tmp_path / "a", base[1], rank=4, seed=9)
    spec = read_adapter(tmp_path / "a", load_config(base[0]).shape)
    engine.add_adapter(spec)
    content = spec.weights_path.read_bytes()
    save_adapter(tmp_path / "a", base[1], rank=4, seed=10)

    def put_back_and_hash(path: Path, shape: ModelShape) -> AdapterSpec:
        (tmp_path / "good").write_bytes(content)
        (tmp_path / "good").rename(spec.weights_path)
        return read_adapter(path, shape)

    monkeypatch.setattr(slab_reader, "read_adapter", put_back_and_hash)
    assert "changed on disk" in str(alone(engine, adapter=spec.version).error)


def test_a_cpu_without_memory_for_all_adapters_says_which_memory_is_meant(
    base, specs: list[AdapterSpec]
) -> None:
    needed = resident_bytes(specs[2], load_config(base[0]).shape, torch.float32)
    engine = build(base, cold_start=ColdStart.CACHED, host_adapter_memory_bytes=needed)
    engine.add_adapter(specs[2])
    with pytest.raises(CapacityError, match="raise --host-adapter-memory, or choose another way"):
        engine.add_adapter(specs[0])
    engine.close()


def test_logits_that_overflow_fail_that_request_alone(engine: Engine, base, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", base[1], rank=4, seed=9)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: tensor * 1e20 for name, tensor in load_file(weights).items()}, weights)
    spec = read_adapter(tmp_path / "a", load_config(base[0]).shape)
    engine.add_adapter(spec)
    add(engine, "bad", adapter=spec.version)
    add(engine, "good")
    done = run_to_end(engine)
    assert done["bad"].finish_reason is FinishReason.ERROR
    assert "not finite" in str(done["bad"].error)
    assert "the adapter's weights overflow in float32" in str(done["bad"].error)
    assert "--dtype" not in str(done["bad"].error)  # it is float32 already
    assert done["bad"].error_param == "model"
    assert done["good"].finish_reason is FinishReason.LENGTH


def test_overflow_in_half_precision_advises_float32_and_names_the_culprit(base, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", base[1], rank=4, seed=9)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: tensor * 1e4 for name, tensor in load_file(weights).items()}, weights)
    spec = read_adapter(tmp_path / "a", load_config(base[0]).shape)
    half = build(base, dtype="float16")
    half.add_adapter(spec)
    failed = alone(half, adapter=spec.version)
    half.close()
    assert "the adapter's weights overflow in float16; serve with --dtype float32" in str(failed.error)
    assert failed.error_param == "model"


def test_overflow_of_the_base_model_is_not_blamed_on_an_adapter(base, tmp_path: Path) -> None:
    shutil.copytree(base[0], tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, weights, metadata={"format": "pt"})
    broken = build((tmp_path / "base", None))
    failed = alone(broken)
    broken.close()
    assert "the base model's weights overflow in float32; check the model's files" in str(failed.error)
    assert failed.error_param is None


def test_a_request_says_whether_its_adapter_was_in_memory(engine: Engine, specs: list[AdapterSpec]) -> None:
    engine.add_adapter(specs[0])
    found = [alone(engine, adapter=adapter).adapter_hit for adapter in (None, specs[0].version) * 2]
    assert found == [None, False, None, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "cuda"}, ModelError, "--device cpu"),
        ({"device": "tpu"}, ModelError, "unknown device"),
        ({"dtype": "int8"}, ModelError, "float32"),
        ({"max_model_len": 4096}, ModelError, "own context of 512"),
        ({"max_model_len": 512, "kv_memory_bytes": 100_000}, CapacityError, "--kv-memory"),
        ({"kv_memory_bytes": 100}, CapacityError, "--kv-memory"),
        ({"kv_memory_bytes": 1 << 60}, CapacityError, "this machine has"),
    ],
)
def test_options_that_cannot_work_say_what_to_change(
    base, options: dict[str, Any], error, message: str
) -> None:
    with pytest.raises(error, match=message):
        build(base, **options)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_precision_serves_adapters(
    base, engine: Engine, specs: list[AdapterSpec], dtype: str, bound: float
) -> None:
    half = build(base, dtype=dtype)
    scored = []
    for core in (engine, half):
        core.add_adapter(specs[2])
        done = alone(core, adapter=specs[2].version, prompt_logprobs=0, ignore_eos=True)
        assert len(done.token_ids) == 12
        assert done.prompt_logprobs is not None
        scored.append([entry.logprob for entry in done.prompt_logprobs[1:] if entry])
    half.close()
    assert scored[1] == pytest.approx(scored[0], abs=bound)


def test_a_version_registered_twice_is_one_version(engine: Engine, specs: list[AdapterSpec]) -> None:
    engine.add_adapter(specs[0])
    engine.add_adapter(replace(specs[0]))
    assert len(engine.stats().adapters) == 1
