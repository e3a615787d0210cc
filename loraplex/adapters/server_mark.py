"""Which servers use a state folder now: each keeps a locked file in it.

The lock goes with the process, however that ends, so a file that can be locked belongs to a dead server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Final

from loraplex.core.errors import StorageError

MARKS_FOLDER: Final = "servers"
_SUFFIX: Final = ".lock"


class ServerMark:
    """This server's file. `writer` is its name, which registry entries carry."""

    def __init__(self, state_dir: Path, base_model: str) -> None:
        self.writer = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._folder = state_dir / MARKS_FOLDER
        self._base_model = base_model
        self._fd: int | None = None
        self.renew()

    def renew(self) -> None:
        """Make the file again, after the folder was lost."""
        self._release()
        path = self._path(self.writer)
        temporary = path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, json.dumps({"base_model": self._base_model}).encode())
            os.rename(temporary, path)  # locked before anybody can find it
        except OSError as exc:
            raise StorageError(
                f"the state folder cannot be marked as in use ({path}: {exc.strerror}); "
                "make it writable, or choose another"
            ) from exc

    def is_alive(self, writer: str) -> bool:
        """Return whether the server that calls itself `writer` is running; files of dead ones are removed.

        One whose file cannot be read, such as that of another user, counts as running: what it holds must
        not be taken from it on a guess.
        """
        if writer == self.writer:
            return True
        path = self._path(writer)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may be asking the same
        except OSError:
            return True
        else:
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        finally:
            os.close(fd)

    def others(self) -> list[int]:
        """Process ids of other servers of the same base model that use the state folder now."""
        found = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            writer = path.name.removesuffix(_SUFFIX)
            if writer != self.writer and self.is_alive(writer) and self._may_serve_same(path):
                found.append(pid_of(writer))
        return found

    def _may_serve_same(self, path: Path) -> bool:
        """Return whether a server's file names this base model, or cannot be read."""
        try:
            return bool(json.loads(path.read_bytes())["base_model"] == self._base_model)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path(self.writer).unlink()
        self._release()

    def _path(self, writer: str) -> Path:
        return self._folder / f"{writer}{_SUFFIX}"

    def _release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def pid_of(writer: str) -> int:
    """The process id in a writer's name."""
    return int(writer.partition("-")[0])
