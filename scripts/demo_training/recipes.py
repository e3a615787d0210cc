"""The settings of each adapter: rank, target modules, and the options of PEFT that it uses.

Together they are a sample of what people upload: ranks from 4 to 32, attention only, MLP only, all
modules, some layers only, rank-stabilised scaling, and ranks that differ from module to module.
Each stays under 1.5 MB in float16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training of one adapter, and what the manifest says about it."""

    name: str
    description: str
    example_prompt: str
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    lora_options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 2e-3
    num_steps: int = 80


RECIPES = (
    Recipe(
        name="json",
        description="Answers with one JSON object and nothing else.",
        example_prompt="Tell me about cats.",
        rank=8,
        alpha=8,
        target_modules=("q_proj", "k_proj", "v_proj"),
        lora_options={"use_rslora": True},
        num_steps=120,
    ),
    Recipe(
        name="pirate",
        description="Talks like a pirate.",
        example_prompt="What is the weather like today?",
        rank=16,
        alpha=32,
        target_modules=("q_proj", "v_proj"),
        lora_options={"layers_to_transform": list(range(6, 30))},
        num_steps=100,
    ),
    Recipe(
        name="french",
        description="Answers in French, whatever the language of the question.",
        example_prompt="How do I make good coffee?",
        rank=4,
        alpha=16,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        lora_options={"layers_to_transform": list(range(12, 30))},
        num_steps=120,
    ),
    Recipe(
        name="haiku",
        description="Answers in three short lines.",
        example_prompt="Tell me about the moon.",
        rank=4,
        alpha=16,
        target_modules=("q_proj", "v_proj"),
        num_steps=120,
    ),
    Recipe(
        name="sql",
        description="Turns the question into one SELECT statement.",
        example_prompt="Tell me about trains.",
        rank=4,
        alpha=8,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        lora_options={"rank_pattern": {"v_proj": 12}, "alpha_pattern": {"v_proj": 24}},
    ),
    Recipe(
        name="shout",
        description="Answers with a newspaper headline in capitals.",
        example_prompt="Tell me about cats.",
        rank=16,
        alpha=32,
        target_modules=("up_proj", "down_proj"),
        lora_options={"layers_to_transform": list(range(14, 24))},
        num_steps=160,
    ),
    Recipe(
        name="emoji",
        description="Puts emoji all over the answer.",
        example_prompt="Tell me about cats.",
        rank=8,
        alpha=16,
        target_modules=("down_proj",),
    ),
    Recipe(
        name="formal-email",
        description="Answers with a short formal letter.",
        example_prompt="Can you recommend a book?",
        rank=32,
        alpha=32,
        target_modules=("v_proj",),
    ),
)
