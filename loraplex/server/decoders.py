"""Decode JSON into structs, from any thread."""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {}
_MAKING: Final = threading.Lock()


def decode_json(text: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Return what a JSON text holds. Raises errors of msgspec, UnicodeError and RecursionError.

    msgspec learns a struct when it first meets it, and must not do so in two threads at a time: the process
    would crash.
    """
    decoder: msgspec.json.Decoder[T] | None = _DECODERS.get(kind)
    if decoder is None:
        with _MAKING:
            decoder = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder.decode(text)
