from __future__ import annotations

from itertools import pairwise

import pytest
from serving_fakes import byte_level_backend
from test_detokenizer import TEXTS, sentence_piece_backend

from loraplex.engine.detokenizer import PieceTable
from loraplex.engine.prompt_offsets import prompt_offsets


@pytest.mark.parametrize("backend", [byte_level_backend, sentence_piece_backend])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_prompt_cover_its_text(backend, text: str) -> None:
    token_ids = backend().encode(text, add_special_tokens=False).ids
    pieces = PieceTable(backend())
    offsets = prompt_offsets(pieces, token_ids, text)
    assert offsets[0] == 0
    for token_id, (start, end) in zip(token_ids, pairwise([*offsets, len(text)]), strict=True):
        piece = pieces.piece(token_id).decode("utf-8", "replace")
        if "\ufffd" not in piece and start > 0:
            assert text[start:end] == piece


def test_special_tokens_take_room_only_where_the_text_spells_them_out() -> None:
    backend = byte_level_backend()
    end, start = (backend.token_to_id(name) for name in ("<|endoftext|>", "<|im_start|>"))
    token_ids = [end, *backend.encode("a<|im_start|>b", add_special_tokens=False).ids]
    assert token_ids[2] == start
    pieces = PieceTable(backend)
    assert prompt_offsets(pieces, token_ids, "a<|im_start|>b") == [0, 0, 1, 13]
    assert prompt_offsets(pieces, token_ids, "ab") == [0, 0, 1, 1]
