"""Every field of PEFT's LoraConfig, sorted by what serving does with it.

A field is in exactly one of the three tables, and a test compares them with the installed PEFT, so a new
PEFT release cannot add a field that is quietly ignored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HONOURED: Final = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
    }
)
"""Fields whose value decides the result; peft_config reads each of them."""

NO_EFFECT: Final[Mapping[str, str]] = {
    "task_type": "the LoRA update is the same for every task",
    "auto_mapping": "only tells PEFT which Python class to load",
    "peft_version": "only says what wrote the checkpoint",
    "base_model_name_or_path": "a name; the tensors' shapes are what is checked against the base",
    "revision": "only names a version of the base model",
    "inference_mode": "serving is always inference",
    "lora_dropout": "dropout is off at inference",
    "fan_in_fan_out": "PEFT applies it to Conv1D only; the modules served here are nn.Linear",
    "runtime_config": "PEFT ignores it when it reads a checkpoint",
    "megatron_core": "used only together with megatron_config",
    "qalora_group_size": "used only together with use_qalora",
    "ensure_weight_tying": "concerns tied embeddings only, and adapters on embeddings are refused",
    # The next four only choose the starting point of training; init_lora_weights says whether they were used.
    "loftq_config": "used at initialisation only; see init_lora_weights",
    "eva_config": "used at initialisation only; see init_lora_weights",
    "corda_config": "used at initialisation only; see init_lora_weights",
    "lora_ga_config": "used at initialisation only; see init_lora_weights",
}
"""Fields that cannot change what an adapter computes at inference, and why."""

REFUSED_UNLESS_OFF: Final[Mapping[str, str]] = {
    "use_dora": "DoRA rescales the base weights; merge it into the base with merge_and_unload(), "
    "or train without use_dora",
    "bias": 'trained biases are not served; train with bias="none"',
    "lora_bias": "a bias on lora_B is not served; train with lora_bias=False",
    "modules_to_save": "whole trained modules are not served; train without modules_to_save, "
    "or merge the adapter into the base",
    "trainable_token_indices": "trained token embeddings are not served; train without them, "
    "or merge the adapter into the base",
    "target_parameters": "LoRA on bare parameters is not served; use target_modules",
    "layer_replication": "replicated layers change the base model; serve the expanded model as its own base",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not served; train a plain LoRA",
    "use_qalora": "QALoRA pools the input before lora_A; train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not served; train a plain LoRA",
    "arrow_config": "Arrow mixes several adapters per token; load the adapters one by one instead",
    "velora_config": "VeLoRA checkpoints hold tensors beyond A and B; retrain with a plain LoRA",
    "monteclora_config": "MonteCLoRA checkpoints hold tensors beyond A and B; retrain with a plain LoRA",
    "kasa_config": "KaSA truncates the base weights; merge the adapter into its base instead",
    "megatron_config": "Megatron's parallel layers are not served; convert the checkpoint to plain PEFT",
}
"""Fields that ask for an unsupported feature, with the fix; null, false or empty is accepted."""

BIAS_OFF: Final = "none"

PLAIN_INITS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""String values of init_lora_weights after which a checkpoint is still a delta on the original base."""

BASE_CHANGING_INITS: Final = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of the values after which it is not: they subtract the initial B A from the base weights
(pissa, olora, corda, lora_ga) or quantize them (loftq)."""


def is_off(value: object) -> bool:
    """Return whether a value is null, false or empty. 0 is none of these."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)
