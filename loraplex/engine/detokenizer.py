"""Text from tokens as they come: constant time per token, and never half a character.

Two families of tokenizers cover the supported models, and both map each token to bytes on its own:

    byte-level BPE (Llama 3, Qwen)       every character of a token stands for one byte
    SentencePiece (Llama 2, Mistral)     "▁" is a space, "<0xE2>" is one byte of a longer character

Tokens continue a prompt, so a leading space is text, not something to strip. Any other tokenizer is
decoded through a sliding window of tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final, Protocol

from tokenizers import Tokenizer as BackendTokenizer

REPLACEMENT: Final = "\ufffd"
SPACE_MARK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# The SentencePiece decoder turns a run of byte tokens into replacement characters, each of them, if the
# run as a whole is not valid UTF-8. Being faithful to that means to hold a run back until it ends, which
# would stall scripts written in byte tokens only; longer runs than this are shown character by character.
_MAX_HELD_BYTES: Final = 32
_WINDOW_CONTEXT_TOKENS: Final = 4
_MAX_WINDOW_TOKENS: Final = 8


class Detokenizer(Protocol):
    """Turns one request's tokens into text. Special tokens (end of turn and the like) add nothing."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these tokens."""
        ...

    def flush(self) -> str:
        """What was held back, with replacement characters for what never became a character."""
        ...


class _Family(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCE_PIECE = "SentencePiece"
    OTHER = "other"


class PieceTable:
    """The bytes each token stands for; looked up on first use and kept."""

    def __init__(self, backend: BackendTokenizer) -> None:
        self.backend = backend
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._family = _family_of(backend)
        self._pieces: dict[int, bytes] = {}

    def piece(self, token_id: int) -> bytes:
        """The token's bytes; special tokens by their name, unknown ids as nothing."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._look_up(token_id)
        return piece

    def longest_piece_bytes(self) -> int | None:
        """Bytes of the longest token. None for tokenizers that may drop parts of a text, or make one unknown
        token of a part of any length."""
        model = self.backend.model
        fuses_unknown = getattr(model, "fuse_unk", False) and not getattr(model, "byte_fallback", False)
        normalizer = type(self.backend.normalizer).__name__
        shortens = self._family is _Family.BYTE_LEVEL and normalizer not in ("NoneType", "NFC")
        if self._family is _Family.OTHER or fuses_unknown or shortens:
            return None
        return max(len(self._look_up(token_id)) for token_id in self.backend.get_vocab().values())

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for tokens that follow `context` (the prompt)."""
        match self._family:
            case _Family.BYTE_LEVEL:
                return _ByteLevelDetokenizer(self)
            case _Family.SENTENCE_PIECE:
                return _SentencePieceDetokenizer(self)
            case _Family.OTHER:
                return _WindowDetokenizer(self.backend, context)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token stands for one byte of a character (SentencePiece only)."""
        token = self.backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _look_up(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._family is _Family.BYTE_LEVEL:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                return token.encode()
        if self._family is _Family.SENTENCE_PIECE:
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(match[1])
            return token.replace(SPACE_MARK, " ").encode()
        return str(self.backend.decode([token_id], skip_special_tokens=False)).encode()


class _ByteLevelDetokenizer:
    def __init__(self, pieces: PieceTable) -> None:
        self._piece = pieces.piece
        self._special_ids = pieces.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        piece, special = self._piece, self._special_ids
        return self._utf8.decode(b"".join([piece(i) for i in token_ids if i not in special]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePieceDetokenizer:
    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._run = bytearray()

    def push(self, token_ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            # A skipped token does not end a run of bytes: the tokenizer's own decoder drops it first.
            if token_id in self._pieces.special_ids:
                continue
            piece = self._pieces.piece(token_id)
            if len(piece) == 1 and self._pieces.is_byte_token(token_id):
                self._run += piece
                if len(self._run) > _MAX_HELD_BYTES:
                    parts.append(self._take_whole_characters())
            elif piece:
                parts.append(self.flush())
                parts.append(piece.decode())
        return "".join(parts)

    def flush(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _take_whole_characters(self) -> str:
        """All of the run but an unfinished character at its end."""
        num_whole = len(self._run)
        try:
            self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.end == len(self._run):
                num_whole = error.start
        unfinished = self._run[num_whole:]
        del self._run[num_whole:]
        text = self.flush()
        self._run = unfinished
        return text


class _WindowDetokenizer:
    """Decodes the last few tokens with and without the new one; the difference is the new text."""

    def __init__(self, backend: BackendTokenizer, context: Sequence[int]) -> None:
        self._backend = backend
        self._known = list(context[-_WINDOW_CONTEXT_TOKENS:])
        self._known_text = self._decode(self._known)
        self._new: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            self._new.append(token_id)
            text = self._decode(self._known + self._new)
            if not text.endswith(REPLACEMENT) or len(self._new) >= _MAX_WINDOW_TOKENS:
                parts.append(self._advance(text))
        return "".join(parts)

    def flush(self) -> str:
        return self._advance(self._decode(self._known + self._new)) if self._new else ""

    def _advance(self, text: str) -> str:
        delta = text[len(self._known_text) :]
        self._known, self._new = self._new, []
        self._known_text = self._decode(self._known)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))


def _family_of(backend: BackendTokenizer) -> _Family:
    if backend.decoder is None:
        return _Family.OTHER
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Family.BYTE_LEVEL
    if "ByteFallback" in kinds and all(_is_sentence_piece_step(step) for step in steps):
        return _Family.SENTENCE_PIECE
    return _Family.OTHER


def _is_sentence_piece_step(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Replace":
            return bool(step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ")
        case "Strip":
            # It strips the beginning of the whole text, which is the prompt's here.
            return bool(step["stop"] == 0)
        case kind:
            return kind in ("ByteFallback", "Fuse")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves, the other 68 from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR: Final = _byte_alphabet()
