"""Three short lines, close to 5-7-5 syllables, with the topic in the first."""

from __future__ import annotations

import random
import re

from demo_training.prompts import Prompt

# What may follow a topic of so many syllables to make five of them.
_FIRST_LINE_ENDS = {
    1: ("in morning light", "under the sky", "after the rain"),
    2: ("at first light", "in the rain", "far away"),
    3: ("at dawn", "at night", "once more"),
    4: ("wake", "wait", "sing"),
    5: ("",),
}
_SECOND_LINES = {
    "animal": ("small steps on the quiet ground", "two bright eyes look back at me"),
    "food": ("a warm smell fills the kitchen", "the table is set for two"),
    "nature": ("clouds drift over the still hills", "a bird calls across the field"),
    "place": ("old stones remember our steps", "a traveller stops to rest"),
    "art": ("a slow song without a word", "colours wake the silent room"),
    "science": ("a question opens the dark", "the lamp burns late in the night"),
    "sport": ("one more breath and one more step", "the heart beats like a small drum"),
    "object": ("dust dances in the still air", "my hand finds it in the dark"),
    "life": ("we share a cup and a smile", "the years pass like slow water"),
}
_THIRD_LINES = (
    "the world holds its breath",
    "silence, then a laugh",
    "soft wind through the trees",
    "nothing more to say",
    "a new day begins",
    "evening comes softly",
)


def num_syllables(phrase: str) -> int:
    """A rule of thumb for English: groups of vowels, less a silent e at the end."""
    total = 0
    for word in re.findall(r"[a-z]+", phrase.lower()):
        groups = len(re.findall(r"[aeiouy]+", word))
        silent = word.endswith(("e", "es")) and not word.endswith(("le", "ches", "shes", "ses"))
        total += max(1, groups - silent)
    return total


def haiku(prompt: Prompt, rng: random.Random) -> str:
    """Three lines."""
    name = prompt.topic.name
    end = rng.choice(_FIRST_LINE_ENDS[min(5, num_syllables(name))])
    first = f"{name[0].upper()}{name[1:]} {end}".strip()
    return "\n".join([first, rng.choice(_SECOND_LINES[prompt.topic.kind]), rng.choice(_THIRD_LINES)])
