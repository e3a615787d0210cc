"""Count the values of a JSON text without decoding it.

Decoding holds the GIL, and its cost depends on the number of values: a body of a few megabytes may be one
string or a million lists. numpy counts them without the GIL, so that too large a body is refused in a thread.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_COMMA: Final = ord(",")
_BRACE: Final = ord("{")
_BRACKET: Final = ord("[")


class JsonSize(NamedTuple):
    """Counts of a JSON text. `num_commas` outside strings: approximately the number of values."""

    num_commas: int
    num_objects: int
    num_lists: int


def json_size(body: bytes | bytearray) -> JsonSize:
    """Count characters outside strings. The text need not be valid JSON."""
    data = np.frombuffer(body, dtype=np.uint8)
    quotes = data == _QUOTE
    quotes[_escaped(data)] = False
    outside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) == 0
    return JsonSize(
        num_commas=int(np.count_nonzero((data == _COMMA) & outside)),
        num_objects=int(np.count_nonzero((data == _BRACE) & outside)),
        num_lists=int(np.count_nonzero((data == _BRACKET) & outside)),
    )


def _escaped(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return the indices of characters after a backslash that is not itself escaped."""
    places = np.flatnonzero(data == _BACKSLASH)
    if places.size == 0:
        return places
    begins_run = np.diff(places, prepend=-2) != 1
    run_starts = places[begins_run][np.cumsum(begins_run) - 1]
    escaped: npt.NDArray[np.intp] = places[(places - run_starts) % 2 == 0] + 1
    return escaped[escaped < data.size]
