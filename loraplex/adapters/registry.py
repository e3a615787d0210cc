"""The names of adapters and the versions they stand for, kept across restarts."""

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
from loraplex.adapters.rollout import NO_OTHERS, Rollout, canary_to_json, previous_to_json, rollout_from_json
from loraplex.adapters.server_mark import ServerMark
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.spec_json import spec_from_json, spec_to_json
from loraplex.core.errors import StorageError
from loraplex.core.hub import HubRepo, parse_hub_repo
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
    """An entry as the database has it."""

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

    Comparing the states of thousands of names takes a fraction of reading their specs.
    """

    version: str
    path: str
    loaded_at_s: float
    origin: str
    source: str | None
    canary: str | None
    previous: str

    def has(self, spec: AdapterSpec, rollout: Rollout) -> bool:
        """Tell whether the name stands for this version already, with these others."""
        others = canary_to_json(rollout.canary), previous_to_json(rollout.previous)
        return self.version == spec.version and (self.canary, self.previous) == others


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


def base_model_key(model: str, shape: ModelShape) -> str:
    """Return what entries are kept under: a model's id or path, and its shape, as a path may hold another."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()
    return f"{model}@{digest[:16]}"


class AdapterRegistry:
    """Entries of one base model. Safe for several threads, and for several processes on one state folder.

    A name points to exactly one version, by one row that all servers on the state folder share and that any
    of them changes. A change is written only if the name still is what the server that asks for it has last
    seen, in the same transaction: of two changes at once through two servers, one is done and the other
    learns of it. Every method raises StorageError when the disk does not play along, and then nothing has
    changed.

    If the folder or its database is deleted or replaced, it is made again by the next call, with all the
    entries that this server knows.
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
        # What is put back if the folder is lost: every name, as this may be the last server to know it.
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
        """Other running servers whose base model has the shape of this one's and another name, which may be a
        mistake: process id and name of each."""
        return self._mark.namesakes()

    def has_changed(self) -> bool:
        """Return whether another server may have changed a name since the last call; True the first time.

        Two calls of stat and a look at a counter in shared memory, if nothing has.
        """
        with self._lock, translated_errors(self._path):
            if self._is_closed:
                return False
            self._ensure_in_place()
            [number] = self._connection.execute("PRAGMA data_version").fetchone()
            before, self._looked_at = self._looked_at, (self._identity, number)
            return before != self._looked_at

    def states(self) -> dict[str, NameState]:
        """Return what the registry has of every name."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            rows = self._connection.execute(_STATES, [self._base_model]).fetchall()
        return {name: NameState(*state) for name, *state in rows}

    def look_up(self, name: str) -> tuple[NameState, RegistryEntry] | None:
        """Return what the registry has of one name."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            row = self._find(name)
            self._note(name, row)
        return None if row is None else (_state_of(row), _entry_of(self._path, row))

    def get(self, name: str) -> RegistryEntry | None:
        found = self.look_up(name)
        return None if found is None else found[1]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.states())

    def all(self) -> list[RegistryEntry]:
        """All entries, sorted by name."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            rows = self._read()
        return [_entry_of(self._path, row) for row in rows]

    def has_version(self, version: str) -> bool:
        """Return whether any name stands for a version, or has it on trial."""
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
        source: HubRepo | None = None,
        rollout: Rollout = NO_OTHERS,
    ) -> None:
        """Make the name stand for this version and have these others, whatever it had before."""
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
        sources: Mapping[str, HubRepo | None] | None = None,
        rollouts: Mapping[str, Rollout] | None = None,
    ) -> dict[str, NameState]:
        """`put` for the names that are as in `seen`, or as they are to be, in one transaction; returns what
        these are now. A name without source is a user's folder; one without rollout has no other versions.

        A name that is not in the result was changed by another server, and was left alone.
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
        """Forget a name, whatever it is by now; returns whether it was there."""
        with self._lock:
            cursor = self._write(lambda: self._connection.execute(_REMOVE, [self._base_model, name]))
            self._note(name, None)
        return cursor.rowcount > 0

    def remove_unless_shared(self, names: Sequence[str]) -> Sequence[str]:
        """Forget names in one transaction, but none while another server runs, which may serve them; returns
        those that are gone.

        A server marks the folder before it reads the registry, so one that starts just now sees the change.
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
        self, name: str, spec: AdapterSpec, origin: Origin, source: HubRepo | None, rollout: Rollout
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
        """Return all rows, sorted by name, and know them from now on."""
        rows = [_Row(*row) for row in self._connection.execute(_OF_BASE, [self._base_model])]
        self._known = {row.name: row for row in rows}
        return rows

    def _note(self, name: str, row: _Row | None) -> None:
        """Know a name's row from now on; None if it has none."""
        self._known.pop(name, None)
        if row is not None:
            self._known[name] = row

    def _write(self, change: Callable[[], T]) -> T:
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
        """Make the folder and the database again if somebody took them away, with all that is known here."""
        if self._is_in_place():
            return
        # Closed first: SQLite keeps a log that was deleted under a database that is still there.
        self._connection.close()
        _make_folder(self._state_dir)
        self._connection = connect(self._path)
        self._mark.renew()
        rows = list(self._known.values())
        # Another server may have put its entries back before, and changed some since: the latest are right.
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
    """Every entry of a state folder with its base model's key; StorageError if it holds no registry."""
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


def _parse_source(text: str) -> HubRepo:
    repo = parse_hub_repo(text)
    if repo is None:
        raise ValueError(text)
    return repo
