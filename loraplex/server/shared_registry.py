"""The registry as servers on one state folder share it: one row for each name, which any of them changes.

A change is written only if the name still is what the server that asks for it has last seen, in the same
transaction: of two changes at once through two servers, one is done and the other learns of it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from loraplex.adapters.registry import _SELECT, AdapterRegistry, Origin, RegistryEntry, _entry_of, _Row
from loraplex.adapters.registry_database import translated_errors
from loraplex.adapters.rollout import NO_OTHERS, Rollout, canary_to_json, previous_to_json
from loraplex.adapters.server_mark import MARKS_FOLDER, pid_of
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.hub import HubRepo

T = TypeVar("T")

_STATES: Final = (
    "SELECT name, version, path, loaded_at, origin, source, canary, previous FROM adapters "
    "WHERE base_model = ?"
)
_FIND: Final = f"{_SELECT} WHERE base_model = ? AND name = ?"
_HAS_VERSION: Final = (
    "SELECT EXISTS (SELECT 1 FROM adapters WHERE base_model = ? AND (version = ? OR instr(canary, ?) > 0))"
)


class NameState(NamedTuple):
    """A name's row, without its spec and who wrote it. `loaded_at_s` tells two changes to the same apart.

    Comparing those of thousands of names takes a fraction of reading their specs.
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


class SharedRegistry(AdapterRegistry):
    """Entries of one base model, which all servers of it on the state folder have in common.

    No server has rows of its own: whoever changes a name writes its one row.
    """

    def __init__(self, state_dir: Path, base_model: str) -> None:
        self._looked_at: object = None
        self._is_closed = False
        super().__init__(state_dir, base_model)

    @property
    def namesakes(self) -> list[tuple[int, str]]:
        """Other running servers whose base model has the shape of this one's and another name, which may be a
        mistake: process id and name of each."""
        own_name, _, own_shape = self._base_model.rpartition("@")
        found = []
        for path in sorted((self._state_dir / MARKS_FOLDER).glob("*.lock")):
            try:
                name, _, shape = json.loads(path.read_bytes())["base_model"].rpartition("@")
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # gone by now, or nobody's that is known here
            if shape == own_shape and name != own_name and self._mark.is_alive(path.stem):
                found.append((pid_of(path.stem), name))
        return found

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
            row = self._find(self._connection, name)
            self._own.pop(name, None)
            self._know([] if row is None else [row])
        return None if row is None else (_state_of(row), _entry_of(self._path, row))

    def has_version(self, version: str) -> bool:
        """Return whether any name stands for a version, or has it on trial."""
        with self._lock, translated_errors(self._path):
            self._ensure_in_place()
            [found] = self._connection.execute(_HAS_VERSION, [self._base_model, version, version]).fetchone()
        return bool(found)

    def put_unless_changed(
        self,
        adapters: Sequence[tuple[str, AdapterSpec]],
        *,
        seen: Mapping[str, NameState],
        origin: Origin = Origin.API,
        sources: Mapping[str, HubRepo | None] | None = None,
        rollouts: Mapping[str, Rollout] | None = None,
    ) -> dict[str, NameState]:
        """`put_many` for the names that are as in `seen`, or as they are to be; returns what these are now.

        A name that is not in the result was changed by another server, and was left alone.
        """

        def put_rows(connection: sqlite3.Connection) -> dict[str, NameState]:
            free = []
            for name, spec in adapters:
                row, rollout = self._find(connection, name), (rollouts or {}).get(name, NO_OTHERS)
                state = None if row is None else _state_of(row)
                if state == seen.get(name) or (state is not None and state.has(spec, rollout)):
                    free.append((name, spec))
            self.put_many(free, origin=origin, sources=sources, rollouts=rollouts)
            now = [self._find(connection, name) for name, _ in free]
            return {row.name: _state_of(row) for row in now if row is not None}

        with self._lock:
            known = dict(self._own)
            try:
                return self._write(put_rows)
            except BaseException:
                self._own = known
                raise

    def remove_unless_shared(self, names: Sequence[str]) -> Sequence[str]:
        """`remove_many`, but of nothing while another server runs, which may serve it; returns what is gone.

        A server marks the folder before it reads the registry, so one that starts just now sees the change.
        """

        def remove_rows(connection: sqlite3.Connection) -> Sequence[str]:
            if self.other_servers:
                return ()
            self.remove_many(names)
            return names

        with self._lock:
            return self._write(remove_rows) if names else ()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            super().close()

    def _find(self, connection: sqlite3.Connection, name: str) -> _Row | None:
        row = connection.execute(_FIND, [self._base_model, name]).fetchone()
        return None if row is None else _Row(*row)

    def _know(self, rows: Iterable[_Row]) -> None:
        """Note what is put back if the folder is lost: every name, as this may be the last server to know it,
        and as a row of this server, beside what the others put back."""
        self._own |= {row.name: row._replace(writer=self._mark.writer) for row in rows}

    def _living_others(self, connection: sqlite3.Connection) -> list[str]:
        """Return nobody: there are no rows that only their writer may change."""
        return []

    def _rows(self) -> list[_Row]:
        with self._lock:
            rows = super()._rows()
            self._own.clear()
            self._know(rows)
            return rows

    def _ensure_in_place(self) -> None:
        if not self._is_in_place():
            super()._ensure_in_place()
            # Another server may have put its rows back before, and changed some since: the latest are right.
            self._transact(self._inherit)

    def _transact(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """As part of the transaction that is open, if one is (`put_unless_changed`)."""
        return change(self._connection) if self._connection.in_transaction else super()._transact(change)


def _state_of(row: _Row) -> NameState:
    return NameState(row.version, row.path, row.loaded_at_s, row.origin, row.source, row.canary, row.previous)
