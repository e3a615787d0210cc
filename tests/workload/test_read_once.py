"""A file is read once, until it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.workload.counted_files import read_maf
from loraplex.workload.errors import WorkloadError
from loraplex.workload.read_once import read_once


def test_a_file_is_read_again_only_after_it_changed(tmp_path: Path) -> None:
    read: list[str] = []

    @read_once
    def text_of(path: Path) -> str:
        read.append(path.name)
        return path.read_text()

    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("first")
    other.write_text("second")
    assert [text_of(path) for path in (one, other, one, other)] == ["first", "second"] * 2
    assert read == ["one", "other"]
    one.write_text("other")  # as long as before, so that its time must tell
    os.utime(one, ns=(1, 1))
    assert text_of(one) == "other"
    assert read == ["one", "other", "one"]


def test_what_is_wrong_with_a_file_is_said_every_time(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    for _ in range(2):
        with pytest.raises(WorkloadError, match="No such file"):
            read_maf(path)
    path.write_text("function,minute,count\n")
    for _ in range(2):
        with pytest.raises(WorkloadError, match="no requests in it"):
            read_maf(path)


def test_a_pipe_is_read_every_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[Path] = []
    note = read_once(read.append)
    note(path)
    note(path)
    assert read == [path, path]
