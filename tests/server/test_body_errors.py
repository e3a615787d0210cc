"""Saying why a body is refused takes no more work for a large body."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from loraplex.server.body_errors import not_json


class Seen:
    """A body that counts the bytes that are copied from it. It has no others to search: `re` refuses it."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._body)

    def __getitem__(self, part: slice) -> bytes:
        copied = self._body[part]
        self.num_bytes += len(copied)
        return copied

    def isspace(self) -> bool:
        return self._body.isspace()  # up to the first that is none


@pytest.mark.parametrize("unit", [b"abcdefgh ", rb"\u00e9", rb"\ud83d\ude00", rb"\\ud83d ", b"\\" * 8])
@pytest.mark.parametrize("end", [b"", b'"', rb"\ud83d and so on", rb"\ud83d\ud8", b"}", rb"\q"])
def test_what_follows_a_refusal_does_not_grow_with_the_body(unit: bytes, end: bytes) -> None:
    text = b'{"model": "m", "prompt": "' + unit * 50_000 + end
    with pytest.raises(msgspec.DecodeError) as refused:
        msgspec.json.decode(text)
    body = Seen(text)
    assert "the body is not valid JSON" in str(not_json(cast(bytes, body), str(refused.value)))
    assert body.num_bytes < 500
