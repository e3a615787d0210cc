"""Tiny random models and adapters, made by transformers and PEFT themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
}
"""Name -> (class prefix in transformers, settings beyond SIZES)."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def make_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model whose logits differ widely, so that greedy choices are no ties."""
    prefix, settings = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **settings, **overrides})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms stay near one; everything else gets the spread of a trained model's activations.
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0.0, 0.12)
    return model


def save_model(folder: Path, family: str = "llama", **overrides: Any) -> PreTrainedModel:
    model = make_model(family, **overrides)
    model.save_pretrained(folder)
    return model


def save_adapter(
    folder: Path, base: PreTrainedModel, *, rank: int, targets: Any = None, seed: int = 1, **settings: Any
) -> None:
    """A random adapter of `base` saved by PEFT; the base model itself is left unchanged."""
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets or ALL_LINEARS, task_type="CAUSAL_LM", **settings
    )
    torch.manual_seed(seed)
    peft_model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.5 / rank**0.5 if "lora_A" in name else 0.05)
    # A short card: to parse the template of PEFT's own takes 40% of the time.
    peft_model.create_or_update_model_card = lambda saved: (Path(saved) / "README.md").write_text("# Tiny")
    peft_model.save_pretrained(folder)
    peft_model.unload()


def load_adapter(base: PreTrainedModel, folder: Path) -> Any:
    """The base with one adapter, as PEFT computes it. Call `.unload()` on it before the next."""
    return PeftModel.from_pretrained(base, folder).eval()
