"""The results of a batch on disk: what a killed process leaves, and a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import DiskFullError, StorageError
from loraplex.server.batches.results import LineError, LineResult, ResultFile
from loraplex.server.batches.store import BatchStore


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


def test_a_damaged_batch_is_left_out(tmp_path: Path) -> None:
    store = BatchStore(root=tmp_path, base_model="base")
    (tmp_path / "all").mkdir()
    for suffix in (".open", ".json"):
        (tmp_path / "all" / "batch_1").with_suffix(suffix).write_text("{")
    upload = tmp_path / "all" / "file-1.jsonl"
    upload.touch()
    os.utime(upload, (1, 1))
    damaged: list[StorageError] = []
    assert store.open_batches(damaged.append) == []
    assert "batch_1.json is damaged" in str(damaged[0])
    store.remove_abandoned()
    assert upload.exists(), "it may be a result of that batch"


MANY_THREADS = """
import sys, threading
import msgspec
from loraplex.server.decoders import decode_json
sys.setswitchinterval(1e-6)
for number in range(300):
    inner = msgspec.defstruct("Inner", [(f"f{i}", int | None, None) for i in range(20)])
    kind = msgspec.defstruct("Outer", [("inner", inner | None, None), ("others", list[inner], [])])
    barrier = threading.Barrier(4)
    def read():
        barrier.wait()
        decode_json(b'{"others": [{"f1": 1}]}', kind)
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_meet_a_struct_at_the_same_time() -> None:
    """Decoding with `type=` crashes this process most of the time."""
    assert subprocess.run([sys.executable, "-c", MANY_THREADS], timeout=120).returncode == 0


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
