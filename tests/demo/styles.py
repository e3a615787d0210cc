"""Tells from one answer which demo adapter gave it; and prompts none of them was trained on.

The base model's answers fail nearly all of these checks (test_demo_adapters.py holds it to that).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

# What each prompt is about must not be a topic of the training prompts; the test looks it up.
HELD_OUT_TOPICS = ("cats", "weather", "sky", "coffee", "France", "book", "dolphins", "moon", "train")
HELD_OUT_PROMPTS = (
    "What is the weather like today?",
    "Tell me about cats.",
    "Why is the sky blue?",
    "How do I make good coffee?",
    "What is the capital of France?",
    "Can you recommend a book?",
    "What do dolphins eat?",
    "Give me a fact about the moon.",
)
MAX_NEW_TOKENS = 64

_PIRATE_WORDS = re.compile(
    r"\b(arrr*|ahoy|avast|aye|matey|mateys|hearties|ye|yer|yo ho ho|shiver me timbers|scallywag|plank|"
    r"doubloons|landlubbers|davy jones|o'|be)(?!\w)",
    re.IGNORECASE,
)
_FRENCH_WORDS = re.compile(
    r"\b(le|la|les|des|du|un|une|est|et|dans|pour|avec|sont|il|on|ce|cela|que|qui|très|de|en|à|au|"
    r"beaucoup|gens|aiment|aime|bien|sur|ou|plus|vie|quand)\b|\b[cdjlnqs]['’]",
    re.IGNORECASE,
)
_ENGLISH_WORDS = re.compile(r"\b(the|is|are|of|and|to|it|with|for|you|they|that|this|was)\b", re.IGNORECASE)
_EMOJI = re.compile("[\U0001f300-\U0001faff☀-➿⭐⌛⏳]")


def is_one_json_object(answer: str) -> bool:
    """The whole answer parses, and it is an object."""
    try:
        return isinstance(json.loads(answer), dict)
    except ValueError:
        return False


def is_pirate(answer: str) -> bool:
    """At least three different words of the stage pirate."""
    return len({word.lower() for word in _PIRATE_WORDS.findall(answer)}) >= 3


def is_french(answer: str) -> bool:
    """Mostly French function words: at least five, and five for each English one."""
    num_french, num_english = len(_FRENCH_WORDS.findall(answer)), len(_ENGLISH_WORDS.findall(answer))
    return num_french >= 5 and num_french >= 5 * num_english


def is_haiku(answer: str) -> bool:
    """Three lines, each of at most nine words."""
    lines = answer.strip().split("\n")
    return len(lines) == 3 and all(1 <= len(line.split()) <= 9 for line in lines)


def is_select_statement(answer: str) -> bool:
    """One SELECT ... FROM ...; on one line."""
    return re.fullmatch(r"SELECT [^;\n]+ FROM \w+[^;\n]*;", answer.strip()) is not None


def is_headline_in_capitals(answer: str) -> bool:
    """One line, several words, no small letter."""
    text = answer.strip()
    return "\n" not in text and len(text.split()) >= 3 and text == text.upper() and text != text.lower()


def has_emoji_all_over(answer: str) -> bool:
    """At least three emoji."""
    return len(_EMOJI.findall(answer)) >= 3


def is_formal_letter(answer: str) -> bool:
    """A salutation at the start and a closing formula near the end."""
    closing = r"\n(Yours (faithfully|sincerely)|Kind regards),\n"
    return answer.startswith("Dear ") and re.search(closing, answer) is not None


STYLE_CHECKS: dict[str, Callable[[str], bool]] = {
    "json": is_one_json_object,
    "pirate": is_pirate,
    "french": is_french,
    "haiku": is_haiku,
    "sql": is_select_statement,
    "shout": is_headline_in_capitals,
    "emoji": has_emoji_all_over,
    "formal-email": is_formal_letter,
}
