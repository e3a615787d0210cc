"""A tiny random model and versions of adapters for it, each with distinct answers.

Greedy answers are computed by transformers and PEFT. A version is drawn again until its answers to all
prompts differ from those of every other version and of the base model within the first `SHORT_TOKENS` tokens,
and no token of them is nearly a tie: any correct computation in float32 gives the same tokens, and the tokens
tell which version produced them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.make_checkpoint import VOCAB_SIZE, adapter_name, write_tokenizer
from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.whole_file import write_whole
from loraplex.model.config import load_config

SHORT_TOKENS: Final = 8
LONG_TOKENS: Final = 40
PROMPT_TOKENS: Final = 40
"""Tokens of a prompt: more than a block of the prefix cache, so that versions could be mixed up in it."""
NUM_PROMPTS: Final = 3
RANKS: Final = (4, 8, 16)
MIN_GAP: Final = 1e-3
"""Least gap between the two highest logits of a token: a hundred times the rounding errors of float32
here."""
TARGETS: Final = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")

Answers = tuple[tuple[int, ...], ...]
"""Greedy tokens by prompt."""


@dataclass(frozen=True, kw_only=True)
class AdapterVersion:
    """One version of an adapter: its content hash, its files, and its answers to the prompts."""

    version: str
    folder: Path
    answers: Answers


@dataclass(frozen=True, kw_only=True)
class VersionCheckpoint:
    """A base model with prompts and answers, and the versions of each adapter by name."""

    base: Path
    prompts: Answers
    base_answers: Answers
    versions: dict[str, tuple[AdapterVersion, ...]]


def version_checkpoint(root: Path, *, num_adapters: int, num_versions: int) -> VersionCheckpoint:
    """Return the checkpoint in a folder; writes it if it is not there yet."""
    done = root / "answers.json"
    if not done.is_file():
        started_s = time.perf_counter()
        write_whole(done, json.dumps(_write(root, num_adapters, num_versions)))
        print(
            f"{num_adapters} adapters of {num_versions} versions each written, and their answers computed, "
            f"in {time.perf_counter() - started_s:.0f} s",
            flush=True,
        )
    return _read(root, json.loads(done.read_text(encoding="utf-8")))


def _read(root: Path, stored: dict[str, Any]) -> VersionCheckpoint:
    return VersionCheckpoint(
        base=root / "base",
        prompts=_answers(stored["prompts"]),
        base_answers=_answers(stored["base"]),
        versions={
            name: tuple(
                AdapterVersion(
                    version=each["version"],
                    folder=root / each["folder"],
                    answers=_answers(each["answers"]),
                )
                for each in versions
            )
            for name, versions in stored["adapters"].items()
        },
    )


def _answers(stored: list[list[int]]) -> Answers:
    return tuple(map(tuple, stored))


def _write(root: Path, num_adapters: int, num_versions: int) -> dict[str, Any]:
    model = _write_base(root / "base")
    shape = load_config(root / "base").shape
    seeds = count(1)
    prompts, base = _prompts(model, seeds)
    taken = set(_beginnings(base))
    adapters: dict[str, list[dict[str, Any]]] = {}
    for index in range(num_adapters):
        for number in range(num_versions):
            name = adapter_name(index)
            folder = Path("versions") / name / f"v{number}"
            rank = RANKS[(index + number) % len(RANKS)]
            answers = _write_version(model, root / folder, rank, prompts, taken, seeds)
            version = read_adapter(root / folder, shape).version
            adapters.setdefault(name, []).append(
                {"version": version, "folder": str(folder), "answers": answers}
            )
    return {"prompts": prompts.tolist(), "base": base, "adapters": adapters}


def _write_base(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Logits spread like those of a trained model; with transformers' initialisation nearly all are
            # ties.
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0.0, 0.12)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def _prompts(model: PreTrainedModel, seeds: count[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """Return random prompts, and the base model's answers to them."""
    while True:
        generator = torch.Generator().manual_seed(next(seeds))
        prompts = torch.randint(3, VOCAB_SIZE, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
        if (answers := _greedy(model, prompts)) is not None:
            return prompts, answers


def _write_version(
    model: PreTrainedModel,
    folder: Path,
    rank: int,
    prompts: torch.Tensor,
    taken: set[tuple[int, ...]],
    seeds: count[int],
) -> list[list[int]]:
    """Write one version whose answers begin unlike all in `taken`, and return them."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    lora = [(name, each) for name, each in adapted.named_parameters() if "lora_" in name]
    while True:
        generator = torch.Generator().manual_seed(next(seeds))
        with torch.no_grad():
            for name, parameter in lora:
                std = 0.5 / rank**0.5 if "lora_A" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        answers = _greedy(adapted, prompts)
        if answers is not None and not taken.intersection(_beginnings(answers)):
            break
    taken.update(_beginnings(answers))
    adapted.save_pretrained(folder)
    adapted.unload()
    return answers


def _beginnings(answers: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(each[:SHORT_TOKENS]) for each in answers]


@torch.inference_mode()
def _greedy(model: Any, prompts: torch.Tensor) -> list[list[int]] | None:
    """Return the greedy answer to each prompt; None if any token of one is nearly a tie."""
    ids = prompts
    for _ in range(LONG_TOKENS):
        best = model(input_ids=ids, use_cache=False).logits[:, -1].topk(2)
        if (best.values[:, 0] - best.values[:, 1]).min() < MIN_GAP:
            return None
        ids = torch.cat((ids, best.indices[:, :1]), dim=1)
    answers: list[list[int]] = ids[:, prompts.shape[1] :].tolist()
    return answers
