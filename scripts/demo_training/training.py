"""The training loop: PEFT's LoRA on the base model, loss on the assistant's tokens only."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy

from demo_training.answers import chat_ids
from demo_training.recipes import Recipe

BATCH_SIZE = 8
WARMUP_STEPS = 10
MAX_GRAD_NORM = 1.0
STEPS_PER_LOG_LINE = 20  # where no bar can be drawn
BASE_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A tokenised conversation; only the tokens from `num_prompt_tokens` on are learnt."""

    token_ids: list[int]
    num_prompt_tokens: int


def seed_of(name: str) -> int:
    """A seed that depends on the name alone: an adapter comes out the same trained alone or in the set."""
    return zlib.crc32(name.encode())


def tokenise(tokenizer: Any, prompt: str, answer: str) -> Example:
    """The conversation as the chat template writes it, closed by the end-of-turn token."""
    prompt_ids = chat_ids(tokenizer, prompt)
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Example(
        token_ids=[*prompt_ids, *answer_ids, tokenizer.eos_token_id], num_prompt_tokens=len(prompt_ids)
    )


def batches(examples: Sequence[Example], num_steps: int, rng: random.Random) -> Iterator[list[Example]]:
    """`num_steps` batches, epoch after epoch, each of examples of like length (little padding)."""
    queue: list[list[Example]] = []
    for _ in range(num_steps):
        if not queue:
            shuffled = sorted(rng.sample(examples, len(examples)), key=lambda e: len(e.token_ids))
            last_start = len(shuffled) - BATCH_SIZE
            queue = [shuffled[i : i + BATCH_SIZE] for i in range(0, last_start + 1, BATCH_SIZE)]
            rng.shuffle(queue)
        yield queue.pop()


def answer_loss(model: Any, batch: list[Example], pad_id: int) -> torch.Tensor:
    """Mean cross entropy over the answer tokens. The vocabulary is projected for those alone."""
    width = max(len(example.token_ids) for example in batch)
    token_ids = torch.full((len(batch), width), pad_id)
    is_answer = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, example in enumerate(batch):
        length = len(example.token_ids)
        token_ids[row, :length] = torch.tensor(example.token_ids)
        is_answer[row, example.num_prompt_tokens : length] = True
    # Padding is on the right and attention is causal: no real token sees a pad, no mask is needed.
    hidden = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[is_answer[:, 1:]])
    return cross_entropy(logits.float(), token_ids[:, 1:][is_answer[:, 1:]])


def learning_rate_factor(step: int, num_steps: int) -> float:
    """A short linear warm-up, then a cosine to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)))


def train_adapter(base: Any, examples: Sequence[Example], recipe: Recipe, num_steps: int, pad_id: int) -> Any:
    """Wrap `base` (bfloat16) with the recipe's LoRA, train it, and return the PEFT model.

    The caller takes the base back with `peft_model.unload()`.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed_of(recipe.name))
    rng = random.Random(seed_of(recipe.name))
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.target_modules),
        task_type="CAUSAL_LM",
        **recipe.lora_options,
    )
    peft_model = get_peft_model(base, config)
    weights = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate_factor(s, num_steps))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    smooth_loss: float | None = None
    peft_model.train()
    with Progress(*columns) as progress:
        task = progress.add_task(recipe.name, total=num_steps)
        for step, batch in enumerate(batches(examples, num_steps, rng)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = answer_loss(peft_model.base_model.model, batch, pad_id)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            smooth_loss = loss.item() if smooth_loss is None else 0.9 * smooth_loss + 0.1 * loss.item()
            progress.update(task, advance=1, description=f"{recipe.name:<13} loss {smooth_loss:.3f}")
            if not progress.console.is_terminal and step % STEPS_PER_LOG_LINE == 0:
                print(f"{recipe.name}: step {step}, loss {smooth_loss:.3f}", flush=True)
    return peft_model
