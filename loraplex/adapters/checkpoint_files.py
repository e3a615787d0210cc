"""The two files of a checkpoint, held open so that both are read in one unchanged state."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from loraplex.adapters.fingerprint import join_fingerprints
from loraplex.adapters.open_file import NotRegularFileError, OpenFile, open_regular
from loraplex.adapters.peft_config import MAX_CONFIG_BYTES
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import AdapterFormatError

PICKLE_FILE: Final = "adapter_model.bin"

# Kernels stamp files with the time of their last tick (10 ms at most), so two writes within one tick
# leave the same mtime. Waiting until a file is older than a tick makes any further write visible.
_MTIME_GRAIN_S: Final = 0.02


class FilesChangedError(Exception):
    """A file was written to or replaced while it was being read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenFile:
    path: Path
    file: FileIO
    status: os.stat_result

    def check_unchanged(self) -> None:
        """Compare with the open file (written to?) and with the path (replaced?)."""
        try:
            now = (os.fstat(self.file.fileno()), os.stat(self.path))
        except OSError as exc:
            raise FilesChangedError from exc
        if any(_identity(status) != _identity(self.status) for status in now):
            raise FilesChangedError


class CheckpointFiles:
    """Config and weights, open at their beginnings; a missing file is None and reported in `problems`."""

    def __init__(self, folder: Path, open_file: OpenFile = open_regular) -> None:
        self._open_file = open_file
        self.problems: list[AdapterFormatError] = []
        self._config: _OpenFile | None = None
        self._weights: _OpenFile | None = None
        try:
            self._config = self._open(
                folder / CONFIG_FILE, f"no {CONFIG_FILE} in {folder}; is it a PEFT checkpoint?"
            )
            self._weights = self._open(folder / WEIGHTS_FILE, _no_weights(folder))
        except BaseException:
            self.close()
            raise
        self._settle()

    @property
    def config(self) -> FileIO | None:
        return None if self._config is None else self._config.file

    @property
    def weights(self) -> FileIO | None:
        return None if self._weights is None else self._weights.file

    def read_config(self) -> bytes:
        """Return the config's bytes, at most one more than allowed, so that the caller sees that it is too
        long."""
        assert self.config is not None, "the caller looked"
        data = b""
        while chunk := self.config.read(MAX_CONFIG_BYTES + 1 - len(data)):
            data += chunk
        return data

    def check_unchanged(self) -> None:
        """Raise FilesChangedError if either file has changed since it was opened."""
        for each in (self._config, self._weights):
            if each is not None:
                each.check_unchanged()

    def fingerprint(self) -> str:
        assert self._config is not None, "both files were read"
        assert self._weights is not None, "both files were read"
        return join_fingerprints(weights=self._weights.status, config=self._config.status)

    def close(self) -> None:
        for each in (self._config, self._weights):
            if each is not None:
                each.file.close()

    def _open(self, path: Path, if_missing: str) -> _OpenFile | None:
        try:
            file = self._open_file(path)
        except NotRegularFileError:
            self.problems.append(AdapterFormatError(f"{path} is not a regular file"))
        except FileNotFoundError:
            self.problems.append(AdapterFormatError(if_missing))
        except OSError as exc:
            self.problems.append(AdapterFormatError(f"{path} cannot be read: {exc.strerror}"))
        else:
            return _OpenFile(path=path, file=file, status=os.fstat(file.fileno()))
        return None

    def _settle(self) -> None:
        opened = [each.status.st_mtime_ns for each in (self._config, self._weights) if each is not None]
        age_s = (time.time_ns() - max(opened, default=0)) / 1e9
        if 0.0 <= age_s < _MTIME_GRAIN_S:
            time.sleep(_MTIME_GRAIN_S - age_s)


@contextmanager
def open_checkpoint(folder: Path, open_file: OpenFile = open_regular) -> Iterator[CheckpointFiles]:
    """Open a checkpoint folder; AdapterFormatError if it is not a folder at all."""
    _check_folder(folder)
    files = CheckpointFiles(folder, open_file)
    try:
        yield files
    finally:
        files.close()


def _check_folder(folder: Path) -> None:
    try:
        str(folder).encode()  # the registry stores paths as text
        status = os.stat(folder)
    except ValueError as exc:
        raise AdapterFormatError(f"{str(folder)!r} is not a usable path; use UTF-8 names") from exc
    except FileNotFoundError as exc:
        raise AdapterFormatError(f"there is no folder {folder}") from exc
    except OSError as exc:
        raise AdapterFormatError(f"{folder} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISDIR(status.st_mode):
        raise AdapterFormatError(f"{folder} is a file; name the folder that holds {CONFIG_FILE}")


def _no_weights(folder: Path) -> str:
    if os.path.exists(folder / PICKLE_FILE):
        return (
            f"only {PICKLE_FILE} is in {folder}, and pickles are never opened because they can run code; "
            "load the adapter with PEFT where you trust it and save it with "
            "save_pretrained(..., safe_serialization=True)"
        )
    return f"no {WEIGHTS_FILE} in {folder}; save the adapter with PEFT's save_pretrained"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
