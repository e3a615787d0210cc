"""Detecting which servers use a state folder: each keeps a locked file in it.

The lock ends with the process, however that ends, so a file that can be locked belongs to a dead server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loraplex.core.errors import StorageError

MARKS_FOLDER: Final = "servers"
_SUFFIX: Final = ".lock"


class ServerMark:
    """The lock file of this server."""

    def __init__(self, state_dir: Path, base_model: str) -> None:
        self._folder = state_dir / MARKS_FOLDER
        self._path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}"
        self._base_model = base_model
        self._fd: int | None = None
        self.renew()

    def renew(self) -> None:
        """Make the file again after the folder was lost. Raises StorageError."""
        self._release()
        temporary = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, json.dumps({"base_model": self._base_model}).encode())
            os.rename(temporary, self._path)  # locked before other servers can find it
        except OSError as exc:
            raise StorageError(
                f"the state folder cannot be marked as in use ({self._path}: {exc.strerror}); "
                "make it writable, or choose another"
            ) from exc

    def others(self) -> list[int]:
        """Return the process ids of other servers of the same base model that use the state folder now.

        A server whose file cannot be read, such as another user's, counts as one of them: names that it may
        serve must not be removed.
        """
        return [pid for pid, base_model in self._running() if base_model in (self._base_model, None)]

    def namesakes(self) -> list[tuple[int, str]]:
        """Return process id and model of each other server whose base model has the same shape but another
        name, which may be a mistake."""
        own_name, _, own_shape = self._base_model.rpartition("@")
        found = []
        for pid, base_model in self._running():
            name, _, shape = (base_model or "").rpartition("@")
            if base_model is not None and shape == own_shape and name != own_name:
                found.append((pid, name))
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._release()

    def _running(self) -> Iterator[tuple[int, str | None]]:
        """Yield process id and base model of each other running server; None if its file does not say
        which."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path != self._path and _is_locked(path):
                with contextlib.suppress(FileNotFoundError):  # it ended just now
                    yield int(path.name.partition("-")[0]), _read_base_model(path)

    def _release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_locked(path: Path) -> bool:
    """Return whether a server's file is locked or cannot be opened; remove it if its server is dead."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: other servers may be checking it too
    except OSError:
        return True
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    finally:
        os.close(fd)


def _read_base_model(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_bytes())["base_model"])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None
