"""Reads a checkpoint's config.json and refuses, by name, what is not implemented. Weights are not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import ModelError
from loraplex.core.shape import ModelShape
from loraplex.model.rope import RopeConfig, read_rope

FAMILIES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures, by the name in config.json, and their family."""

# Fields that change the computation and that no supported family may set to anything else.
_MUST_BE: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": (None, "silu"),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
    "pretraining_tp": (None, 0, 1),
    "mlp_bias": (None, False),
    "is_encoder_decoder": (None, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything the forward pass needs to know about a checkpoint besides its weights."""

    architecture: str
    shape: ModelShape
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None = None
    """Dtype of the stored weights according to config.json."""
    cut_context: int | None = None
    """The model's number of positions, if the context ends earlier at a sliding window (not implemented)."""


def load_config(folder: Path) -> ModelConfig:
    """Return the configuration of a checkpoint folder; ModelError says what is wrong and what would work."""
    raw = _read_json(folder / "config.json")
    architecture = _architecture(raw, folder)
    family = FAMILIES[architecture]
    for field, allowed in _MUST_BE.items():
        if raw.get(field) not in allowed:
            raise ModelError(
                f"{folder}: config.json sets {field} = {raw[field]!r}, which is not implemented "
                f"(served: {', '.join(str(value) for value in allowed if value is not None)})"
            )
    shape = _shape(raw, family, folder)
    num_positions = _num_positions(raw)
    # Qwen2 always has biases on q, k and v; in the others `attention_bias` means biases on q, k, v and o.
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        shape=shape,
        rope=read_rope(raw, head_dim=shape.head_dim, source=folder),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        qk_norm=family == "qwen3",
        eos_token_ids=_eos_token_ids(raw, folder),
        checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        cut_context=num_positions if shape.max_position < num_positions else None,
    )


def _architecture(raw: Mapping[str, Any], folder: Path) -> str:
    names = raw.get("architectures") or []
    served = ", ".join(FAMILIES)
    if not names:
        raise ModelError(f"{folder}: config.json names no architecture; served are {served}")
    if names[0] not in FAMILIES:
        raise ModelError(f"{folder}: architecture {names[0]} is not supported; served are {served}")
    return str(names[0])


def _shape(raw: Mapping[str, Any], family: str, folder: Path) -> ModelShape:
    try:
        num_heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        shape = ModelShape(
            family=family,
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
            vocab_size=int(raw["vocab_size"]),
            max_position=_context_length(raw, family),
        )
    except KeyError as missing:
        raise ModelError(f"{folder}: config.json lacks {missing}") from missing
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder}: config.json holds a size that is not a number: {error}") from error
    if shape.num_heads % shape.num_kv_heads != 0:
        raise ModelError(
            f"{folder}: {shape.num_heads} attention heads do not divide over {shape.num_kv_heads} KV heads"
        )
    if shape.head_dim % 2 != 0:
        raise ModelError(f"{folder}: head size {shape.head_dim} is odd; rotary embedding needs pairs")
    return shape


def _context_length(raw: Mapping[str, Any], family: str) -> int:
    """Return the context length. It ends at Mistral's sliding window, below which the window has no
    effect."""
    num_positions = _num_positions(raw)
    window = raw.get("sliding_window") if family == "mistral" else None
    return min(num_positions, int(window)) if window else num_positions


def _num_positions(raw: Mapping[str, Any]) -> int:
    return int(raw.get("max_position_embeddings", 2048))


def _eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Return the end tokens, those of generation_config.json if it has any (chat models list more there)."""
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} holds no {path.name}; give a Hugging Face checkpoint folder or id"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
