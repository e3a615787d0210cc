"""Write a random checkpoint of a well-known shape and PEFT adapters for it, for servers on a GPU.

    python -m benchmarks.http_checkpoint OUT --shape llama-2-7b --adapters 100 --rank 64

Layout: OUT/base (model and tokenizer), OUT/adapters/lora-0000, lora-0001, ... Weights are drawn on the GPU
if there is one. 100 adapters of rank 64 and a 7B model take 24 GB, best in memory (/dev/shm).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.make_checkpoint import Checkpoint
from loraplex.core.modules import MODULES, module_path
from loraplex.model.config import ModelConfig
from loraplex.model.shapes import config_of_shape

TARGETS: Final = ("q_proj", "k_proj", "v_proj")
MAX_POSITIONS: Final = 8192
"""The context of every checkpoint, whatever that of its shape: prompts of 8,000 tokens fit."""
_SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>")
_CHAT_TEMPLATE: Final = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
_WEIGHT_STD: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class HttpCheckpoint(Checkpoint):
    """A checkpoint of a well-known shape; `rank` is that of every adapter."""

    shape: str
    rank: int
    max_positions: int = MAX_POSITIONS

    def ensure(self) -> None:
        """Write the files, unless an earlier call with the same settings did."""
        done = self.root / "complete.json"
        settings = {name: value for name, value in asdict(self).items() if name != "root"}
        if done.is_file() and json.loads(done.read_text()) == settings:
            return
        started_s = time.perf_counter()
        weights = _RandomWeights(seed=0)
        known = config_of_shape(self.shape)
        config = replace(known, shape=replace(known.shape, max_position=self.max_positions))
        _write_base(self.base, config, weights)
        for name in self.adapter_names:
            _write_adapter(self.adapters / name, config, weights, rank=self.rank)
        done.write_text(json.dumps(settings))
        took_s = time.perf_counter() - started_s
        print(f"checkpoint with {self.num_adapters} adapters written in {took_s:.0f} s", flush=True)


class _RandomWeights:
    def __init__(self, *, seed: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def draw(self, *size: int) -> torch.Tensor:
        weight = torch.empty(size, dtype=torch.bfloat16, device=self._device)
        return weight.normal_(std=_WEIGHT_STD, generator=self._generator).cpu()


def _write_base(folder: Path, config: ModelConfig, weights: _RandomWeights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_model_config(config)))
    shape = config.shape
    ones = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": weights.draw(shape.vocab_size, shape.hidden_size),
        "lm_head.weight": weights.draw(shape.vocab_size, shape.hidden_size),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(shape.num_layers):
        for module in MODULES:
            size = (shape.out_features(module), shape.in_features(module))
            tensors[f"{module_path(layer, module)}.weight"] = weights.draw(*size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ones.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, shape.vocab_size)


def _model_config(config: ModelConfig) -> dict[str, Any]:
    shape = config.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one word per id, so that any ids become a text of as many tokens, and back."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL_TOKENS, *(f"w{index}" for index in range(len(_SPECIAL_TOKENS), vocab_size))]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=_SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unk, bos, eos = _SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _write_adapter(folder: Path, config: ModelConfig, weights: _RandomWeights, *, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = config.shape
    tensors = {}
    for layer in range(shape.num_layers):
        for module in TARGETS:
            prefix = f"base_model.model.{module_path(layer, module)}"
            tensors[f"{prefix}.lora_A.weight"] = weights.draw(rank, shape.in_features(module))
            tensors[f"{prefix}.lora_B.weight"] = weights.draw(shape.out_features(module), rank)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(peft_config))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rank", type=int, default=64)
    args = parser.parse_args()
    HttpCheckpoint(root=args.out, shape=args.shape, num_adapters=args.adapters, rank=args.rank).ensure()


if __name__ == "__main__":
    main()
