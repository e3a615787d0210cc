"""Well-known model shapes, for benchmarks with random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from loraplex.core.errors import ModelError
from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape
from loraplex.model.config import ModelConfig
from loraplex.model.rope import RopeConfig
from loraplex.model.weights import LayerWeights, ModelWeights


def _llama(
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    max_position: int,
    theta: float = 10_000.0,
) -> ModelConfig:
    head_dim = hidden_size // num_heads
    return ModelConfig(
        architecture="LlamaForCausalLM",
        shape=ModelShape(
            family="llama",
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_position=max_position,
        ),
        rope=RopeConfig(theta=theta, head_dim=head_dim),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        eos_token_ids=(),
    )


def _qwen2(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        architecture="Qwen2ForCausalLM",
        shape=replace(config.shape, family="qwen2"),
        qkv_bias=True,
    )


SHAPES: Final = {
    "tiny": _llama(2, 64, 160, 4, 2, 256, 512),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128256, 8192, theta=500_000.0),
    "mistral-7b": _llama(32, 4096, 14336, 32, 8, 32000, 32768),
    "qwen2.5-7b": _qwen2(_llama(28, 3584, 18944, 28, 4, 152064, 32768, theta=1_000_000.0)),
}


def config_of_shape(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise ModelError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    return SHAPES[name]


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Return weights drawn on the device, scaled to keep activations in range."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        weight = torch.empty(size, dtype=dtype, device=device)
        return weight.normal_(std=0.02, generator=generator)

    return _make_weights(config, draw, lambda size: torch.ones(size, dtype=dtype, device=device))


def meta_weights(config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Return weights with shapes and dtypes but no memory, for a forward pass that computes nothing."""

    def draw(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    return _make_weights(config, draw, draw)


def _make_weights(
    config: ModelConfig, draw: Callable[..., torch.Tensor], norm: Callable[[int], torch.Tensor]
) -> ModelWeights:
    shape = config.shape
    layers = []
    for _ in range(shape.num_layers):
        outs = {group: sum(shape.out_features(m) for m in modules) for group, modules in GROUPS.items()}
        layers.append(
            LayerWeights(
                linears={g: draw(outs[g], shape.in_features(GROUPS[g][0])) for g in GROUPS},
                biases={"qkv": draw(outs["qkv"])} if config.qkv_bias else {},
                input_norm_H=norm(shape.hidden_size),
                post_norm_H=norm(shape.hidden_size),
                q_norm_D=norm(shape.head_dim) if config.qk_norm else None,
                k_norm_D=norm(shape.head_dim) if config.qk_norm else None,
            )
        )
    embedding = draw(shape.vocab_size, shape.hidden_size)
    lm_head = embedding if config.tie_word_embeddings else draw(shape.vocab_size, shape.hidden_size)
    return ModelWeights(
        embedding_VH=embedding,
        layers=tuple(layers),
        final_norm_H=norm(shape.hidden_size),
        lm_head_VH=lm_head,
    )
