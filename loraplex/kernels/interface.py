"""The operations that a model needs of a device: its matrix products and everything between them.

`kernels.reference.TorchKernels` implements all of them in plain torch for any device and dtype; every other
implementation is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.lora import LoraSegment, LoraWeights


class PackedLinear(Protocol):
    """A weight in the layout that the device multiplies best."""

    out_features: int

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, a new contiguous tensor."""
        ...

    def weight(self) -> torch.Tensor:
        """Return the weight (out, in) as it was before it was packed, bit for bit. It must not be written."""
        ...

    def with_weight(self, weight_OI: torch.Tensor) -> PackedLinear:
        """Return a linear with the same bias and another weight, which stays where it is unless the layout is
        another one."""
        ...


class Kernels(Protocol):
    """Operations on one step's activations. Arguments named `*_out` and residuals change in place.

    `decodes_first`: sequences with one token must come before the others in a batch. An adapter with both is
    then two segments, which pays off where different kernels compute them anyway.
    """

    decodes_first: bool

    def pack_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedLinear: ...

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add x to residual in place; return the norm of the sum."""
        ...

    def rope_and_cache(
        self,
        qkv_TO: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: KernelBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        """Rotate q and k inside qkv, in place, and write k and v to the rows' slots.

        Caches are (num_blocks, num_kv_heads, block_size, head_dim); cos_sin row p holds the cosines of
        position p for half a head, then the sines.
        """
        ...

    def attention(
        self, qkv_TO: torch.Tensor, batch: KernelBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """Return the causal attention of every row over its sequence's cache; (T, num_heads * head_dim)."""
        ...

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of a stacked (gate, up)."""
        ...

    def linear(
        self, linear: PackedLinear, x_TI: torch.Tensor, batch: KernelBatch, layer: int, group: str
    ) -> torch.Tensor:
        """Return a group of linears' output: the base model's product plus every row's LoRA product."""
        ...

    def prepare_lora(self, segments: Sequence[LoraSegment]) -> Any:
        """Return what `linear` needs to know of a step's segments, made once for all layers
        (`KernelBatch.lora`)."""
        ...

    @property
    def why_not_merged(self) -> str | None:
        """The reason why `merge_linear` is not possible, in words for users; None if it is."""
        ...

    def merge_linear(
        self,
        linear: PackedLinear,
        layer: int,
        group: str,
        weights: LoraWeights,
        into_OI: torch.Tensor | None = None,
    ) -> PackedLinear:
        """Return a group of linears whose weight is W + scale * B A, summed in float32 and rounded once to
        W's dtype. The linear itself stays as it is. `into_OI`: memory for the weight; None to allocate it."""
        ...
