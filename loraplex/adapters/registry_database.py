"""The registry's SQLite file: opening it, its schema, and its errors explained.

WAL mode: readers in other processes never wait for a writer, and a killed process leaves nothing half
written. synchronous=FULL: registering is rare and one transaction takes any number of adapters, so an
fsync each is cheap, and an adapter that was reported as loaded is still there after a power failure.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from loraplex.core.errors import DiskFullError, StorageError

SCHEMA_VERSION: Final = 7

START_AFRESH: Final = (
    "stop the servers that use it, move it away together with its -wal and -shm files, "
    "and register the adapters again"
)

_APPLICATION_ID: Final = 0x6C6F7078  # "lopx": tells our file from any other SQLite file
_BUSY_TIMEOUT_S: Final = 10.0

COLUMNS: Final = (
    "base_model", "name", "version", "path", "spec", "loaded_at", "origin", "source", "canary", "previous",
)  # fmt: skip
_NAMES: Final = ", ".join(COLUMNS)

# Not WITHOUT ROWID: SQLite's quick_check finds damage in such a table if its key is not its first columns.
_CREATE: Final = """
CREATE TABLE adapters (
    base_model TEXT NOT NULL,
    name       TEXT NOT NULL,
    version    TEXT NOT NULL,
    path       TEXT NOT NULL,
    spec       TEXT NOT NULL,
    loaded_at  REAL NOT NULL,
    origin     TEXT NOT NULL,
    source     TEXT,
    canary     TEXT,
    previous   TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (base_model, name)
)
"""
_UPGRADES: Final[Mapping[int, Sequence[str]]] = {
    # Schema 1 did not record the origin. Entries that no folder brings back must not be lost, so assume the
    # API.
    1: ("ALTER TABLE adapters ADD COLUMN origin TEXT NOT NULL DEFAULT 'api'",),
    # Up to schema 2 all adapters were folders of the user.
    2: ("ALTER TABLE adapters ADD COLUMN source TEXT",),
    # Up to schema 5 a name had the version it stands for, and no other.
    5: (
        "ALTER TABLE adapters ADD COLUMN canary TEXT",
        "ALTER TABLE adapters ADD COLUMN previous TEXT NOT NULL DEFAULT '[]'",
    ),
    # In schemas 5 and 6 each server had its own row for a name (column `writer`, since 4). Of several rows
    # the last one inserted stays: one of the API, since folders are found again, and of those the latest.
    6: (
        "ALTER TABLE adapters RENAME TO old",
        _CREATE,
        f"""
        INSERT OR REPLACE INTO adapters ({_NAMES})
        SELECT {_NAMES} FROM old ORDER BY origin = 'api', loaded_at
        """,
        "DROP TABLE old",
    ),
}
"""Statements that upgrade each schema to the next one; schemas without an entry need none."""


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as StorageError, with the fix."""
    try:
        yield
    except sqlite3.Error as exc:
        raise _error_of(exc, path) from exc


def connect(path: Path) -> sqlite3.Connection:
    """Open or create the database and upgrade it to the current schema. Raises sqlite3.Error or
    StorageError."""
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def file_identity(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Return device and inode of the database and its write-ahead log; None for a missing file."""
    return tuple(_identity(file) for file in (path, path.with_name(f"{path.name}-wal")))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN")  # one snapshot: another server may make the table between the two reads
    [num_tables] = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    [application_id] = connection.execute("PRAGMA application_id").fetchone()
    connection.execute("COMMIT")
    if application_id != _APPLICATION_ID and num_tables > 0:
        raise StorageError(f"{path} is the database of another program; choose another state folder")
    mode = _write_ahead(connection)
    if mode != "wal":
        raise StorageError(
            f"{path}: SQLite cannot use a write-ahead log there; put the state folder on a local disk"
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")  # two processes that start at once: one makes the table
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"{path} was written by a newer version (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade, or choose another state folder"
        )
    if version == 0:
        connection.execute(_CREATE)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    else:
        for each in range(version, SCHEMA_VERSION):
            for statement in _UPGRADES.get(each, ()):
                connection.execute(statement)
    if version < SCHEMA_VERSION:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StorageError(f"{path} is damaged ({verdict}); {START_AFRESH}")


def _write_ahead(connection: sqlite3.Connection) -> str:
    """Turn on the write-ahead log and return the journal mode.

    If two servers do so on a new file, SQLite refuses one of them at once, whatever its timeout: try again.
    """
    until_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            [mode] = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return str(mode)
        except sqlite3.OperationalError as error:
            if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
            time.sleep(0.01)  # SQLite has no notification of when the other server is done


def _primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code, without the extended part; 0 if the error has no code."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _error_of(exc: sqlite3.Error, path: Path) -> StorageError:
    code = _primary_code(exc)
    if code == sqlite3.SQLITE_FULL:
        return DiskFullError(
            f"{path.parent}: the disk is full, nothing was changed; free some space and try again, or choose "
            "another state folder"
        )
    return StorageError(_explain(exc, code, path))


def _explain(exc: sqlite3.Error, code: int, path: Path) -> str:
    """Return what went wrong and the fix."""
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"{path} cannot be written ({exc}); make the state folder writable, or choose another"
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return f"{path} is damaged ({exc}); {START_AFRESH}"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} has been locked by another process for {_BUSY_TIMEOUT_S:g} s; stop it, or try again"
    if code == sqlite3.SQLITE_IOERR:
        return f"{path}: the disk refused a write ({exc}), nothing was changed; check the disk and its space"
    return f"{path}: {exc}"
