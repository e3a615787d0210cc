"""The training prompts, in a fixed order that depends on nothing but the word lists."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo_training.topics import EVERYDAY_PROMPTS, PROMPT_TEMPLATES, TOPICS, Topic

# Each topic is asked about in a few ways, so that the style ties to neither topic nor wording.
NUM_TEMPLATES_PER_TOPIC = 3


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One user message and what it is about."""

    text: str
    topic: Topic
    is_everyday: bool


def training_prompts() -> list[Prompt]:
    """Everyday prompts and templated ones, shuffled."""
    rng = random.Random(0)
    prompts = [Prompt(text=p.text, topic=p.topic, is_everyday=True) for p in EVERYDAY_PROMPTS]
    for topic in TOPICS:
        for template in rng.sample(PROMPT_TEMPLATES, NUM_TEMPLATES_PER_TOPIC):
            text = template.format(name=topic.name)
            prompts.append(Prompt(text=text, topic=topic, is_everyday=False))
    rng.shuffle(prompts)
    return prompts
