"""The linear modules an adapter may change, and which of them share an input.

Linears of one group read the same activations, so their base weights are stacked into one GEMM and
their LoRA shrinks run as one launch. Every table in the project is indexed in the order given here.
"""

from __future__ import annotations

from typing import Final

from loraplex.core.errors import ModelError

MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODULE_INDEX: Final = {name: index for index, name in enumerate(MODULES)}

GROUPS: Final = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Group name -> its modules, in the order their outputs are stacked."""

PARENT_OF: Final = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}

MAX_RANK: Final = 512
"""The largest rank of one module that the kernels of a GPU take."""


def module_path(layer: int, module: str) -> str:
    """Return the Hugging Face name of a linear: `model.layers.3.self_attn.q_proj`."""
    return f"model.layers.{layer}.{PARENT_OF[module]}.{module}"


def module_names(text: str) -> tuple[str, ...]:
    """Parse `q,k,v`, `all`, or full names into module names in the order of MODULES. Raises ModelError."""
    if text == "all":
        return MODULES
    names = [name.strip() for name in text.split(",") if name.strip()]
    full = tuple(name if name.endswith("_proj") else f"{name}_proj" for name in names)
    unknown = [name for name, meant in zip(names, full, strict=True) if meant not in MODULES]
    if unknown or not full:
        raise ModelError(
            f"unknown module {', '.join(unknown) or text!r}; known are {', '.join(MODULES)}, all"
        )
    return tuple(module for module in MODULES if module in full)
