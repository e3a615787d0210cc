"""The names of adapters and the versions they stand for, kept across restarts."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from loraplex.adapters.names import validate_adapter_name
from loraplex.adapters.registry_database import START_AFRESH, connect, file_identity, translated_errors
from loraplex.adapters.server_mark import ServerMark, pid_of
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.spec_json import spec_from_json, spec_to_json
from loraplex.core.errors import StorageError
from loraplex.core.hub import HubRepo, parse_hub_repo
from loraplex.core.shape import ModelShape

logger = logging.getLogger(__name__)

T = TypeVar("T")

DATABASE_FILE: Final = "registry.sqlite3"
_NUM_ATTEMPTS: Final = 3
_COLUMNS: Final = (
    "base_model", "name", "version", "path", "spec", "loaded_at", "origin", "source", "writer"
)  # fmt: skip
_PLACES: Final = f"({', '.join('?' * len(_COLUMNS))})"
# What is there already stays, unless it is an older entry of the same server, put back by another one.
_RESTORE: Final = f"""
INSERT INTO adapters VALUES {_PLACES} ON CONFLICT (base_model, name) DO UPDATE
SET {", ".join(f"{column} = excluded.{column}" for column in _COLUMNS[2:])}
WHERE adapters.writer = excluded.writer AND adapters.loaded_at < excluded.loaded_at
"""


class _Row(NamedTuple):
    """An entry as the database has it. `writer` is the server that wrote it (adapters.server_mark)."""

    base_model: str
    name: str
    version: str
    path: str
    spec: str
    loaded_at_s: float
    origin: str
    source: str | None
    writer: str


class Origin(StrEnum):
    """Who gave an adapter its name: a folder or adapter the server was started with, or a call of the API."""

    FOLDER = "folder"
    API = "api"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryEntry:
    """A name and the version it stands for. `loaded_at_s` is in seconds since 1970.

    `source` is the repository and commit that the files were fetched from; None if they are the user's own.
    """

    name: str
    spec: AdapterSpec
    loaded_at_s: float
    origin: Origin
    source: HubRepo | None = None


def base_model_key(model: str, shape: ModelShape) -> str:
    """What entries are kept under: a model's id or path, and its shape in case the path holds another now."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()
    return f"{model}@{digest[:16]}"


class AdapterRegistry:
    """Entries of one base model. Safe for several threads, and for several processes on one state folder.

    A name points to exactly one version; `put` moves it to another atomically. Every method raises
    StorageError when the disk does not play along, and then nothing has changed.

    Two servers on one state folder share its entries. One that another running server wrote is neither
    removed nor moved to another version here. If the folder or its database is deleted or replaced, it is
    made again by the next call, with all entries that this server knows.
    """

    def __init__(
        self, state_dir: Path, base_model: str, *, wall_clock_s: Callable[[], float] = time.time
    ) -> None:
        self._state_dir = state_dir
        self._path = state_dir / DATABASE_FILE
        self._base_model = base_model
        self._wall_clock_s = wall_clock_s
        self._lock = threading.RLock()
        self._known: dict[str, _Row] = {}
        _make_folder(state_dir)
        with ExitStack() as stack, translated_errors(self._path):
            self._connection = stack.enter_context(closing(connect(self._path)))
            self._mark = stack.enter_context(closing(ServerMark(state_dir, base_model)))
            self._transact(self._inherit)
            self._identity = file_identity(self._path)
            stack.pop_all()  # all went well: both stay open

    @property
    def other_servers(self) -> list[int]:
        """Process ids of other servers of this base model on this state folder."""
        return self._mark.others()

    def put(
        self, name: str, spec: AdapterSpec, *, origin: Origin = Origin.API, source: HubRepo | None = None
    ) -> None:
        """Make the name stand for this version, whatever it stood for before."""
        if blocked := self.put_many([(name, spec)], origin=origin, sources={name: source}):
            raise StorageError(
                f"another server (process {blocked[name]}) on the state folder {self._state_dir} has "
                f"registered {name!r} as another version; unload it there, use another name, or start one of "
                "the servers with a --state-dir of its own"
            )

    def put_many(
        self,
        adapters: Sequence[tuple[str, AdapterSpec]],
        *,
        origin: Origin = Origin.API,
        sources: Mapping[str, HubRepo | None] | None = None,
    ) -> dict[str, int]:
        """`put` for many names in one transaction. A name without source is a user's folder.

        Names that another running server has registered as another version are left as they are; the result
        has them, with that server's process id.
        """
        now_s = self._wall_clock_s()
        rows = {
            name: _Row(
                self._base_model,
                validate_adapter_name(name),
                spec.version,
                str(spec.path),
                spec_to_json(spec),
                now_s,
                origin.value,
                _source_text((sources or {}).get(name)),
                self._mark.writer,
            )
            for name, spec in adapters
        }

        def put_rows(connection: sqlite3.Connection) -> dict[str, int]:
            foreign = self._foreign(connection, rows)
            blocked = {name: pid for name, (version, pid) in foreign.items() if version != rows[name].version}
            free = [row for name, row in rows.items() if name not in blocked]
            connection.executemany(f"INSERT OR REPLACE INTO adapters VALUES {_PLACES}", free)
            return blocked

        with self._lock:
            blocked = self._write(put_rows)
            self._known |= {name: row for name, row in rows.items() if name not in blocked}
        return blocked

    def remove(self, name: str) -> bool:
        """Forget a name; False if it was not there, or stays because another running server wrote it."""
        num_removed, kept = self._remove([name])
        for pid in kept.values():
            logger.warning(
                "adapter %r stays in the state folder %s, as another server (process %d) registered it",
                name,
                self._state_dir,
                pid,
            )
        return num_removed > 0

    def remove_many(self, names: Sequence[str]) -> None:
        """`remove` for many names in one transaction: all that no other running server wrote, or none."""
        self._remove(names)

    def get(self, name: str) -> RegistryEntry | None:
        found = [row for row in self._rows() if row.name == name]
        return _entry_of(self._path, found[0]) if found else None

    def names(self) -> list[str]:
        """All names, sorted."""
        return [row.name for row in self._rows()]

    def all(self) -> list[RegistryEntry]:
        """All entries, sorted by name."""
        with self._lock:
            rows = self._rows()
            self._known = {row.name: row for row in rows}
        return [_entry_of(self._path, row) for row in rows]

    def close(self) -> None:
        with self._lock, translated_errors(self._path):
            self._connection.close()
            self._mark.close()

    def _remove(self, names: Sequence[str]) -> tuple[int, dict[str, int]]:
        """Returns how many were removed, and those that stay with the process ids of their servers."""

        def remove_rows(connection: sqlite3.Connection) -> tuple[int, dict[str, int]]:
            kept = {name: pid for name, (_, pid) in self._foreign(connection, names).items()}
            cursor = connection.executemany(
                "DELETE FROM adapters WHERE base_model = ? AND name = ?",
                [(self._base_model, name) for name in names if name not in kept],
            )
            return cursor.rowcount, kept

        with self._lock:
            num_removed, kept = self._write(remove_rows)
            for name in names:
                if name not in kept:
                    self._known.pop(name, None)
        return num_removed, kept

    def _rows(self) -> list[_Row]:
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            return self._read(self._connection)

    def _read(self, connection: sqlite3.Connection) -> list[_Row]:
        query = f"SELECT {', '.join(_COLUMNS)} FROM adapters WHERE base_model = ? ORDER BY name"
        return [_Row(*row) for row in connection.execute(query, (self._base_model,))]

    def _foreign(self, connection: sqlite3.Connection, names: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Those of the names that another running server wrote: their version, and its process id."""
        wanted, alive = set(names), {self._mark.writer: False}
        found = {}
        query = "SELECT name, version, writer FROM adapters WHERE base_model = ?"
        for name, version, writer in connection.execute(query, (self._base_model,)):
            if writer not in alive:
                alive[writer] = self._mark.is_alive(writer)
            if name in wanted and alive[writer]:
                found[name] = (version, pid_of(writer))
        return found

    def _inherit(self, connection: sqlite3.Connection) -> None:
        """Take over the entries of servers that have ended: they will be served here."""
        rows = self._read(connection)
        dead = {row.writer for row in rows if not self._mark.is_alive(row.writer)}
        connection.executemany(
            "UPDATE adapters SET writer = ? WHERE base_model = ? AND writer = ?",
            [(self._mark.writer, self._base_model, writer) for writer in dead],
        )
        self._known = {row.name: row for row in self._read(connection)}

    def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Run `change` in a transaction on the database that is at the path, and still is afterwards."""
        with self._lock, translated_errors(self._path):
            for _ in range(_NUM_ATTEMPTS):
                self._ensure_in_place()
                result = self._transact(change)
                if self._is_in_place():
                    return result
        raise StorageError(
            f"{self._path} is deleted or replaced again and again; find out by whom, or choose another "
            "state folder"
        )

    def _transact(self, change: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = change(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite has rolled back by itself when the disk is full
                connection.execute("ROLLBACK")
            raise
        return result

    def _is_in_place(self) -> bool:
        return None not in self._identity and file_identity(self._path) == self._identity

    def _ensure_in_place(self) -> None:
        """Make the folder and the database again if somebody took them away, with the entries known here."""
        if self._is_in_place():
            return
        # Closed first: SQLite keeps a log that was deleted under a database that is still there.
        self._connection.close()
        _make_folder(self._state_dir)
        self._connection = connect(self._path)
        self._mark.renew()
        rows = list(self._known.values())
        self._transact(lambda connection: connection.executemany(_RESTORE, rows))
        self._identity = file_identity(self._path)
        logger.warning(
            "the database of the state folder %s was deleted or replaced while in use; made it again with "
            "the %d adapters known to this server",
            self._state_dir,
            len(rows),
        )


def _make_folder(state_dir: Path) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageError(
            f"the state folder {state_dir} cannot be made: {exc.strerror}; "
            "make it writable, or choose another"
        ) from exc


def read_registry(state_dir: Path) -> list[tuple[str, RegistryEntry]]:
    """Every entry of a state folder with its base model's key; StorageError if it holds no registry."""
    path = state_dir / DATABASE_FILE
    if not path.is_file():
        raise StorageError(f"no {DATABASE_FILE} in {state_dir}; is it the state folder of a server?")
    with translated_errors(path), closing(connect(path)) as connection:
        rows = connection.execute(
            "SELECT base_model, name, spec, loaded_at, origin, source FROM adapters ORDER BY 1, 2"
        ).fetchall()
    return [(base_model, _entry(path, *row)) for base_model, *row in rows]


def _entry_of(path: Path, row: _Row) -> RegistryEntry:
    return _entry(path, row.name, row.spec, row.loaded_at_s, row.origin, row.source)


def _entry(
    path: Path, name: str, spec: str, loaded_at_s: float, origin: str, source: str | None
) -> RegistryEntry:
    try:
        return RegistryEntry(
            name=name,
            spec=spec_from_json(spec),
            loaded_at_s=loaded_at_s,
            origin=Origin(origin),
            source=None if source is None else _parse_source(source),
        )
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise StorageError(f"{path}: the entry of adapter {name!r} is damaged; {START_AFRESH}") from exc


def _source_text(source: HubRepo | None) -> str | None:
    return None if source is None else str(source)


def _parse_source(text: str) -> HubRepo:
    repo = parse_hub_repo(text)
    if repo is None:
        raise ValueError(text)
    return repo
