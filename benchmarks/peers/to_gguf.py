"""Convert the benchmark's checkpoint to GGUF, so that llama.cpp serves the very same weights.

    python -m benchmarks.peers.to_gguf CHECKPOINT OUT

llama.cpp's own converter knows tokenizers by a list of hashes, and a made-up one is not on it; the model
is a plain Llama, so writing it directly takes a page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from benchmarks.make_checkpoint import SPECIAL_TOKENS

Array = npt.NDArray[np.float32]

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ROTARY_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Tensors whose rows are in another order -> the number of their heads in the model's config. Rotary pairs
are neighbours in llama.cpp and half a head apart in transformers."""
Config = dict[str, Any]


def convert(checkpoint: Path, out: Path) -> None:
    """Write OUT/base.gguf and OUT/<adapter>.gguf."""
    out.mkdir(parents=True, exist_ok=True)
    model: Config = json.loads((checkpoint / "base" / "config.json").read_text())
    _write_base(checkpoint / "base", model, out / "base.gguf")
    for adapter in sorted((checkpoint / "adapters").iterdir()):
        _write_adapter(adapter, model, out / f"{adapter.name}.gguf")


def _write_base(directory: Path, config: Config, out: Path) -> None:
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text())["model"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        target = _gguf_name(name.removesuffix(".weight"))
        writer.add_tensor(f"{target}.weight", _rotary_order(target, tensor, config))
    _finish(writer)


def _add_tokenizer(writer: gguf.GGUFWriter, bpe: dict[str, object]) -> None:
    vocab, merges = bpe["vocab"], bpe["merges"]
    assert isinstance(vocab, dict)
    assert isinstance(merges, list)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(vocab))
    writer.add_token_types([control if piece in SPECIAL_TOKENS else normal for piece in vocab])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _write_adapter(directory: Path, model: Config, out: Path) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    for name, tensor in load_file(directory / "adapter_model.safetensors").items():
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        target = _gguf_name(module.removeprefix("base_model.model."))
        if matrix == "lora_B":
            tensor = _rotary_order(target, tensor, model)
        writer.add_tensor(f"{target}.weight.{matrix.lower()}", tensor)
    _finish(writer)


def _gguf_name(module: str) -> str:
    if module in _OTHER_TENSORS:
        return _OTHER_TENSORS[module]
    _, _, layer, within = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[within]}"


def _rotary_order(target: str, tensor: Array, model: Config) -> Array:
    heads = _ROTARY_HEADS.get(target.rpartition(".")[2])
    if heads is None:
        return tensor
    num_heads = model[heads]
    rows, columns = tensor.shape
    halves = tensor.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
