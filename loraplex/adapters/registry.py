"""The registry: adapter names and the versions they stand for, kept across restarts."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from loraplex.adapters.names import validate_adapter_name
from loraplex.adapters.registry_database import (
    COLUMNS,
    START_AFRESH,
    connect,
    file_identity,
    translated_errors,
)
from loraplex.adapters.remote import RemoteSource, parse_remote
from loraplex.adapters.rollout import NO_OTHERS, Rollout, canary_to_json, previous_to_json, rollout_from_json
from loraplex.adapters.server_mark import ServerMark
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.spec_json import spec_from_json, spec_to_json
from loraplex.core.errors import StorageError
from loraplex.core.shape import ModelShape

logger = logging.getLogger(__name__)

T = TypeVar("T")

DATABASE_FILE: Final = "registry.sqlite3"
_NUM_ATTEMPTS: Final = 3
_SELECT: Final = f"SELECT {', '.join(COLUMNS)} FROM adapters"
_OF_BASE: Final = f"{_SELECT} WHERE base_model = ? ORDER BY name"
_OF_NAME: Final = f"{_SELECT} WHERE base_model = ? AND name = ?"
_STATES: Final = (
    "SELECT name, version, path, loaded_at, origin, source, canary, previous FROM adapters "
    "WHERE base_model = ?"
)
_HAS_VERSION: Final = (
    "SELECT EXISTS (SELECT 1 FROM adapters WHERE base_model = ? AND (version = ? OR instr(canary, ?) > 0))"
)
_REMOVE: Final = "DELETE FROM adapters WHERE base_model = ? AND name = ?"
_INSERT: Final = f"INTO adapters ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
_PUT: Final = f"INSERT OR REPLACE {_INSERT}"
_PUT_IF_LATEST: Final = (
    f"INSERT {_INSERT} ON CONFLICT DO UPDATE SET "
    f"{', '.join(f'{each} = excluded.{each}' for each in COLUMNS)} "
    "WHERE excluded.loaded_at > adapters.loaded_at"
)


class _Row(NamedTuple):
    """A row of the database."""

    base_model: str
    name: str
    version: str
    path: str
    spec: str
    loaded_at_s: float
    origin: str
    source: str | None
    canary: str | None
    previous: str


class NameState(NamedTuple):
    """A name's row without its spec. `loaded_at_s` tells two changes to the same version apart.

    Comparing the states of thousands of names takes a fraction of the time of reading their specs.
    """

    version: str
    path: str
    loaded_at_s: float
    origin: str
    source: str | None
    canary: str | None
    previous: str

    def has(self, spec: AdapterSpec, rollout: Rollout) -> bool:
        """Return whether the name already stands for this version, with this canary and these previous
        versions."""
        others = canary_to_json(rollout.canary), previous_to_json(rollout.previous)
        return self.version == spec.version and (self.canary, self.previous) == others


class Origin(StrEnum):
    """The origin of an adapter's name: a folder or adapter the server was started with, or an API call."""

    FOLDER = "folder"
    API = "api"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryEntry:
    """A name, the version it stands for, and its canary and previous versions.

    `loaded_at_s` is in seconds since 1970.

    `source` is the remote source with the revision that the files were fetched from; None if they are the
    user's own.
    """

    name: str
    spec: AdapterSpec
    loaded_at_s: float
    origin: Origin
    source: RemoteSource | None = None
    rollout: Rollout = NO_OTHERS


def base_model_key(model: str, shape: ModelShape) -> str:
    """Return the key of a base model's entries: its id or path, and a hash of its shape, since a path may
    come to hold another model."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()
    return f"{model}@{digest[:16]}"


class AdapterRegistry:
    """Entries of one base model. Safe for several threads, and for several processes on one state folder.

    A name points to exactly one version, in one row that all servers on the state folder share and may
    change. A change is written only if the name is still what the asking server has last seen, in the same
    transaction: of two concurrent changes through two servers, one succeeds and the other is reported to have
    failed. Every method raises StorageError on a disk or database failure, and then nothing has changed.

    If the folder or its database is deleted or replaced, the next call makes it again, with all the entries
    that this server knows.
    """

    def __init__(
        self, state_dir: Path, base_model: str, *, wall_clock_s: Callable[[], float] = time.time
    ) -> None:
        self._state_dir = state_dir
        self._path = state_dir / DATABASE_FILE
        self._base_model = base_model
        self._wall_clock_s = wall_clock_s
        self._lock = threading.RLock()
        self._looked_at: object = None
        self._is_closed = False
        # Rows to restore if the folder is lost: every name, as this may be the last server that knows it.
        self._known: dict[str, _Row] = {}
        _make_folder(state_dir)
        with ExitStack() as stack, translated_errors(self._path):
            self._connection = stack.enter_context(closing(connect(self._path)))
            self._mark = stack.enter_context(closing(ServerMark(state_dir, base_model)))
            self._identity = file_identity(self._path)
            self._read()
            stack.pop_all()  # all went well: both stay open

    @property
    def other_servers(self) -> list[int]:
        """Process ids of other servers of this base model on this state folder."""
        return self._mark.others()

    @property
    def namesakes(self) -> list[tuple[int, str]]:
        """Process id and model name of other running servers whose base model has the same shape but another
        name, which may be a mistake."""
        return self._mark.namesakes()

    def has_changed(self) -> bool:
        """Return whether another server may have changed a name since the last call; True the first time.

        If nothing changed, this costs two stat calls and a look at a counter in shared memory.
        """
        with self._lock, translated_errors(self._path):
            if self._is_closed:
                return False
            self._ensure_in_place()
            [number] = self._connection.execute("PRAGMA data_version").fetchone()
            before, self._looked_at = self._looked_at, (self._identity, number)
            return before != self._looked_at

    def states(self) -> dict[str, NameState]:
        """Return the state of every name."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            rows = self._connection.execute(_STATES, [self._base_model]).fetchall()
        return {name: NameState(*state) for name, *state in rows}

    def look_up(self, name: str) -> tuple[NameState, RegistryEntry] | None:
        """Return one name's state and entry; None if the registry does not have it."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            row = self._find(name)
            self._note(name, row)
        return None if row is None else (_state_of(row), _entry_of(self._path, row))

    def get(self, name: str) -> RegistryEntry | None:
        found = self.look_up(name)
        return None if found is None else found[1]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self.states())

    def all(self) -> list[RegistryEntry]:
        """Return all entries, sorted by name."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            rows = self._read()
        return [_entry_of(self._path, row) for row in rows]

    def has_version(self, version: str) -> bool:
        """Return whether any name stands for a version or has it as its canary."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            [found] = self._connection.execute(_HAS_VERSION, [self._base_model, version, version]).fetchone()
        return bool(found)

    def put(
        self,
        name: str,
        spec: AdapterSpec,
        *,
        origin: Origin = Origin.API,
        source: RemoteSource | None = None,
        rollout: Rollout = NO_OTHERS,
    ) -> None:
        """Make the name stand for this version with this rollout, whatever it had before."""
        with self._lock:
            row = self._make_row(name, spec, origin, source, rollout)
            self._write(lambda: self._connection.execute(_PUT, row))
            self._note(name, row)

    def put_unless_changed(
        self,
        adapters: Sequence[tuple[str, AdapterSpec]],
        *,
        seen: Mapping[str, NameState],
        origin: Origin = Origin.API,
        sources: Mapping[str, RemoteSource | None] | None = None,
        rollouts: Mapping[str, Rollout] | None = None,
    ) -> dict[str, NameState]:
        """Put names in one transaction, each only if its state is still as in `seen`, or is already the one
        wanted.

        Returns the new states. A name that is missing from the result was changed by another server and is
        left alone. A name without a source is a user's folder; one without a rollout has no other versions.
        """

        def put_rows() -> list[_Row]:
            rows = []
            for name, spec in adapters:
                found, rollout = self._find(name), (rollouts or {}).get(name, NO_OTHERS)
                state = None if found is None else _state_of(found)
                if state == seen.get(name) or (state is not None and state.has(spec, rollout)):
                    rows.append(self._make_row(name, spec, origin, (sources or {}).get(name), rollout))
            self._connection.executemany(_PUT, rows)
            return rows

        with self._lock:
            rows = self._write(put_rows)
            for row in rows:
                self._note(row.name, row)
        return {row.name: _state_of(row) for row in rows}

    def remove(self, name: str) -> bool:
        """Remove a name, whatever its state; returns whether it was there."""
        with self._lock:
            cursor = self._write(lambda: self._connection.execute(_REMOVE, [self._base_model, name]))
            self._note(name, None)
        return cursor.rowcount > 0

    def remove_unless_shared(self, names: Sequence[str]) -> Sequence[str]:
        """Remove names in one transaction, unless another server is running, which may serve them; returns
        the removed names.

        A server marks the folder before it reads the registry, so a server that is just starting sees the
        change.
        """

        def remove_rows() -> Sequence[str]:
            if self.other_servers:
                return ()
            self._connection.executemany(_REMOVE, [(self._base_model, name) for name in names])
            return names

        with self._lock:
            removed = self._write(remove_rows) if names else ()
            for name in removed:
                self._note(name, None)
        return removed

    def close(self) -> None:
        with self._lock, translated_errors(self._path):
            self._is_closed = True
            self._connection.close()
            self._mark.close()

    def _make_row(
        self, name: str, spec: AdapterSpec, origin: Origin, source: RemoteSource | None, rollout: Rollout
    ) -> _Row:
        return _Row(
            self._base_model,
            validate_adapter_name(name),
            spec.version,
            str(spec.path),
            spec_to_json(spec),
            self._wall_clock_s(),
            origin.value,
            None if source is None else str(source),
            canary_to_json(rollout.canary),
            previous_to_json(rollout.previous),
        )

    def _find(self, name: str) -> _Row | None:
        row = self._connection.execute(_OF_NAME, [self._base_model, name]).fetchone()
        return None if row is None else _Row(*row)

    def _read(self) -> list[_Row]:
        """Return all rows, sorted by name, and remember them."""
        rows = [_Row(*row) for row in self._connection.execute(_OF_BASE, [self._base_model])]
        self._known = {row.name: row for row in rows}
        return rows

    def _note(self, name: str, row: _Row | None) -> None:
        """Remember a name's row; None if it has none."""
        self._known.pop(name, None)
        if row is not None:
            self._known[name] = row

    def _write(self, change: Callable[[], T]) -> T:
        """Run `change` in a transaction on the database at the path, again if the file was replaced
        meanwhile."""
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

    def _transact(self, change: Callable[[], T]) -> T:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = change()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite has rolled back by itself when the disk is full
                connection.execute("ROLLBACK")
            raise
        return result

    def _is_in_place(self) -> bool:
        return None not in self._identity and file_identity(self._path) == self._identity

    def _ensure_in_place(self) -> None:
        """Make the folder and the database again, with all known rows, if they were deleted or replaced."""
        if self._is_in_place():
            return
        # Close first: SQLite keeps using a deleted write-ahead log while its database is still there.
        self._connection.close()
        _make_folder(self._state_dir)
        self._connection = connect(self._path)
        self._mark.renew()
        rows = list(self._known.values())
        # Another server may have restored its entries and changed some since: the latest win.
        self._transact(lambda: self._connection.executemany(_PUT_IF_LATEST, rows))
        self._read()
        self._identity = file_identity(self._path)
        logger.warning(
            "the database of the state folder %s was deleted or replaced while in use; made it again with "
            "the %d adapters that this server knows",
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
    """Return every entry of a state folder with its base model's key; StorageError if it holds no
    registry."""
    path = state_dir / DATABASE_FILE
    if not path.is_file():
        raise StorageError(f"no {DATABASE_FILE} in {state_dir}; is it the state folder of a server?")
    with translated_errors(path), closing(connect(path)) as connection:
        rows = [_Row(*row) for row in connection.execute(f"{_SELECT} ORDER BY base_model, name")]
    return [(row.base_model, _entry_of(path, row)) for row in rows]


def _state_of(row: _Row) -> NameState:
    return NameState(row.version, row.path, row.loaded_at_s, row.origin, row.source, row.canary, row.previous)


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


def _parse_source(text: str) -> RemoteSource:
    source = parse_remote(text)
    if source is None:
        raise ValueError(text)
    return source
