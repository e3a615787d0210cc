"""Comparing a checkpoint's tensors with those its config calls for: all differences, grouped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from loraplex.adapters.peft_config import shorten
from loraplex.adapters.spec import WEIGHTS_FILE
from loraplex.adapters.targets import TENSOR_PREFIX, TargetPlan
from loraplex.adapters.tensors import SUPPORTED_DTYPES, TensorInfo
from loraplex.core.errors import AdapterError, AdapterFormatError, AdapterMismatchError
from loraplex.core.modules import PARENT_OF
from loraplex.core.shape import ModelShape
from loraplex.core.words import plural

_TENSOR_NAME = re.compile(
    re.escape(f"{TENSOR_PREFIX}model.layers.") + r"(\d{1,9})\.(\w+)\.(\w+)\.lora_([AB])\.weight", re.ASCII
)

_INPUT_NAMES: Final = {"o_proj": "attention width", "down_proj": "intermediate size"}
_OUTPUT_NAMES: Final = {
    "q_proj": "attention width",
    "k_proj": "key/value width",
    "v_proj": "key/value width",
    "gate_proj": "intermediate size",
    "up_proj": "intermediate size",
}

_SHOWN_CHARS: Final = 200

_FOREIGN_TENSORS: Final = (
    ("lora_magnitude_vector", "it belongs to DoRA, which is not served; merge the adapter into its base"),
    ("lora_embedding_", "LoRA on embeddings is not served; train on attention and MLP linears only"),
    ("lm_head", "the output head is not served from an adapter; train without it, or merge it into the base"),
    ("embed_tokens", "embeddings are not served from an adapter; save with save_embedding_layers=False"),
    (".default.", "it carries an adapter name; save the adapter again with PEFT's save_pretrained"),
    (".bias", "trained biases are not served; train with bias='none' and lora_bias=False"),
)


def check_tensors(
    tensors: Mapping[str, TensorInfo], plan: TargetPlan, shape: ModelShape
) -> list[AdapterError]:
    """Return all problems with the set of tensors, their types and shapes; empty if they are as planned."""
    problems = _Problems()
    for name, info in tensors.items():
        if info.dtype not in SUPPORTED_DTYPES:
            problems.add(
                AdapterFormatError,
                f"has dtype {info.dtype}, which is not served; save it as float32, float16 or bfloat16",
                name,
            )
    if {name: info.shape for name, info in tensors.items()} != plan.tensor_shapes:
        _diagnose(tensors, plan, shape, problems)
    return problems.errors()


class _Problems:
    """Differences grouped by kind: one error each, which names the first tensor and counts the others."""

    def __init__(self) -> None:
        self._names: dict[tuple[type[AdapterError], str, str | None], list[str]] = {}

    def add(self, kind: type[AdapterError], what: str, name: str, *, group: str | None = None) -> None:
        self._names.setdefault((kind, what, group), []).append(name)

    def errors(self) -> list[AdapterError]:
        found: list[AdapterError] = []
        for (kind, what, _), names in self._names.items():
            others = len(names) - 1
            more = f" (the same for {others} more {plural('tensor', others)})" if others else ""
            message = f"{WEIGHTS_FILE}: tensor {shorten(names[0], max_chars=_SHOWN_CHARS)} {what}{more}"
            found.append(
                AdapterFormatError(message, field=names[0]) if kind is AdapterFormatError else kind(message)
            )
        return found


def _diagnose(
    tensors: Mapping[str, TensorInfo], plan: TargetPlan, shape: ModelShape, problems: _Problems
) -> None:
    present: dict[tuple[int, str], set[str]] = {}
    for name, info in sorted(tensors.items()):
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or PARENT_OF.get(match[3]) != match[2]:
            problems.add(
                AdapterFormatError, f"is not a LoRA tensor that can be served: {_foreign(name)}", name
            )
            continue
        layer, module, side = int(match[1]), match[3], match[4]
        if layer >= shape.num_layers:
            what = f"is for layer {layer}, but this base has layers 0 to {shape.num_layers - 1} only"
            problems.add(AdapterMismatchError, what, name)
            continue
        present.setdefault((layer, module), set()).add(side)
        if name in plan.tensor_shapes:
            _diagnose_shape(name, module, side, info.shape, plan.tensor_shapes[name], problems)
        else:
            what = f"is for {module}, which target_modules does not target there; correct adapter_config.json"
            problems.add(AdapterFormatError, what, name)
    _diagnose_missing(plan, present, shape, problems)


def _diagnose_shape(
    name: str, module: str, side: str, found: list[int], expected: list[int], problems: _Problems
) -> None:
    if found == expected:
        return
    if len(found) != 2:
        problems.add(
            AdapterFormatError, f"has {len(found)} dimensions, not 2; only linear layers are served", name
        )
        return
    rank_axis = 0 if side == "A" else 1
    if found[rank_axis] != expected[rank_axis]:
        problems.add(
            AdapterFormatError,
            f"has rank {found[rank_axis]}, but r and rank_pattern say {expected[rank_axis]}; "
            "correct adapter_config.json",
            name,
        )
    width, base_width = found[1 - rank_axis], expected[1 - rank_axis]
    if width != base_width:
        size = (_INPUT_NAMES if side == "A" else _OUTPUT_NAMES).get(module, "hidden size")
        problems.add(
            AdapterMismatchError,
            f"has shape {found} where this base needs {expected}: trained for {size} {width}, "
            f"this base has {base_width}",
            name,
            group=f"{module} {side}",
        )


def _diagnose_missing(
    plan: TargetPlan, present: Mapping[tuple[int, str], set[str]], shape: ModelShape, problems: _Problems
) -> None:
    num_layers_found = 1 + max((layer for layer, _ in present), default=-1)
    missing = [each for each in plan.modules if (each.layer, each.module) not in present]
    beyond = [each for each in missing if each.layer >= num_layers_found]
    if 0 < num_layers_found < shape.num_layers and len(beyond) == len(missing):
        found = f"{num_layers_found} {plural('layer', num_layers_found)}"
        layers = f"trained for {found}, this base has {shape.num_layers}"
        for each in missing:
            problems.add(AdapterMismatchError, f"is missing: {layers}", each.a_name)
    else:
        for each in missing:
            what = "is missing, though target_modules calls for it; correct adapter_config.json or save again"
            problems.add(AdapterFormatError, what, each.a_name)
    for each in plan.modules:
        sides = present.get((each.layer, each.module))
        if sides is not None and len(sides) == 1:
            lone, absent = ("A", each.b_name) if "A" in sides else ("B", each.a_name)
            problems.add(
                AdapterFormatError, f"is missing: there is only lora_{lone}; save the adapter again", absent
            )


def _foreign(name: str) -> str:
    for part, why in _FOREIGN_TENSORS:
        if part in name:
            return why
    return (
        "names look like base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight; "
        "was it trained on another model family, or saved by another tool than PEFT?"
    )
