"""The shape of a decoder-only base model: all that scheduling and adapter checks need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.modules import MODULES


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of one base model; no weights, no torch."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linear_flops(self) -> int:
        """Floating point operations of all layers' linears for one token."""
        return 2 * self.num_layers * sum(self.in_features(m) * self.out_features(m) for m in MODULES)

    @property
    def attention_flops(self) -> int:
        """Floating point operations of all layers for one token to attend to one position."""
        return 4 * self.num_layers * self.q_size

    def in_features(self, module: str) -> int:
        """Return the input width of a linear, by its name in `core.modules.MODULES`."""
        if module == "o_proj":
            return self.q_size
        return self.intermediate_size if module == "down_proj" else self.hidden_size

    def out_features(self, module: str) -> int:
        """Return the output width of a linear, by its name in `core.modules.MODULES`."""
        match module:
            case "q_proj":
                return self.q_size
            case "k_proj" | "v_proj":
                return self.kv_size
            case "gate_proj" | "up_proj":
                return self.intermediate_size
            case _:
                return self.hidden_size
