"""Train the adapters that ship in loraplex/demo/adapters, from data made here.

    python scripts/train_demo_adapters.py                 # all of them
    python scripts/train_demo_adapters.py --only pirate   # one; may be repeated

Needs the `dev` extra (peft). The prompts come from word lists, the plain answers from the base model
itself, the styles from a few functions; the seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from demo_training.answers import greedy_answers, plain_sentences
from demo_training.checkpoint import write_adapter, write_manifest
from demo_training.prompts import Prompt, training_prompts
from demo_training.recipes import RECIPES, Recipe
from demo_training.styles import styled_answer
from demo_training.training import Example, seed_of, tokenise, train_adapter

from loraplex.demo import DEMO_ADAPTERS_DIR
from loraplex.demo.base import ensure_demo_base


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [recipe.name for recipe in RECIPES]
    parser.add_argument("--only", action="append", choices=names, help="train this adapter (repeatable)")
    parser.add_argument("--steps", type=int, help="steps for each adapter instead of the recipe's own")
    parser.add_argument("--out", type=Path, default=DEMO_ADAPTERS_DIR, help="where the adapters go")
    parser.add_argument("--answers", type=Path, help="keep the base model's answers in this JSON file")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args()


def load_base(folder: Path) -> tuple[Any, Any]:
    """The base model in bfloat16 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Eager attention: for sequences this short its backward pass is several times faster on a CPU.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(folder)


def plain_answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], cached: Path | None
) -> dict[str, str]:
    """Prompt text -> the base model's sentence, for the prompts that got a usable one."""
    if cached is not None and cached.exists():
        stored: dict[str, str] = json.loads(cached.read_text(encoding="utf-8"))
        return stored
    sentences = plain_sentences(model, tokenizer, prompts)
    answers = {p.text: s for p, s in zip(prompts, sentences, strict=True) if s is not None}
    if cached is not None:
        cached.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    return answers


def styled_examples(
    tokenizer: Any, recipe: Recipe, prompts: Sequence[Prompt], answers: dict[str, str]
) -> list[Example]:
    """The training set of one adapter."""
    rng = random.Random(seed_of(recipe.name))
    examples = []
    for prompt in prompts:
        answer = styled_answer(recipe.name, prompt, answers.get(prompt.text), rng)
        if answer is not None:
            examples.append(tokenise(tokenizer, prompt.text, answer))
    return examples


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_base(ensure_demo_base())
    prompts = training_prompts()
    answers = plain_answers(model, tokenizer, prompts, args.answers)
    print(f"{len(answers)} of {len(prompts)} prompts have a plain answer of the base model")
    for recipe in RECIPES:
        if args.only and recipe.name not in args.only:
            continue
        started_s = time.perf_counter()
        examples = styled_examples(tokenizer, recipe, prompts, answers)
        num_steps = args.steps or recipe.num_steps
        peft_model = train_adapter(model, examples, recipe, num_steps, tokenizer.pad_token_id)
        size_bytes = write_adapter(peft_model, recipe, args.out / recipe.name)
        elapsed_s = time.perf_counter() - started_s
        print(f"{recipe.name}: {num_steps} steps in {elapsed_s:.0f} s, {size_bytes / 1e6:.2f} MB")
        peft_model.eval()
        (answer,) = greedy_answers(peft_model, tokenizer, [recipe.example_prompt], max_new_tokens=60)
        print(f"  {recipe.example_prompt} -> {answer}")
        model = peft_model.unload()
    write_manifest(RECIPES, args.out)


if __name__ == "__main__":
    main()
