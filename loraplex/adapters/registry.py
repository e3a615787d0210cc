"""The names of adapters and the versions they stand for, kept across restarts."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from loraplex.adapters.names import validate_adapter_name
from loraplex.adapters.registry_database import START_AFRESH, connect, translated_errors
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.spec_json import spec_from_json, spec_to_json
from loraplex.core.errors import StorageError
from loraplex.core.hub import HubRepo, parse_hub_repo
from loraplex.core.shape import ModelShape

DATABASE_FILE: Final = "registry.sqlite3"


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
    """

    def __init__(
        self, state_dir: Path, base_model: str, *, wall_clock_s: Callable[[], float] = time.time
    ) -> None:
        self._path = state_dir / DATABASE_FILE
        self._base_model = base_model
        self._wall_clock_s = wall_clock_s
        self._lock = threading.Lock()
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(
                f"the state folder {state_dir} cannot be made: {exc.strerror}; "
                "make it writable, or choose another"
            ) from exc
        with translated_errors(self._path):
            self._connection = connect(self._path)

    def put(
        self, name: str, spec: AdapterSpec, *, origin: Origin = Origin.API, source: HubRepo | None = None
    ) -> None:
        """Make the name stand for this version, whatever it stood for before."""
        self.put_many([(name, spec)], origin=origin, sources={name: source})

    def put_many(
        self,
        adapters: Sequence[tuple[str, AdapterSpec]],
        *,
        origin: Origin = Origin.API,
        sources: Mapping[str, HubRepo | None] | None = None,
    ) -> None:
        """`put` for many names in one transaction: all or none. A name without source is a user's folder."""
        now_s = self._wall_clock_s()
        rows = [
            (
                self._base_model,
                validate_adapter_name(name),
                spec.version,
                str(spec.path),
                spec_to_json(spec),
                now_s,
                origin.value,
                _source_text((sources or {}).get(name)),
            )
            for name, spec in adapters
        ]
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def remove(self, name: str) -> bool:
        """Forget a name; False if it was not there."""
        with self._transaction() as connection:
            cursor = connection.execute(
                "DELETE FROM adapters WHERE base_model = ? AND name = ?", (self._base_model, name)
            )
            return cursor.rowcount > 0

    def remove_many(self, names: Sequence[str]) -> None:
        """`remove` for many names in one transaction: all or none."""
        with self._transaction() as connection:
            connection.executemany(
                "DELETE FROM adapters WHERE base_model = ? AND name = ?",
                [(self._base_model, name) for name in names],
            )

    def get(self, name: str) -> RegistryEntry | None:
        found = self._select("AND name = ?", name)
        return found[0] if found else None

    def names(self) -> list[str]:
        """All names, sorted."""
        with self._lock, translated_errors(self._path):
            rows = self._connection.execute(
                "SELECT name FROM adapters WHERE base_model = ? ORDER BY name", (self._base_model,)
            )
            return [name for (name,) in rows]

    def all(self) -> list[RegistryEntry]:
        """All entries, sorted by name."""
        return self._select("ORDER BY name")

    def close(self) -> None:
        with self._lock, translated_errors(self._path):
            self._connection.close()

    def _select(self, clause: str, *values: str) -> list[RegistryEntry]:
        with self._lock, translated_errors(self._path):
            rows = self._connection.execute(
                f"SELECT name, spec, loaded_at, origin, source FROM adapters WHERE base_model = ? {clause}",
                (self._base_model, *values),
            ).fetchall()
        return [_entry(self._path, *row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated_errors(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite has rolled back by itself when the disk is full
                    self._connection.execute("ROLLBACK")
                raise


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
