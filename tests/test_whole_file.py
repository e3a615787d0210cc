"""Files that are there in full, or as they were."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.whole_file import write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("one\n", "two\n"):
        write_whole(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_in_full_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, "the old one")

    def full(self: Path, text: str, **_: Any) -> None:
        self.write_bytes(text.encode()[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "the new one")
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]
