"""The forward pass of every supported family, in terms of a device's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch

from loraplex.core.shape import ModelShape
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.interface import Kernels, PackedLinear
from loraplex.kernels.lora import LoraWeights
from loraplex.model.collective import SOLO, Collective
from loraplex.model.config import ModelConfig
from loraplex.model.rope import rope_table
from loraplex.model.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """Paged keys and values of one layer, (num_blocks, num_kv_heads, block_size, head_dim) each."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def zeros(cls, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        return cls(k=torch.zeros(size, dtype=dtype), v=torch.zeros(size, dtype=dtype))


Linears = tuple[Mapping[str, PackedLinear], ...]
"""The linears of every layer by group."""
WeightMemory = Callable[[int, str], torch.Tensor]
"""Returns the memory (out, in) for the weight of a group of linears in a layer."""


class Decoder:
    """A decoder-only transformer over a paged KV cache that adds each row's adapter to every linear.

    `config` and `weights` may be one shard of a model (`model.sharding`); `collective` connects the shards.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        max_model_len: int,
        collective: Collective = SOLO,
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._collective = collective
        self._embedding_VH = weights.embedding_VH
        self._final_norm_H = weights.final_norm_H
        self._lm_head = kernels.pack_linear(weights.lm_head_VH, None)
        self._cos_sin_PD = rope_table(config.rope, max_model_len).to(weights.embedding_VH.device)
        self._layers = weights.layers
        linears: list[Mapping[str, PackedLinear]] = []
        for layer in weights.layers:
            linears.append(
                {
                    group: kernels.pack_linear(weight, layer.biases.get(group))
                    for group, weight in layer.linears.items()
                }
            )
            layer.linears.clear()  # keep one copy in memory: the packed form
        self._linears: Linears = tuple(linears)

    @torch.inference_mode()
    def forward(
        self, batch: KernelBatch, caches: list[KVCache], merged: Linears | None = None
    ) -> torch.Tensor:
        """Return the final states (L, hidden) of the batch's logit rows; writes keys and values to the
        caches. `merged`: linears to use instead of the base model's."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        residual_TH = self._embedding_VH[batch.token_ids_T]
        x_TH = kernels.rms_norm(residual_TH, self._layers[0].input_norm_H, eps)
        linears = self._linears if merged is None else merged
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            x_TH = self._attend(index, linears[index], x_TH, batch, cache)
            x_TH = kernels.add_rms_norm(x_TH, residual_TH, layer.post_norm_H, eps)
            x_TH = self._feed_forward(index, linears[index], x_TH, batch)
            last = index + 1 == len(self._layers)
            next_norm_H = self._final_norm_H if last else self._layers[index + 1].input_norm_H
            x_TH = kernels.add_rms_norm(x_TH, residual_TH, next_norm_H, eps)
        return x_TH[batch.logit_rows_L]

    @torch.inference_mode()
    def logits(self, states_LH: torch.Tensor) -> torch.Tensor:
        """Return logits of (L, vocab)."""
        return self._collective.gather_columns(self._lm_head(states_LH), self.config.shape.vocab_size)

    @property
    def why_not_merged(self) -> str | None:
        """The reason why `merge` is not possible, in words for users; None if it is."""
        return self._kernels.why_not_merged

    @torch.inference_mode()
    def merge(self, weights: LoraWeights, memory: WeightMemory | None = None) -> Linears:
        """Return the model's linears with an adapter merged in: W + scale * B A, rounded once. Linears that
        it does not touch are the base model's own, which never change. `memory`: where the weights are
        written; None to allocate it."""
        return tuple(
            {
                **linears,
                **{
                    group: self._kernels.merge_linear(
                        linears[group], layer, group, weights, memory and memory(layer, group)
                    )
                    for group in weights.touched_in(layer)
                },
            }
            for layer, linears in enumerate(self._linears)
        )

    def linears_over(self, groups: Set[str], memory: WeightMemory) -> Linears:
        """Return the model's linears, those of `groups` with weights in this memory, whatever it holds."""
        return tuple(
            {**linears, **{group: linears[group].with_weight(memory(layer, group)) for group in groups}}
            for layer, linears in enumerate(self._linears)
        )

    def _attend(
        self,
        index: int,
        linears: Mapping[str, PackedLinear],
        x_TH: torch.Tensor,
        batch: KernelBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        qkv_TO = self._kernels.linear(linears["qkv"], x_TH, batch, index, "qkv")
        if self.config.qk_norm:
            self._normalise_heads(qkv_TO, self._layers[index])
        self._kernels.rope_and_cache(qkv_TO, self._cos_sin_PD, batch, cache.k, cache.v)
        attended_TO = self._kernels.attention(qkv_TO, batch, cache.k, cache.v)
        x_TH = self._kernels.linear(linears["o"], attended_TO, batch, index, "o")
        self._collective.all_reduce(x_TH)
        return x_TH

    def _feed_forward(
        self, index: int, linears: Mapping[str, PackedLinear], x_TH: torch.Tensor, batch: KernelBatch
    ) -> torch.Tensor:
        kernels = self._kernels
        gate_up_T2F = kernels.linear(linears["gate_up"], x_TH, batch, index, "gate_up")
        x_TH = kernels.linear(linears["down"], kernels.silu_mul(gate_up_T2F), batch, index, "down")
        self._collective.all_reduce(x_TH)
        return x_TH

    def _normalise_heads(self, qkv_TO: torch.Tensor, weights: LayerWeights) -> None:
        """Normalise every query and key head before the rotary embedding, in place (Qwen3)."""
        assert weights.q_norm_D is not None
        assert weights.k_norm_D is not None
        shape, eps = self.config.shape, self.config.rms_norm_eps
        heads_TND = qkv_TO.view(qkv_TO.shape[0], -1, shape.head_dim)
        q_end, k_end = shape.num_heads, shape.num_heads + shape.num_kv_heads
        heads_TND[:, :q_end] = self._kernels.rms_norm(heads_TND[:, :q_end], weights.q_norm_D, eps)
        heads_TND[:, q_end:k_end] = self._kernels.rms_norm(heads_TND[:, q_end:k_end], weights.k_norm_D, eps)
