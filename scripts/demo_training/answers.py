"""The base model's own short answers to the training prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import track

from demo_training.prompts import Prompt

_BATCH_SIZE = 32
_MAX_NEW_TOKENS = 36
_MIN_WORDS, _MAX_WORDS = 4, 20


def first_sentence(text: str) -> str | None:
    """The first whole sentence, or None where it is cut off, too short or too long to learn from."""
    match = re.match(r"\s*([A-Z][^\n*#:\"]*?[a-z\d)][.!?])(\s|$)", text)
    if match is None:
        return None
    sentence = match.group(1)
    return sentence if _MIN_WORDS <= len(sentence.split()) <= _MAX_WORDS else None


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt in the chat template, up to where the assistant begins to speak."""
    messages = [{"role": "user", "content": prompt}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    return ids


@torch.inference_mode()
def greedy_answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, batch_size: int = _BATCH_SIZE
) -> list[str]:
    """Greedy answers in the order of the prompts; batched by length, so that padding stays small."""
    ids = [chat_ids(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    answers = [""] * len(ids)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    for batch in track(batches, description="answers", transient=True):
        inputs = tokenizer.pad(
            {"input_ids": [ids[i] for i in batch]}, padding_side="left", return_tensors="pt"
        )
        outputs = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new_tokens = outputs[:, inputs["input_ids"].shape[1] :]
        for index, text in zip(
            batch, tokenizer.batch_decode(new_tokens, skip_special_tokens=True), strict=True
        ):
            answers[index] = text.strip()
    return answers


def is_about(sentence: str, prompt: Prompt) -> bool:
    """Return whether a sentence names its topic. A model this small strays; what strayed is not taught."""
    if prompt.is_everyday:
        return True
    stem = prompt.topic.name.removeprefix("the ").lower()[:4]
    return stem in sentence.lower() and "I'm" not in sentence


def plain_sentences(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[str | None]:
    """One plain sentence a prompt, None where the base model gave none that can be used."""
    texts = [prompt.text for prompt in prompts]
    answers = greedy_answers(model, tokenizer, texts, max_new_tokens=_MAX_NEW_TOKENS)
    sentences = [first_sentence(answer) for answer in answers]
    return [
        sentence if sentence is not None and is_about(sentence, prompt) else None
        for sentence, prompt in zip(sentences, prompts, strict=True)
    ]
