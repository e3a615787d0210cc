"""Incremental detokenizing: constant time per token, and never half a character.

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

# If a run of byte tokens as a whole is not valid UTF-8, the SentencePiece decoder turns each of them into
# a replacement character. To match that, a run is held back until it ends, which would stall scripts
# written in byte tokens only; longer runs than this are shown character by character.
_MAX_HELD_BYTES: Final = 32
_WINDOW_CONTEXT_TOKENS: Final = 4
_MAX_WINDOW_TOKENS: Final = 8


class Detokenizer(Protocol):
    """Converts one request's tokens to text. Special tokens (end of turn and the like) add nothing, except
    those that are to be shown."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain after these tokens."""
        ...

    def flush(self) -> str:
        """Return the text held back, with replacement characters for incomplete characters."""
        ...

    def take_offsets(self) -> list[int]:
        """Return the offsets of tokens in the text, in characters and in order, each token once.

        A token that continues a character begins where that character does. A token is left for a later call
        until it is certain which characters its bytes become. Only for detokenizers made `with_offsets`.
        """
        ...


class _Family(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCE_PIECE = "SentencePiece"
    OTHER = "other"


class PieceTable:
    """The bytes of each token; looked up on first use and cached."""

    def __init__(self, backend: BackendTokenizer) -> None:
        self.backend = backend
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._family = _family_of(backend)
        self._pieces: dict[int, bytes] = {}

    def piece(self, token_id: int) -> bytes:
        """Return the token's bytes: the name of a special token, nothing for an unknown id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._look_up(token_id)
        return piece

    def longest_piece_bytes(self) -> int | None:
        """Return the bytes of the longest token; None for tokenizers that may drop parts of a text, or make
        one unknown token of a part of any length."""
        model = self.backend.model
        fuses_unknown = getattr(model, "fuse_unk", False) and not getattr(model, "byte_fallback", False)
        normalizer = type(self.backend.normalizer).__name__
        shortens = self._family is _Family.BYTE_LEVEL and normalizer not in ("NoneType", "NFC")
        if self._family is _Family.OTHER or fuses_unknown or shortens:
            return None
        return max(len(self._look_up(token_id)) for token_id in self.backend.get_vocab().values())

    def detokenizer(
        self,
        context: Sequence[int],
        *,
        with_offsets: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Return a new detokenizer for tokens that follow `context` (the prompt). `shown_ids`: special tokens
        whose names are part of the text."""
        hidden_ids = self.special_ids - shown_ids if shown_ids else self.special_ids
        match self._family:
            case _Family.BYTE_LEVEL:
                return _ByteLevelDetokenizer(self, hidden_ids, with_offsets=with_offsets)
            case _Family.SENTENCE_PIECE:
                return _SentencePieceDetokenizer(self, hidden_ids, with_offsets=with_offsets)
            case _Family.OTHER:
                return _WindowDetokenizer(self.backend, hidden_ids, context, with_offsets=with_offsets)

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token stands for one byte of a character (SentencePiece only)."""
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


class _Offsets:
    """The number of characters so far, and the offsets of tokens that were not taken yet."""

    def __init__(self) -> None:
        self.num_chars = 0
        self._untaken: list[int] = []

    def place(self, *distances: int) -> None:
        """Record tokens that begin this many characters after the text so far."""
        self._untaken += [self.num_chars + distance for distance in distances]

    def take(self) -> list[int]:
        taken, self._untaken = self._untaken, []
        return taken


class _ByteLevelDetokenizer:
    def __init__(self, pieces: PieceTable, hidden_ids: frozenset[int], *, with_offsets: bool) -> None:
        self._piece = pieces.piece
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offsets = _Offsets() if with_offsets else None

    def push(self, token_ids: Iterable[int]) -> str:
        piece, hidden = self._piece, self._hidden_ids
        if self._offsets is None:
            return self._utf8.decode(b"".join([piece(i) for i in token_ids if i not in hidden]))
        return "".join([self._push_placed(b"" if i in hidden else piece(i)) for i in token_ids])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def take_offsets(self) -> list[int]:
        assert self._offsets is not None
        return self._offsets.take()

    def _push_placed(self, piece: bytes) -> str:
        assert self._offsets is not None
        held = self._utf8.getstate()[0]
        # Held bytes that cannot be continued become a replacement character, and the token begins after it.
        self._offsets.place(1 if held and piece and not _may_continue(held, piece[:1]) else 0)
        text = self._utf8.decode(piece)
        self._offsets.num_chars += len(text)
        return text


def _may_continue(held: bytes, byte: bytes) -> bool:
    """Return whether the byte completes or continues the character that the held bytes begin."""
    try:
        (held + byte).decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


class _SentencePieceDetokenizer:
    def __init__(self, pieces: PieceTable, hidden_ids: frozenset[int], *, with_offsets: bool) -> None:
        self._pieces = pieces
        self._hidden_ids = hidden_ids
        self._run = bytearray()
        self._offsets = _Offsets() if with_offsets else None
        self._waiting: list[int] = []
        """Tokens within the run, by the byte of it that they begin at: their offsets are not certain yet."""

    def push(self, token_ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            # A hidden token does not end a run of bytes: the tokenizer's own decoder drops it first.
            piece = b"" if token_id in self._hidden_ids else self._pieces.piece(token_id)
            if len(piece) == 1 and self._pieces.is_byte_token(token_id):
                self._place()
                self._run += piece
                if len(self._run) > _MAX_HELD_BYTES:
                    parts.append(self._take_whole_characters())
            elif piece:
                parts.append(self.flush())
                self._place()
                parts.append(self._count(piece.decode()))
            else:
                self._place()
        return "".join(parts)

    def flush(self) -> str:
        return self._release(len(self._run))

    def take_offsets(self) -> list[int]:
        assert self._offsets is not None
        return self._offsets.take()

    def _take_whole_characters(self) -> str:
        """Release the whole run except an incomplete character at its end."""
        num_whole = len(self._run)
        try:
            self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.end == len(self._run):
                num_whole = error.start
        return self._release(num_whole)

    def _release(self, num_bytes: int) -> str:
        """Return the first bytes of the run as text."""
        released = bytes(self._run[:num_bytes])
        del self._run[:num_bytes]
        try:
            text, is_valid = released.decode(), True
        except UnicodeDecodeError:
            text, is_valid = REPLACEMENT * num_bytes, False
        if self._waiting and self._offsets is not None:
            settled = [start for start in self._waiting if start <= num_bytes]
            self._waiting = [start - num_bytes for start in self._waiting[len(settled) :]]
            # "ignore" leaves out the character that the byte is a part of.
            self._offsets.place(
                *(len(released[:start].decode("utf-8", "ignore")) if is_valid else start for start in settled)
            )
        return self._count(text)

    def _place(self) -> None:
        """Record that a token begins here."""
        if self._offsets is None:
            return
        if self._run:
            self._waiting.append(len(self._run))
        else:
            self._offsets.place(0)

    def _count(self, text: str) -> str:
        if self._offsets is not None:
            self._offsets.num_chars += len(text)
        return text


class _WindowDetokenizer:
    """Decodes the last few tokens with and without the new one; the difference is the new text."""

    def __init__(
        self,
        backend: BackendTokenizer,
        hidden_ids: frozenset[int],
        context: Sequence[int],
        *,
        with_offsets: bool,
    ) -> None:
        self._backend = backend
        self._hidden_ids = hidden_ids
        self._known = list(context[-_WINDOW_CONTEXT_TOKENS:])
        self._known_text = self._decode(self._known)
        self._new: list[int] = []
        self._offsets = _Offsets() if with_offsets else None

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

    def take_offsets(self) -> list[int]:
        assert self._offsets is not None
        return self._offsets.take()

    def _advance(self, text: str) -> str:
        delta = text[len(self._known_text) :]
        if self._offsets is not None:
            self._offsets.place(
                *(self._num_whole_chars(count, len(delta)) for count in range(len(self._new)))
            )
            self._offsets.num_chars += len(delta)
        self._known, self._new = self._new, []
        self._known_text = self._decode(self._known)
        return delta

    def _num_whole_chars(self, count: int, limit: int) -> int:
        """Return how many characters the first `count` new tokens make, without incomplete ones."""
        if count == 0:
            return 0
        text = self._decode(self._known + self._new[:count]).rstrip(REPLACEMENT)
        return min(max(len(text) - len(self._known_text), 0), limit)

    def _decode(self, token_ids: list[int]) -> str:
        seen = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return str(self._backend.decode(seen, skip_special_tokens=False))


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
            # It strips the beginning of the whole text, which belongs to the prompt here.
            return bool(step["stop"] == 0)
        case kind:
            return kind in ("ByteFallback", "Fuse")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character: byte-level BPE writes printable Latin-1 bytes as themselves, the
    other 68 from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR: Final = _byte_alphabet()
