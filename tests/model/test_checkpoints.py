"""Base models that are refused by name, and what a sharded checkpoint must hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_model, save_model

from loraplex.core.errors import ModelError
from loraplex.model.config import load_config
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.source import load_shape, resolve_model
from loraplex.model.weights import StoredTensor, load_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path):
    return load_weights(folder, load_config(folder), torch.float32)


def test_the_shape_is_read_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shape = load_shape(str(folder))
    assert (shape.hidden_size, shape.num_layers, shape.kv_size) == (64, 3, 32)


def test_shards_are_joined(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    embedding = load(tmp_path).embedding_VH
    assert torch.equal(embedding, model.get_input_embeddings().weight)


@pytest.mark.parametrize("shard", [WHOLE, Shard(index=0, count=2), Shard(index=1, count=2)])
def test_tensors_lie_in_their_files_where_it_is_said(tmp_path: Path, shard: Shard) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="60KB")
    num_stretches = 0

    def place(stored: StoredTensor) -> torch.Tensor:
        nonlocal num_stretches
        if stored.offset is None:
            return stored.values.clone()
        num_stretches += 1
        bytes_read = bytearray(os.pread(stored.file, stored.num_bytes, stored.offset))
        return torch.frombuffer(bytes_read, dtype=stored.values.dtype).view(stored.values.shape)

    config = load_config(tmp_path)
    read = load_weights(tmp_path, config, torch.float32, shard=shard, place=place)
    mapped = load_weights(tmp_path, config, torch.float32, shard=shard)
    for ours, expected in zip(read.layers, mapped.layers, strict=True):
        for group, linear in expected.linears.items():
            assert torch.equal(ours.linears[group], linear)
        assert torch.equal(ours.post_norm_H, expected.post_norm_H)
    assert torch.equal(read.embedding_VH, mapped.embedding_VH)
    assert torch.equal(read.lm_head_VH, mapped.lm_head_VH)
    assert num_stretches > 5 * config.shape.num_layers


def test_progress_ends_at_the_whole(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(folder, load_config(folder), torch.float32, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] > 0.9 * seen[-1][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; served are Llama"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not implemented"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_size": "big"}, "not a number"),
    ],
)
def test_what_is_not_implemented_is_refused_before_weights(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    (folder / "model.safetensors").write_bytes(b"never opened")
    with pytest.raises(ModelError, match=message):
        load_config(folder)


def test_an_unsupported_architecture_is_refused_before_its_other_fields(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is not supported"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_missing_size_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="vocab_size"):
        load_config(folder)


def test_the_old_rope_fields_are_understood(folder: Path) -> None:
    edit_config(
        folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0}
    )
    rope = load_config(folder).rope
    assert (rope.theta, rope.linear_factor) == (5000.0, 2.0)


def test_mistral_serves_no_further_than_its_window(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral", sliding_window=128)
    assert load_config(tmp_path).shape.max_position == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks 1 tensor of.*model\.norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra, which this architecture does not have"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"\(3,\), config.json says \(64,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "quantised"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(folder: Path, change: Any, message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        load(folder)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never opened"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="60KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        load(tmp_path)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "plainname", "a/b/c", "a/b@v1", "a b/c"])
def test_what_is_neither_folder_nor_hub_id_says_so(model: str) -> None:
    with pytest.raises(ModelError, match="no folder"):
        resolve_model(model)


def test_a_file_is_no_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_an_unsupported_hub_model_is_refused_before_its_weights_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma2ForCausalLM"]}')
    fetched: list[str] = []

    def snapshot(model: str, *, allow_patterns: list[str], **_: Any) -> str:
        fetched.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelError, match="Gemma2ForCausalLM is not supported"):
        resolve_model("google/gemma-2-2b")
    assert "*.safetensors" not in fetched


def test_a_hub_id_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE .* or give a local folder"):
        resolve_model("nobody/nothing")
