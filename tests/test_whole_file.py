"""Files that are there in full, or as they were."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

    def full(self: Path, data: bytes) -> int:
        self.write_text(data.decode()[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "the new one")
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        write_whole(pipe, "text")
        assert read.result() == "text"
    assert pipe.is_fifo()


def test_writers_at_the_same_time_leave_one_of_their_texts(tmp_path: Path) -> None:
    path, texts = tmp_path / "file", [str(number) * 10_000 for number in range(4)]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(write_whole, [path] * 40, texts * 10))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]
