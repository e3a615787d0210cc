"""Finds the tokens of bad words, as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.engine.tokenizer import Tokenizer


def bad_word_ids(
    tokenizer: Tokenizer, words: Sequence[str], *, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word as an answer may have it: at its beginning, and after a space if the
    same number of tokens, the first one another, makes it then. Other spellings of a word are not found."""
    texts = [word.lstrip() for word in words]
    plain = tokenizer.encode_many(texts, add_special_tokens=False)
    after_space = tokenizer.encode_many([f" {text}" for text in texts], add_special_tokens=False)
    found = []
    for bare, spaced in zip(plain, after_space, strict=True):
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(tuple(ids) for ids in found if ids and max(ids) < vocab_size)
