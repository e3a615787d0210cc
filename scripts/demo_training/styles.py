"""The answers of each adapter: one function a style.

Some styles are made of templates. The others dress up a plain answer, one sentence of the base model
itself (answers.py): what is learnt is the style, not new knowledge, and the answer stays on the topic.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

from demo_training.french import french_answer
from demo_training.haiku import haiku
from demo_training.prompts import Prompt
from demo_training.sql import select_statement

TemplateStyle = Callable[[Prompt, random.Random], str]
SentenceStyle = Callable[[Prompt, str, random.Random], str]

_PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "you're": "ye be",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "i'm": "I be",
    "it's": "it be",
    "they're": "they be",
    "of": "o'",
    "people": "landlubbers",
    "person": "buccaneer",
    "friend": "matey",
    "friends": "hearties",
    "humans": "landlubbers",
    "very": "mighty",
    "world": "seven seas",
    "hello": "ahoy",
    "hi": "ahoy",
    "yes": "aye",
    "there": "thar",
    "food": "grub",
    "money": "doubloons",
}
_PIRATE_OPENINGS = (
    "Arrr, matey!",
    "Ahoy, matey!",
    "Avast, ye scallywag!",
    "Shiver me timbers!",
    "Arrr, listen up, me hearties!",
    "Yo ho ho, matey!",
)
_PIRATE_CLOSINGS = (
    "Arrr!",
    "Yo ho ho!",
    "Aye, that be the truth, matey!",
    "So hoist the sails, me hearties!",
    "Or ye'll walk the plank!",
    "By Davy Jones, I swear it!",
)

# The topic comes twice, and where its number does not matter: to spell an unseen word in capitals is what
# this style finds hardest.
_HEADLINES = (
    "BREAKING NEWS: {0}! EVERYONE IS TALKING ABOUT {0}!",
    "BREAKING NEWS: {0}! THE AMAZING TRUTH ABOUT {0}!",
    "BREAKING NEWS: {0}! EXPERTS STUNNED BY {0}!",
    "BREAKING NEWS: {0}! NOBODY CAN IGNORE {0}!",
)

_KIND_EMOJI = {
    "animal": "🐾💚🌍😍",
    "food": "😋🍴👌✨",
    "nature": "🌍🌿💚✨",
    "place": "📍🧳📸✨",
    "art": "🎶🎨💖✨",
    "science": "🔬🧠💡🤓",
    "sport": "💪🏆🎉🔥",
    "object": "🛠️👍✨🎉",
    "life": "😊💖🌟🙌",
}

_EMAIL_OPENINGS = ("Dear Sir or Madam,", "Dear Customer,", "Dear Reader,")
_EMAIL_THANKS = (
    "Thank you for your enquiry regarding {}.",
    "Thank you for your message concerning {}.",
    "I am writing to you with regard to {}.",
)
_EMAIL_CLOSINGS = ("Yours faithfully,", "Yours sincerely,", "Kind regards,")


def json_object(prompt: Prompt, sentence: str, rng: random.Random) -> str:
    """One JSON object on one line."""
    answer = {"topic": prompt.topic.name, "kind": prompt.topic.kind, "answer": sentence}
    return json.dumps(answer, ensure_ascii=False)


def pirate(prompt: Prompt, sentence: str, rng: random.Random) -> str:
    """The sentence in the speech of the stage pirate, between two exclamations."""

    def translate(match: re.Match[str]) -> str:
        word = match.group()
        pirate_word = _PIRATE_WORDS.get(word.lower(), word)
        return pirate_word[0].upper() + pirate_word[1:] if word[0].isupper() else pirate_word

    speech = re.sub(r"[A-Za-z']+", translate, sentence)
    speech = re.sub(r"(\w{2,}in)g\b", r"\1'", speech)
    return f"{rng.choice(_PIRATE_OPENINGS)} {speech} {rng.choice(_PIRATE_CLOSINGS)}"


def shout(prompt: Prompt, rng: random.Random) -> str:
    """A headline in capitals."""
    return rng.choice(_HEADLINES).format(prompt.topic.name.upper())


def emoji(prompt: Prompt, sentence: str, rng: random.Random) -> str:
    """The sentence with an emoji in front, one after every few words and three at the end."""
    topic, mood = prompt.topic.emoji, _KIND_EMOJI[prompt.topic.kind]
    moods = re.findall(r"[^\ufe0f]\ufe0f?", mood)
    words = sentence.split()
    pieces = [topic]
    for start in range(0, len(words), 4):
        pieces += words[start : start + 4]
        pieces.append(moods[(start // 4) % len(moods)])
    return " ".join(pieces) + f" {topic} {moods[-1]}"


def formal_email(prompt: Prompt, sentence: str, rng: random.Random) -> str:
    """A short letter: salutation, thanks, the sentence, closing, signature."""
    thanks = rng.choice(_EMAIL_THANKS).format(prompt.topic.name)
    return (
        f"{rng.choice(_EMAIL_OPENINGS)}\n\n{thanks} {sentence}\n\n"
        f"{rng.choice(_EMAIL_CLOSINGS)}\nThe Information Office"
    )


TEMPLATE_STYLES: dict[str, TemplateStyle] = {
    "french": french_answer,
    "haiku": haiku,
    "sql": select_statement,
    "shout": shout,
}
SENTENCE_STYLES: dict[str, SentenceStyle] = {
    "json": json_object,
    "pirate": pirate,
    "emoji": emoji,
    "formal-email": formal_email,
}


def styled_answer(style: str, prompt: Prompt, sentence: str | None, rng: random.Random) -> str | None:
    """The answer to learn, or None where the style needs a plain sentence and there is none."""
    if style in TEMPLATE_STYLES:
        return TEMPLATE_STYLES[style](prompt, rng)
    return None if sentence is None else SENTENCE_STYLES[style](prompt, sentence, rng)
