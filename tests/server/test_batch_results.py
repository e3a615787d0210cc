"""The results of a batch on disk: what a killed process leaves, and a full disk."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import DiskFullError
from loraplex.server.batches.results import LineError, LineResult, ResultFile


def result(custom_id: str) -> LineResult:
    return LineResult(id="batch_req_1", custom_id=custom_id, error=LineError(code="c", message="m"))


@pytest.mark.parametrize("torn", [b'{"id":"1","cust', b"\0" * 64, b"\0" * 63 + b"\n", b"\xff\n", b"{}\n"])
def test_a_line_that_is_not_whole_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "results.jsonl"
    file = ResultFile(path)
    file.append([result("a"), result("b")])
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    again = ResultFile(path)
    assert again.done == {"a", "b"}
    again.append([result("c")])
    again.close()
    assert path.read_bytes() == whole + whole[: len(whole) // 2].replace(b'"a"', b'"c"')


class FullDisk:
    """A file on a disk that takes half of what is written, then nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.room = 100

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl")
    file.append([result("a")])
    disk = file._file = FullDisk(file._file)  # type: ignore[assignment]
    with pytest.raises(DiskFullError, match="delete files"):
        file.append([result("b"), result("c")])
    assert (tmp_path / "results.jsonl").read_bytes().count(b"\n") == 1
    assert file.done == {"a"}
    disk.room = 1000
    file.append([result("b"), result("c")])
    file.close()
    with closing(ResultFile(tmp_path / "results.jsonl")) as again:
        assert again.done == {"a", "b", "c"}
