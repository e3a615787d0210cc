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
from loraplex.adapters.rollout import NO_OTHERS, Rollout, canary_to_json, previous_to_json, rollout_from_json
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
    "base_model", "name", "version", "path", "spec", "loaded_at", "origin", "source", "writer", "canary",
    "previous",
)  # fmt: skip
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM adapters"
_PUT: Final = (
    f"INSERT OR REPLACE INTO adapters ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
)


class _Row(NamedTuple):
    """An entry as the database has it. `writer` is the server that holds it (adapters.server_mark)."""

    base_model: str
    name: str
    version: str
    path: str
    spec: str
    loaded_at_s: float
    origin: str
    source: str | None
    writer: str
    canary: str | None
    previous: str


class Origin(StrEnum):
    """Who gave an adapter its name: a folder or adapter the server was started with, or a call of the API."""

    FOLDER = "folder"
    API = "api"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryEntry:
    """A name and the version it stands for, with its other ones. `loaded_at_s` is in seconds since 1970.

    `source` is the repository and commit that the files were fetched from; None if they are the user's own.
    """

    name: str
    spec: AdapterSpec
    loaded_at_s: float
    origin: Origin
    source: HubRepo | None = None
    rollout: Rollout = NO_OTHERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What became of a name that was to be removed.

    `was_there`: this server held it, or one that has ended. `held_by` is the process id of another running
    server that holds the name, which therefore stays registered; None if there is none.
    """

    was_there: bool
    held_by: int | None


def base_model_key(model: str, shape: ModelShape) -> str:
    """Return what entries are kept under: a model's id or path, and its shape, as a path may hold another."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()
    return f"{model}@{digest[:16]}"


class AdapterRegistry:
    """Entries of one base model. Safe for several threads, and for several processes on one state folder.

    A name points to exactly one version; `put` moves it to another atomically. Every method raises
    StorageError when the disk does not play along, and then nothing has changed.

    Servers on one state folder share its names, and each has rows of its own: a name is there as long as any
    server holds it, and only its holder removes a row. While another running server holds a name, it is
    not moved to another version here. A server takes over the rows of those that have ended when it starts.
    If the folder or its database is deleted or replaced, it is made again by the next call, with all rows of
    this server.
    """

    def __init__(
        self, state_dir: Path, base_model: str, *, wall_clock_s: Callable[[], float] = time.time
    ) -> None:
        self._state_dir = state_dir
        self._path = state_dir / DATABASE_FILE
        self._base_model = base_model
        self._wall_clock_s = wall_clock_s
        self._lock = threading.RLock()
        self._own: dict[str, _Row] = {}
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
        self,
        name: str,
        spec: AdapterSpec,
        *,
        origin: Origin = Origin.API,
        source: HubRepo | None = None,
        rollout: Rollout = NO_OTHERS,
    ) -> None:
        """Make the name stand for this version and have these others, whatever it had before."""
        rollouts = {name: rollout}
        if blocked := self.put_many([(name, spec)], origin=origin, sources={name: source}, rollouts=rollouts):
            raise StorageError(self.explain_blocked(name, blocked[name]))

    def put_many(
        self,
        adapters: Sequence[tuple[str, AdapterSpec]],
        *,
        origin: Origin = Origin.API,
        sources: Mapping[str, HubRepo | None] | None = None,
        rollouts: Mapping[str, Rollout] | None = None,
    ) -> dict[str, int]:
        """`put` for many names in one transaction. A name without source is a user's folder; one without
        rollout has no other versions.

        Names that another running server holds as another version are left as they are; the result has
        them, with that server's process id.
        """
        now_s, others = self._wall_clock_s(), rollouts or {}
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
                canary_to_json(others.get(name, NO_OTHERS).canary),
                previous_to_json(others.get(name, NO_OTHERS).previous),
            )
            for name, spec in adapters
        }

        def put_rows(connection: sqlite3.Connection) -> dict[str, int]:
            living = self._living_others(connection)
            blocked = {
                name: pid_of(writer)
                for name, version, writer in self._held(connection, living)
                if name in rows and version != rows[name].version
            }
            free = [name for name in rows if name not in blocked]
            self._delete(connection, free, living)
            connection.executemany(_PUT, [rows[name] for name in free])
            return blocked

        with self._lock:
            blocked = self._write(put_rows)
            self._own |= {name: row for name, row in rows.items() if name not in blocked}
        return blocked

    def explain_blocked(self, name: str, pid: int) -> str:
        """Say why a name that `put_many` returned was not registered, and what to do."""
        return (
            f"another server (process {pid}) on the state folder {self._state_dir} has registered {name!r} "
            "as another version; unload it there, use another name, or start one of the servers with a "
            "--state-dir of its own"
        )

    def holds(self, name: str) -> bool:
        """Return whether this server holds the name itself, not only another one on the state folder."""
        return name in self._own

    def origin_of(self, name: str, version: str) -> Origin:
        """Return who gave the name this version: a call of the API, unless the registry knows better."""
        row = self._own.get(name)
        return Origin.API if row is None or row.version != version else Origin(row.origin)

    def remove(self, name: str) -> Removal:
        """Give up a name. It stays registered while another running server holds it."""
        return self.remove_many([name])[name]

    def remove_many(self, names: Sequence[str]) -> dict[str, Removal]:
        """`remove` for many names in one transaction; the result has every one of them."""

        def remove_rows(connection: sqlite3.Connection) -> dict[str, Removal]:
            living = self._living_others(connection)
            held_by = {name: pid_of(writer) for name, _, writer in self._held(connection, living)}
            removed = self._delete(connection, names, living)
            return {name: Removal(was_there=name in removed, held_by=held_by.get(name)) for name in names}

        with self._lock:
            result = self._write(remove_rows)
            for name in names:
                self._own.pop(name, None)
        return result

    def get(self, name: str) -> RegistryEntry | None:
        found = [row for row in self._rows() if row.name == name]
        return _entry_of(self._path, found[0]) if found else None

    def names(self) -> list[str]:
        """All names, sorted."""
        return [row.name for row in self._rows()]

    def all(self) -> list[RegistryEntry]:
        """All entries, sorted by name."""
        return [_entry_of(self._path, row) for row in self._rows()]

    def close(self) -> None:
        with self._lock, translated_errors(self._path):
            self._connection.close()
            self._mark.close()

    def _rows(self) -> list[_Row]:
        """One row for each name, sorted: this server's own where it has one."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            return _one_of_each(self._read(self._connection), self._mark.writer)

    def _read(self, connection: sqlite3.Connection) -> list[_Row]:
        return [
            _Row(*row) for row in connection.execute(f"{_SELECT} WHERE base_model = ?", [self._base_model])
        ]

    def _living_others(self, connection: sqlite3.Connection) -> list[str]:
        """Other running servers that hold names of this base model."""
        query = "SELECT DISTINCT writer FROM adapters WHERE base_model = ?"
        writers = [writer for (writer,) in connection.execute(query, [self._base_model])]
        return [each for each in writers if each != self._mark.writer and self._mark.is_alive(each)]

    def _held(self, connection: sqlite3.Connection, writers: Sequence[str]) -> list[tuple[str, str, str]]:
        """Name, version and writer of all that these servers hold."""
        places = ", ".join("?" * len(writers))
        query = f"SELECT name, version, writer FROM adapters WHERE base_model = ? AND writer IN ({places})"
        return connection.execute(query, [self._base_model, *writers]).fetchall()

    def _delete(
        self, connection: sqlite3.Connection, names: Sequence[str], living: Sequence[str]
    ) -> set[str]:
        """Delete the rows of these names but for those of `living`; returns the names that had any."""
        places = ", ".join("?" * len(living))
        query = f"DELETE FROM adapters WHERE base_model = ? AND name = ? AND writer NOT IN ({places})"
        return {
            name
            for name in names
            if connection.execute(query, [self._base_model, name, *living]).rowcount > 0
        }

    def _inherit(self, connection: sqlite3.Connection) -> None:
        """Take over the rows of servers that have ended: they will be served here."""
        living = self._living_others(connection)
        rows = _one_of_each([row for row in self._read(connection) if row.writer not in living], None)
        self._own = {row.name: row._replace(writer=self._mark.writer) for row in rows}
        self._delete(connection, list(self._own), living)
        connection.executemany(_PUT, self._own.values())

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
        """Make the folder and the database again if somebody took them away, with this server's rows."""
        if self._is_in_place():
            return
        # Closed first: SQLite keeps a log that was deleted under a database that is still there.
        self._connection.close()
        _make_folder(self._state_dir)
        self._connection = connect(self._path)
        self._mark.renew()
        rows = list(self._own.values())
        self._transact(lambda connection: connection.executemany(_PUT, rows))
        self._identity = file_identity(self._path)
        logger.warning(
            "the database of the state folder %s was deleted or replaced while in use; made it again with "
            "the %d adapters that this server has registered",
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
        rows = [_Row(*row) for row in connection.execute(_SELECT)]
    return [(row.base_model, _entry_of(path, row)) for row in _one_of_each(rows, None)]


def _one_of_each(rows: Iterable[_Row], writer: str | None) -> list[_Row]:
    """One row for each base model and name, sorted by these.

    Rows of `writer` come first; then those of the API, since a folder's are found again without the registry;
    then the latest.
    """
    ranked = sorted(rows, key=lambda row: (row.writer == writer, row.origin == Origin.API, row.loaded_at_s))
    chosen = {(row.base_model, row.name): row for row in ranked}
    return [chosen[key] for key in sorted(chosen)]


def _entry_of(path: Path, row: _Row) -> RegistryEntry:
    try:
        return RegistryEntry(
            name=row.name,
            spec=spec_from_json(row.spec),
            loaded_at_s=row.loaded_at_s,
            origin=Origin(row.origin),
            source=None if row.source is None else _parse_source(row.source),
            rollout=rollout_from_json(row.canary, row.previous),
        )
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise StorageError(f"{path}: the entry of adapter {row.name!r} is damaged; {START_AFRESH}") from exc


def _source_text(source: HubRepo | None) -> str | None:
    return None if source is None else str(source)


def _parse_source(text: str) -> HubRepo:
    repo = parse_hub_repo(text)
    if repo is None:
        raise ValueError(text)
    return repo
