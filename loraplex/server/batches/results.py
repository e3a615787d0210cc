"""The results of a batch on disk, which also say how far it is: a request is done when its line is there.

Lines are only appended, so after a kill -9 all but the last are whole, and that one is cut off. Files are
written in a thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from loraplex.server.batches.store import storage_errors
from loraplex.server.decoders import decode_json


class LineResponse(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class LineResult(msgspec.Struct, kw_only=True):
    """One line of results, in OpenAI's format: `response` if the request was sent, else `error`."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class _Done(msgspec.Struct):
    custom_id: str


def new_result_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"


class ResultFile:
    """One of the two files of a batch: answers, or errors. `done`: the requests whose results it has."""

    def __init__(self, path: Path) -> None:
        """Open the file, and cut off a line that is not whole. Raises StorageError."""
        self._path = path
        self.done: set[str] = set()
        self.num_bytes = 0
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = os.fdopen(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0
            )
            for custom_id, num_bytes in _whole_lines(path):
                self.done.add(custom_id)
                self.num_bytes += num_bytes
            self._file.truncate(self.num_bytes)
            self._file.seek(self.num_bytes)

    def append(self, results: Iterable[LineResult]) -> None:
        """Write results, all or none, so that they outlive this process. Raises StorageError; the same
        results may be written again later."""
        results = list(results)
        if not results:
            return
        data = b"".join(msgspec.json.encode(each) + b"\n" for each in results)
        try:
            with storage_errors(self._path):
                written = 0
                while written < len(data):
                    written += self._file.write(data[written:])
                os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(self.num_bytes)
            self._file.seek(self.num_bytes)
            raise
        self.num_bytes += len(data)
        self.done.update(each.custom_id for each in results)

    def close(self) -> None:
        self._file.close()


class BatchResults:
    """The results of a batch: `answers`, and `failures` with the status or error of those that failed."""

    def __init__(self, answers: Path, failures: Path) -> None:
        """Raises StorageError."""
        self.answers = ResultFile(answers)
        self.failures = ResultFile(failures)

    @property
    def done(self) -> set[str]:
        return self.answers.done | self.failures.done

    def append(self, results: Sequence[LineResult]) -> None:
        """Write results; those that are there already are left out. Raises StorageError."""
        new = [each for each in results if each.custom_id not in self.answers.done]
        new = [each for each in new if each.custom_id not in self.failures.done]
        self.answers.append(each for each in new if each.is_success)
        self.failures.append(each for each in new if not each.is_success)

    def close(self) -> None:
        self.answers.close()
        self.failures.close()


def _whole_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield custom_id and size of each line, up to the first that is not whole."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                done = decode_json(line, _Done)
            except (msgspec.DecodeError, UnicodeError):
                return
            yield done.custom_id, len(line)
