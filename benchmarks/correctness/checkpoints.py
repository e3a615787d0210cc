"""Small random models and adapters, written by transformers and PEFT themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 1003,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,  # generate() would keep it out of texts that must not end early
    "pad_token_id": 0,
}
TINY_SIZES: Final[dict[str, Any]] = SIZES | {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}
ODD_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 1013,
    "hidden_size": 250,
    "intermediate_size": 618,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 40,
}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-odd-sizes": ("Llama", ODD_SIZES),
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "num_attention_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": None}),
    "qwen3": ("Qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {}),
}
"""Name -> (class prefix in transformers, settings beyond the sizes)."""

ATTENTION: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEARS: Final = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def save_model(folder: Path, family: str, *, device: torch.device, tiny: bool) -> Any:
    """A random float32 model whose logits differ widely, so that greedy choices are rarely ties."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    prefix, settings = FAMILIES[family]
    sizes = {**(TINY_SIZES if tiny else SIZES), **settings}
    sizes = {key: value for key, value in sizes.items() if key != "head_dim" or value is not None}
    config = getattr(transformers, f"{prefix}Config")(**sizes, attn_implementation="eager")
    torch.manual_seed(len(family))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    spread = sizes["hidden_size"] ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms stay near one; everything else gets the spread of a trained model's activations.
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0.0, spread)
    model.save_pretrained(folder)
    return model.to(device)


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """The model in another type, its rotary frequencies left in float32, as a checkpoint of it would be."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def save_adapter(
    folder: Path, base: Any, *, rank: int, targets: Sequence[str] | str, seed: int, **settings: Any
) -> None:
    """A random adapter of `base`, saved by PEFT; the base itself is left unchanged."""
    from peft import LoraConfig, get_peft_model

    # A scale of about two either way: stronger adapters make attention so sharp that float32 itself is off.
    alpha = round(2 * rank**0.5) if settings.get("use_rslora") else 2 * rank
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(seed)
    peft_model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.5 / rank**0.5 if "lora_A" in name else 0.05)
    peft_model.save_pretrained(folder)
    peft_model.unload()


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A request, and what transformers makes of it (T tokens of the answer, P of the prompt, V words)."""

    prompt: list[int]
    token_ids: list[int]
    logits_TV: torch.Tensor
    prompt_logits_PV: torch.Tensor

    def lag(self, place: int, token: int) -> float:
        """Return how far a token's logit falls short of the chosen one's."""
        return float(self.logits_TV[place, self.token_ids[place]] - self.logits_TV[place, token])


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> Expected:
    """Alone, token by token, by transformers' own `generate`."""
    input_ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Expected(
        prompt=prompt,
        token_ids=out.sequences[0, len(prompt) :].tolist(),
        logits_TV=torch.cat(out.logits).float().cpu(),
        prompt_logits_PV=model(input_ids).logits[0].float().cpu(),
    )
