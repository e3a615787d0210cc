"""Reads Llama weights and hyper-parameters from a GGUF file, under Hugging Face names.

GGUF is the file format of llama.cpp. It differs from a Hugging Face checkpoint in three ways that
matter here: the tensors are quantised, they have other names, and the rows of q and k are permuted,
because llama.cpp rotates neighbouring pairs of a head where Hugging Face rotates its two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

    Array = np.ndarray[Any, Any]

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def metadata_value(reader: GGUFReader, key: str) -> Any:
    """Return the value of a metadata key; KeyError names the key if the file lacks it."""
    field = reader.fields.get(key)
    if field is None:
        raise KeyError(key)
    return field.contents()


def huggingface_name(gguf_name: str) -> str:
    """Return the Hugging Face name: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        _, layer, module, kind = parts
        return f"model.layers.{layer}.{_BLOCK_NAMES[module]}.{kind}"
    raise KeyError(gguf_name)


def undo_rope_permutation(weight: Array, num_heads: int) -> Array:
    """Reorder rows from llama.cpp's order (pairs side by side) to Hugging Face's (two halves of a head)."""
    out_features, *rest = weight.shape
    half_dim = out_features // num_heads // 2
    paired = weight.reshape(num_heads, half_dim, 2, *rest)
    return paired.swapaxes(1, 2).reshape(weight.shape)


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the `config.json` of a LlamaForCausalLM. Every number comes from the file's metadata."""
    architecture = metadata_value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model, not a llama model")
    hidden_size = int(metadata_value(reader, "llama.embedding_length"))
    num_heads = int(metadata_value(reader, "llama.attention.head_count"))
    # GGUF stores float32: 1e-05 reads as 9.999999747378752e-06.
    rms_norm_eps = float(f"{metadata_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(metadata_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(metadata_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(metadata_value(reader, "tokenizer.ggml.padding_token_id")),
        "head_dim": int(metadata_value(reader, "llama.rope.dimension_count")),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": int(metadata_value(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(metadata_value(reader, "llama.context_length")),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(metadata_value(reader, "llama.block_count")),
        "num_key_value_heads": int(metadata_value(reader, "llama.attention.head_count_kv")),
        "rms_norm_eps": rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": float(metadata_value(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": int(metadata_value(reader, "llama.vocab_size")),
    }


def llama_weights(
    reader: GGUFReader, config: dict[str, Any], on_tensor: Callable[[str], None]
) -> dict[str, Array]:
    """Return every tensor of the file in float16. `on_tensor` is called with each name when it is done."""
    import numpy as np
    from gguf import dequantize

    heads_of = {
        "attn_q": int(config["num_attention_heads"]),
        "attn_k": int(config["num_key_value_heads"]),
    }
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for module, num_heads in heads_of.items():
            if f".{module}." in tensor.name:
                values = undo_rope_permutation(values, num_heads)
        weights[huggingface_name(tensor.name)] = np.ascontiguousarray(values, dtype=np.float16)
        on_tensor(tensor.name)
    return weights
