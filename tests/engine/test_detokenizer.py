from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import byte_level_backend
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers

from loraplex.engine.detokenizer import _MAX_HELD_BYTES, PieceTable

TEXTS = [
    "Hello world, how are you?",
    "  two leading spaces and\ttabs\n\n\nlines ",
    "Grüße, Ärger, ça va, señor",
    "Привет, мир! Как дела?",
    "你好，世界。今天天气很好。",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "مرحبا بالعالم",
    "😀👍🏽👩‍👩‍👧‍👦🇩🇪 flags and families",
    "e\u0301 combining, \u200b zero width, \ufeff mark",
    "\U0001d54f\U0001d552 mathematical \x00 nul \x7f",
]


@cache
def sentence_piece_backend() -> BackendTokenizer:
    """Like Llama 2: "▁" for a space, bytes for what is not in the vocabulary."""
    words = ["▁", "▁the", "▁He", "llo", "l", "o", "▁wor", "ld", "a", "e", "n", "é", "你", "😀", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = BackendTokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def word_piece_backend() -> BackendTokenizer:
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "un", "##believ", "##able", "story", "!"])}
    backend = BackendTokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


def streamed(backend: BackendTokenizer, token_ids: list[int], *, context: list[int] | None = None) -> str:
    detokenizer = PieceTable(backend).detokenizer(context or [])
    return "".join([detokenizer.push([token_id]) for token_id in token_ids]) + detokenizer.flush()


def placed(backend: BackendTokenizer, token_ids: list[int], *, batch: int = 1) -> tuple[str, list[int]]:
    """The text of the tokens, and the offset of each in it."""
    detokenizer = PieceTable(backend).detokenizer([], with_offsets=True)
    parts, offsets = [], []
    for start in range(0, len(token_ids), batch):
        parts.append(detokenizer.push(token_ids[start : start + batch]))
        offsets += detokenizer.take_offsets()
    parts.append(detokenizer.flush())
    return "".join(parts), offsets + detokenizer.take_offsets()


def continued(backend: BackendTokenizer, token_ids: list[int]) -> str:
    """The whole decoded at once, as the continuation of an ordinary token."""
    context = backend.token_to_id("a")
    return backend.decode([context, *token_ids])[1:]


@pytest.mark.parametrize("backend", [byte_level_backend, sentence_piece_backend])
@pytest.mark.parametrize("text", TEXTS)
def test_deltas_of_real_text_add_up_to_the_text(backend, text: str) -> None:
    token_ids = backend().encode(text, add_special_tokens=False).ids
    got = streamed(backend(), token_ids)
    assert got == continued(backend(), token_ids)
    assert got in (text, " " + text)  # SentencePiece begins every text with a space


@given(st.lists(st.integers(0, byte_level_backend().get_vocab_size() - 1), max_size=40))
def test_byte_level_deltas_of_random_tokens_equal_the_full_decode(token_ids: list[int]) -> None:
    assert streamed(byte_level_backend(), token_ids) == continued(byte_level_backend(), token_ids)


@given(st.lists(st.integers(0, sentence_piece_backend().get_vocab_size() - 1), max_size=_MAX_HELD_BYTES))
@settings(max_examples=examples(100, 300))
def test_sentence_piece_deltas_of_random_tokens_equal_the_full_decode(token_ids: list[int]) -> None:
    assert streamed(sentence_piece_backend(), token_ids) == continued(sentence_piece_backend(), token_ids)


@given(st.text(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_how_tokens_are_cut_into_batches_does_not_matter(text: str, cuts: list[int]) -> None:
    backend = byte_level_backend()
    token_ids = backend.encode(text, add_special_tokens=False).ids
    detokenizer = PieceTable(backend).detokenizer([])
    edges = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    parts = [detokenizer.push(token_ids[a:b]) for a, b in pairwise(edges)]
    assert "".join(parts) + detokenizer.flush() == text


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    backend = sentence_piece_backend()
    detokenizer = PieceTable(backend).detokenizer([])
    token_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert detokenizer.push(token_ids[:2]) == ""
    assert detokenizer.push([token_ids[2], backend.token_to_id("a")]) == "€a"


def test_a_leading_space_is_kept() -> None:
    backend = sentence_piece_backend()
    detokenizer = PieceTable(backend).detokenizer([])
    assert detokenizer.push([backend.token_to_id("▁the")]) == " the"


def test_long_runs_of_byte_tokens_are_shown_before_they_end() -> None:
    backend = sentence_piece_backend()
    text = "ฟ" * 200
    token_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    detokenizer = PieceTable(backend).detokenizer([])
    shown = "".join([detokenizer.push([token_id]) for token_id in token_ids])
    assert len(text) - len(shown) <= _MAX_HELD_BYTES // 3 + 1
    assert shown + detokenizer.flush() == text


def test_an_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    backend = byte_level_backend()
    first_byte = backend.token_to_id("ð")  # 0xF0, the first of four bytes of an emoji
    assert streamed(backend, [first_byte]) == "\ufffd"


def test_special_tokens_add_no_text() -> None:
    backend = byte_level_backend()
    token_ids = backend.encode("a<|im_end|>b", add_special_tokens=False).ids
    assert len(token_ids) == 3
    assert streamed(backend, token_ids) == "ab"


def test_ids_beyond_the_tokenizer_add_no_text() -> None:
    assert streamed(byte_level_backend(), [100_000]) == ""


def test_pieces_name_special_tokens_and_spell_bytes() -> None:
    table = PieceTable(byte_level_backend())
    assert table.piece(byte_level_backend().token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert table.piece(byte_level_backend().token_to_id("ð")) == b"\xf0"


def test_other_tokenizers_are_decoded_in_their_context() -> None:
    backend = word_piece_backend()
    token_ids = backend.encode("unbelievable", add_special_tokens=False).ids
    context = backend.encode("story", add_special_tokens=False).ids
    assert streamed(backend, token_ids, context=context) == " unbelievable"
    assert PieceTable(backend).piece(4) == b"story"


BYTES = {byte: sentence_piece_backend().token_to_id(f"<0x{byte:02X}>") for byte in range(256)}


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        pytest.param(["▁He", *"é".encode(), "llo"], " Heéllo", [0, 3, 3, 4], id="a whole character"),
        pytest.param(["a", 0xC3, "o"], "a\ufffdo", [0, 1, 2], id="half a character"),
        pytest.param([0xE4, 0xBD, "o"], "\ufffd\ufffdo", [0, 1, 2], id="each byte of a broken run"),
        pytest.param(
            ["a", *"é".encode(), 0xC3, "o"], "a\ufffd\ufffd\ufffdo", [0, 1, 2, 3, 4], id="the run breaks"
        ),
        pytest.param([*"é".encode(), "</s>", *"é".encode()], "éé", [0, 0, 1, 1, 1], id="a special token"),
        pytest.param(["a", 0xC3], "a\ufffd", [0, 1], id="an unfinished end"),
        pytest.param(
            [*("ฟ" * 20).encode()], "ฟ" * 20, [index // 3 for index in range(60)], id="longer than is held"
        ),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_sentence_piece_tokens_lie_where_their_characters_are(
    tokens: list[str | int], text: str, offsets: list[int], batch: int
) -> None:
    backend = sentence_piece_backend()
    token_ids = [BYTES[token] if isinstance(token, int) else backend.token_to_id(token) for token in tokens]
    assert placed(backend, token_ids, batch=batch) == (text, offsets)


@pytest.mark.parametrize("backend", [byte_level_backend, sentence_piece_backend])
@given(data=st.data())
@settings(max_examples=examples(80, 200))
def test_tokens_of_any_kind_lie_in_order_within_their_text(backend, data: st.DataObject) -> None:
    ids = st.integers(0, backend().get_vocab_size() - 1)
    token_ids = data.draw(st.lists(ids, max_size=_MAX_HELD_BYTES))
    text, offsets = placed(backend(), token_ids)
    assert text == streamed(backend(), token_ids)
    assert len(offsets) == len(token_ids)
    assert offsets == sorted(offsets)
    pieces = PieceTable(backend())
    for token_id, (offset, end) in zip(token_ids, pairwise([*offsets, len(text)]), strict=True):
        piece = pieces.piece(token_id).decode("utf-8", "replace")
        is_whole = "\ufffd" not in piece and not pieces.is_byte_token(token_id)
        if is_whole and token_id not in pieces.special_ids:
            assert text[offset:end] == piece


def test_tokens_of_other_tokenizers_lie_where_they_are_decoded() -> None:
    text, offsets = placed(word_piece_backend(), [1, 2, 3, 4, 5])
    assert [text[a:b] for a, b in pairwise([*offsets, len(text)])] == ["un", "believ", "able", " story", "!"]
