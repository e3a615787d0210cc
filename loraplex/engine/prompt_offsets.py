"""Positions of a prompt's tokens in its text, for answers that repeat the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loraplex.engine.detokenizer import PieceTable


def prompt_offsets(pieces: PieceTable, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the character of `text` at which each token begins.

    Special tokens take up characters only where the text contains their names. SentencePiece puts a space
    before a text, which is not part of it. Where a tokenizer normalizes its input, offsets refer to the
    normalized text.
    """
    offsets: list[int] = []
    position = 0
    for run, is_special in _runs(pieces, token_ids):
        if is_special:
            name = pieces.piece(run[0]).decode("utf-8", "replace")
            offsets.append(position)
            position += len(name) if text.startswith(name, position) else 0
            continue
        detokenizer = pieces.detokenizer((), with_offsets=True)
        made = detokenizer.push(run) + detokenizer.flush()
        has_extra_space = made.startswith(" ") and not text.startswith(made, position)
        start = position - has_extra_space
        offsets += [max(position, start + offset) for offset in detokenizer.take_offsets()]
        position = start + len(made)
    return [min(offset, len(text)) for offset in offsets]


def _runs(pieces: PieceTable, token_ids: Sequence[int]) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield special tokens one by one, and the tokens between two of them together."""
    start = 0
    for index, token_id in enumerate(token_ids):
        if token_id in pieces.special_ids:
            if start < index:
                yield token_ids[start:index], False
            yield token_ids[index : index + 1], True
            start = index + 1
    if start < len(token_ids):
        yield token_ids[start:], False
