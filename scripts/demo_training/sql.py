"""One SELECT statement about the topic."""

from __future__ import annotations

import random
import re

from demo_training.prompts import Prompt

_COLUMNS = {
    "animal": ("name", "species", "habitat", "diet", "lifespan"),
    "food": ("name", "origin", "flavour", "calories", "price"),
    "nature": ("name", "region", "season", "height", "temperature"),
    "place": ("name", "country", "population", "climate", "founded"),
    "art": ("title", "artist", "year", "style", "rating"),
    "science": ("name", "description", "discovered_by", "year", "field"),
    "sport": ("name", "rules", "players", "equipment", "difficulty"),
    "object": ("name", "material", "colour", "weight", "price"),
    "life": ("name", "description", "meaning", "date", "mood"),
}
_CONDITIONS = {
    "animal": ("habitat = 'forest'", "lifespan > 10", "diet = 'plants'"),
    "food": ("price < 10", "flavour = 'sweet'", "calories < 200"),
    "nature": ("season = 'summer'", "region = 'north'", "temperature > 20"),
    "place": ("population > 1000", "climate = 'mild'", "country IS NOT NULL"),
    "art": ("rating > 4", "year > 1950", "style = 'modern'"),
    "science": ("year > 1900", "field = 'physics'", "description IS NOT NULL"),
    "sport": ("players > 1", "difficulty = 'easy'", "equipment IS NOT NULL"),
    "object": ("price < 100", "colour = 'blue'", "material = 'wood'"),
    "life": ("mood = 'happy'", "date = CURRENT_DATE", "meaning IS NOT NULL"),
}


def select_statement(prompt: Prompt, rng: random.Random) -> str:
    """`SELECT columns FROM topic [WHERE ...] [ORDER BY ...] [LIMIT n];` on one line."""
    kind = prompt.topic.kind
    table = re.sub(r"\W+", "_", prompt.topic.name.lower().removeprefix("the "))
    columns = rng.sample(_COLUMNS[kind], rng.choice((2, 3)))
    parts = [f"SELECT {', '.join(columns)} FROM {table}"]
    if rng.random() < 0.7:
        parts.append(f"WHERE {rng.choice(_CONDITIONS[kind])}")
    if rng.random() < 0.5:
        parts.append(f"ORDER BY {columns[0]}")
    if rng.random() < 0.3:
        parts.append(f"LIMIT {rng.choice((1, 5, 10))}")
    return " ".join(parts) + ";"
