"""The files and batches on disk.

    STATE_DIR/batches/OWNER/file-ID.json     an uploaded file, or the results of a batch
                            file-ID.jsonl    its content
                            batch_ID.json    a batch; written by the process that holds its lock
                            batch_ID.open    exists until the batch has ended; locked by who runs it
                            batch_ID.cancel  somebody wants it cancelled

An owner is a tenant, or all clients of servers without tenants; nothing leads from one owner's folder to
another's. Content comes before its JSON, so a file that is listed is whole, whenever the process was killed.
Servers may share the folder: nothing is kept in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from loraplex.core.errors import DiskFullError, StorageError
from loraplex.core.whole_file import write_whole
from loraplex.server.batches.objects import (
    ENDED,
    BatchObject,
    BatchStatus,
    BatchWait,
    FileObject,
    FilesQuery,
    PageQuery,
    StoredBatch,
    new_id,
)
from loraplex.server.decoders import decode_json
from loraplex.server.errors import ConflictError, NotFoundError

_FILE_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{32}")
_FOLDER: Final = "batches"
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_ABANDONED_S: Final = 3600.0
_MODE: Final = 0o600
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Limits on files and batches; those of an owner count what is on disk."""

    max_file_bytes: int = 200 * 10**6
    max_lines: int = 100_000
    max_owner_bytes: int = 20 * 10**9
    max_owner_files: int = 10_000
    max_open_batches: int = 100


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise OSError as StorageError, with the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskFullError(
                "the disk of the state folder is full; delete files (DELETE /v1/files/ID) or free some "
                "space, and try again"
            ) from error
        raise StorageError(
            f"the folder of batches cannot be used ({error.strerror}); make {path} writable, or start the "
            "server with another --state-dir"
        ) from error


@dataclass(frozen=True, kw_only=True)
class BatchStore:
    """`base_model`: the server's, as the registry of adapters knows it: servers of other base models leave
    its batches alone. `listeners`: called when a batch was made or is to be cancelled. `waits`: why batches
    that run here do not go on, by id."""

    root: Path
    base_model: str
    limits: BatchLimits = field(default_factory=BatchLimits)
    wall_clock_s: Callable[[], float] = time.time
    listeners: list[Callable[[], None]] = field(default_factory=list)
    waits: dict[str, BatchWait] = field(default_factory=dict)

    @classmethod
    def at(cls, state_dir: Path, base_model: str) -> BatchStore:
        return cls(root=state_dir / _FOLDER, base_model=base_model)

    def owned_by(self, tenant: str) -> OwnedFiles:
        """Return the files and batches of a tenant; of all clients where there are no tenants."""
        return OwnedFiles(store=self, tenant=tenant, folder=self.root / _folder_name(tenant))

    def changed(self) -> None:
        for listener in self.listeners:
            listener()

    def open_batches(self, on_damaged: Callable[[StorageError], None]) -> list[StoredBatch]:
        """Return this server's batches that have not ended, oldest first. `on_damaged`: called for those that
        cannot be read."""
        found = []
        with storage_errors(self.root):
            for mark in sorted(self.root.glob("*/batch_*.open"), key=lambda path: path.name):
                try:
                    stored = _read(mark.with_suffix(".json"), StoredBatch)
                except StorageError as error:
                    on_damaged(error)
                    continue
                if stored is not None and stored.base_model == self.base_model:
                    found.append(stored)
        return found

    def remove_abandoned(self) -> None:
        """Remove what killed processes left: uploads that were cut, and contents without their JSON. Nothing
        while a batch is damaged: its results are not known."""
        before_s = time.time() - _ABANDONED_S  # of the files' own times
        damaged: list[StorageError] = []
        open_batches = self.open_batches(damaged.append)
        if damaged:
            return
        kept = {name for each in open_batches for name in (each.result_id, each.failure_id)}
        with storage_errors(self.root):
            for path in self.root.glob("*/file-*"):
                is_whole = path.suffix == ".json" or path.with_suffix(".json").exists()
                if is_whole or path.stem in kept:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < before_s:
                        path.unlink()


@dataclass(frozen=True, kw_only=True)
class OwnedFiles:
    """The folder of one owner. Its methods read and write files: call them in a thread."""

    store: BatchStore
    tenant: str
    folder: Path

    # ---- files

    def new_content(self) -> tuple[str, Path]:
        """Return the id of a new file, and the path to write its content to. Raises ConflictError if the
        owner has as much as it may have."""
        limits = self.store.limits
        with storage_errors(self.folder):
            _make_folder(self.folder)
            sizes = [path.stat().st_size for path in self.folder.glob("file-*.jsonl")]
        if len(sizes) >= limits.max_owner_files or sum(sizes) >= limits.max_owner_bytes:
            raise ConflictError(
                f"there are {len(sizes):,} files of {sum(sizes):,} bytes, and at most "
                f"{limits.max_owner_files:,} of {limits.max_owner_bytes:,} may be kept; delete some "
                "(DELETE /v1/files/ID)",
                code="too_many_files",
            )
        file_id = self.new_file_id()
        return file_id, self.content_path(file_id)

    def new_file_id(self) -> str:
        return new_id("file", self.store.wall_clock_s())

    def content_path(self, file_id: str) -> Path:
        assert _FILE_ID.fullmatch(file_id)
        return self.folder / f"{file_id}.jsonl"

    def add(self, file: FileObject) -> FileObject:
        """List a file whose content was written."""
        with storage_errors(self.folder):
            write_whole(self.folder / f"{file.id}.json", msgspec.json.encode(file), mode=_MODE)
        return file

    def file(self, file_id: str, *, param: str = "file_id") -> FileObject:
        """Raises NotFoundError that blames `param`."""
        found = None
        if _FILE_ID.fullmatch(file_id):
            with storage_errors(self.folder):
                found = _read(self.folder / f"{file_id}.json", FileObject)
        if found is None:
            raise NotFoundError(f"there is no file {file_id[:64]!r}; GET /v1/files lists them", param=param)
        return found

    def files(self, query: FilesQuery) -> tuple[list[FileObject], bool]:
        """Return a page of files, and whether there are more."""
        names = self._names("file-", _FILE_ID)
        found: list[FileObject] = []
        for name in _from(names, query.after, is_descending=query.order == "desc"):
            file = _read(self.folder / f"{name}.json", FileObject)
            if file is None or query.purpose not in (None, file.purpose):
                continue
            if len(found) == query.limit:
                return found, True
            found.append(file)
        return found, False

    def delete_file(self, file_id: str) -> None:
        """Raises NotFoundError, and ConflictError if a batch needs it."""
        self.file(file_id)
        for each in self._open():
            if each.batch.input_file_id == file_id:
                raise ConflictError(
                    f"batch {each.batch.id} reads this file; cancel it, or wait until it has ended",
                    code="file_in_use",
                )
        with storage_errors(self.folder):
            (self.folder / f"{file_id}.json").unlink(missing_ok=True)  # it is not listed any more
            self.content_path(file_id).unlink(missing_ok=True)

    # ---- batches

    def create_batch(self, batch: BatchObject) -> BatchObject:
        """Raises NotFoundError without its input, and ConflictError if too many are open."""
        self.file(batch.input_file_id, param="input_file_id")
        limit = self.store.limits.max_open_batches
        if len(list(self._open())) >= limit:
            raise ConflictError(
                f"{limit:,} batches have not ended; cancel one, or wait", code="too_many_batches"
            )
        stored = StoredBatch(
            batch=batch,
            tenant=self.tenant,
            base_model=self.store.base_model,
            result_id=self.new_file_id(),
            failure_id=self.new_file_id(),
        )
        mark = self.folder / f"{batch.id}.open"
        with storage_errors(self.folder):
            mark.touch(_MODE)  # first: a batch without it would never be run
        try:
            self.save(stored)
        except StorageError:
            mark.unlink(missing_ok=True)
            raise
        return batch

    def wait_for_disk(self, batch_id: str, error: StorageError) -> None:
        """Show that a batch waits for the disk, until `save` succeeds or it is another server's. The error is
        the operator's: it names paths."""
        goes_on = "The batch goes on by itself then; what was answered is kept"
        if isinstance(error, DiskFullError):
            wait = BatchWait(
                code="disk_full",
                message="the server's disk is full: delete files that you do not need (DELETE /v1/files/ID), "
                f"or ask its operator for room. {goes_on}",
            )
        else:
            wait = BatchWait(
                code="storage_failed",
                message=f"the server's disk fails: ask its operator, whose log says why. {goes_on}",
            )
        self.store.waits[batch_id] = wait

    def no_wait(self, batch_id: str) -> None:
        """Show no longer that a batch waits: it goes on here, or with another server."""
        self.store.waits.pop(batch_id, None)

    def save(self, stored: StoredBatch) -> None:
        """Replace a batch on disk. Only for who holds its lock."""
        with storage_errors(self.folder):
            path = self.folder / f"{stored.batch.id}.json"
            write_whole(path, msgspec.json.encode(stored), mode=_MODE)
            if stored.batch.status in ENDED:
                for suffix in (".open", ".cancel"):
                    path.with_suffix(suffix).unlink(missing_ok=True)
        self.no_wait(stored.batch.id)

    def batch(self, batch_id: str) -> BatchObject:
        """Raises NotFoundError."""
        stored = None
        if _BATCH_ID.fullmatch(batch_id):
            with storage_errors(self.folder):
                stored = _read(self.folder / f"{batch_id}.json", StoredBatch)
        if stored is None:
            raise NotFoundError(
                f"there is no batch {batch_id[:64]!r}; GET /v1/batches lists them", param="batch_id"
            )
        return self._shown(stored.batch)

    def batches(self, query: PageQuery) -> tuple[list[BatchObject], bool]:
        """Return a page of batches, latest first, and whether there are more."""
        names = _from(self._names("batch_", _BATCH_ID), query.after, is_descending=True)
        stored = (_read(self.folder / f"{name}.json", StoredBatch) for name in names[: query.limit])
        return [self._shown(each.batch) for each in stored if each is not None], len(names) > query.limit

    def cancel(self, batch_id: str) -> BatchObject:
        """Ask for a batch to be cancelled. Raises NotFoundError, and ConflictError if it has ended."""
        found = self.batch(batch_id)
        if found.status in ENDED:
            raise ConflictError(f"the batch has ended: it is {found.status}", code="batch_ended")
        with storage_errors(self.folder):
            mark = self.folder / f"{batch_id}.cancel"
            if not mark.exists():
                write_whole(mark, str(int(self.store.wall_clock_s())), mode=_MODE)
        return self.batch(batch_id)

    def cancelling_at(self, batch_id: str) -> int | None:
        """Return when somebody asked for a batch to be cancelled; None if nobody did."""
        try:
            return int((self.folder / f"{batch_id}.cancel").read_text())
        except FileNotFoundError:
            return None

    @contextmanager
    def claim(self, batch_id: str) -> Iterator[bool]:
        """Yield whether this process may run the batch: another one does not, and it has not ended."""
        path = self.folder / f"{batch_id}.open"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path.exists()
        except BlockingIOError:
            yield False
        finally:
            os.close(lock)

    def stored(self, batch_id: str) -> StoredBatch | None:
        """Return a batch as it is on disk."""
        with storage_errors(self.folder):
            return _read(self.folder / f"{batch_id}.json", StoredBatch)

    def _open(self) -> Iterator[StoredBatch]:
        for mark in self.folder.glob("batch_*.open"):
            stored = _read(mark.with_suffix(".json"), StoredBatch)
            if stored is not None:
                yield stored

    def _shown(self, batch: BatchObject) -> BatchObject:
        if batch.status in ENDED:
            self.no_wait(batch.id)  # it may have ended with another server
            return batch
        if (wait := self.store.waits.get(batch.id)) is not None:
            batch = msgspec.structs.replace(batch, waits=wait)
        if (cancelling_at := self.cancelling_at(batch.id)) is None:
            return batch
        return msgspec.structs.replace(batch, status=BatchStatus.CANCELLING, cancelling_at=cancelling_at)

    def _names(self, prefix: str, pattern: re.Pattern[str]) -> list[str]:
        with storage_errors(self.folder):
            found = [path.stem for path in self.folder.glob(f"{prefix}*.json")]
        return [name for name in found if pattern.fullmatch(name)]


def _from(names: list[str], after: str | None, *, is_descending: bool) -> list[str]:
    """Return the names of a page and all later ones. A name that is gone still has its place."""
    if after is not None:
        names = [name for name in names if (name < after if is_descending else name > after)]
    return sorted(names, reverse=is_descending)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return decode_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise StorageError(f"{path} is damaged ({error}); move it away") from error


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _folder_name(tenant: str) -> str:
    """Return a folder's name for any name of a tenant."""
    return f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}" if tenant else "all"
