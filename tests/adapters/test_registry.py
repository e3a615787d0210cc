from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Barrier

import pytest
import registry_writer
from adapter_factory import SHAPE, write_adapter
from registry_writer import BASE_MODEL, make_spec, put_many

import loraplex
from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.registry import (
    DATABASE_FILE,
    AdapterRegistry,
    Origin,
    base_model_key,
    read_registry,
)
from loraplex.adapters.rollout import NO_OTHERS, Canary, Rollout, VersionRef
from loraplex.adapters.spec_json import spec_to_json
from loraplex.core.errors import InvalidRequestError, StorageError
from loraplex.core.hub import HubRepo

NOBODY_UID = 65534


@contextmanager
def opened(state_dir: Path, base_model: str = BASE_MODEL) -> Iterator[AdapterRegistry]:
    with closing(AdapterRegistry(state_dir, base_model, wall_clock_s=lambda: 1000.0)) as registry:
        yield registry


def versions(registry: AdapterRegistry) -> dict[str, str]:
    return {entry.name: entry.spec.version for entry in registry.all()}


def start_writer(state_dir: Path, *, max_file_bytes: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, registry_writer.__file__, str(state_dir), str(max_file_bytes)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(loraplex.__file__).parents[1])},
    )


def test_entries_survive_a_restart(tmp_path: Path) -> None:
    spec = make_spec("v1")
    with opened(tmp_path / "state") as registry:
        registry.put("a", spec)
    with opened(tmp_path / "state") as registry:
        entry = registry.get("a")
        assert entry is not None
        assert (entry.name, entry.spec, entry.loaded_at_s) == ("a", spec, 1000.0)
        assert registry.all() == [entry]
        assert registry.get("b") is None


def test_a_real_spec_comes_back_equal_and_is_known_to_be_unchanged(tmp_path: Path) -> None:
    spec = read_adapter(write_adapter(tmp_path / "a"), SHAPE)
    with opened(tmp_path) as registry:
        registry.put("a", spec)
        entry = registry.get("a")
    assert entry is not None
    assert entry.spec == spec
    assert files_unchanged(entry.spec)


def test_put_moves_a_name_to_a_new_version(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        put_many(registry, [("b", make_spec("v1")), ("a", make_spec("v1"))])
        registry.put("a", make_spec("v2"))
        assert [(entry.name, entry.spec.version) for entry in registry.all()] == [("a", "v2"), ("b", "v1")]


def test_remove_forgets_a_name(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"))
        assert registry.remove("a")
        assert not registry.remove("a")
        assert registry.names() == []


def test_many_names_are_removed_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as registry, opened(tmp_path, "other") as other:
        put_many(registry, [(name, make_spec("v1")) for name in "abc"])
        other.put("a", make_spec("v1"))
        assert registry.remove_unless_shared(["a", "c", "nobody"]) == ["a", "c", "nobody"]
        assert (registry.names(), other.names()) == (["b"], ["a"])


def test_an_entry_knows_where_it_came_from(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"))
        put_many(registry, [("b", make_spec("v1")), ("c", make_spec("v1"))], origin=Origin.FOLDER)
        registry.put("c", make_spec("v1"))
        assert {entry.name: entry.origin for entry in registry.all()} == {
            "a": Origin.API,
            "b": Origin.FOLDER,
            "c": Origin.API,
        }
    assert [entry.origin for _, entry in read_registry(tmp_path)] == [Origin.API, Origin.FOLDER, Origin.API]


ROLLOUT = Rollout(
    canary=Canary(ref=VersionRef(version="v9", path=Path("/adapters/nine")), share=0.25),
    previous=(VersionRef(version="v0", path=Path("/adapters/zero")),),
)

# The columns that each schema added, from the second on; the first had those before them.
ADDED_COLUMNS = (("origin",), ("source",), ("writer",), (), ("canary", "previous"))


def make_older(state_dir: Path, schema: int) -> None:
    """Bring a database back to an older schema, in which one server that has ended wrote all entries."""
    columns = ["base_model", "name", "version", "path", "spec", "loaded_at"]
    columns += [column for added in ADDED_COLUMNS[: schema - 1] for column in added]
    key = "base_model, name" if schema < 5 else "base_model, name, writer"
    found = ", ".join("'1-a'" if column == "writer" else column for column in columns)
    with closing(sqlite3.connect(state_dir / DATABASE_FILE)) as connection:
        connection.executescript(
            f"""
            CREATE TABLE old ({", ".join(columns)}, PRIMARY KEY ({key}));
            INSERT INTO old SELECT {found} FROM adapters;
            DROP TABLE adapters;
            ALTER TABLE old RENAME TO adapters;
            PRAGMA user_version = {schema};
            """
        )


@pytest.mark.parametrize("schema", [1, 2, 3, 4, 5, 6])
def test_an_older_database_is_brought_up_to_date_with_all_its_entries(tmp_path: Path, schema: int) -> None:
    repo = HubRepo(repo_id="org/pirate", revision="0" * 40)
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"))
        registry.put("b", make_spec("v2"), origin=Origin.FOLDER)
        registry.put("c", make_spec("v3"), source=repo, rollout=ROLLOUT)
    make_older(tmp_path, schema)
    for _ in range(2):
        with opened(tmp_path) as registry:
            assert versions(registry) == {"a": "v1", "b": "v2", "c": "v3"}
            found = {entry.name: entry for entry in registry.all()}
            assert found["b"].origin is (Origin.API if schema == 1 else Origin.FOLDER)
            assert found["c"].source == (repo if schema >= 3 else None)
            assert found["c"].rollout == (ROLLOUT if schema >= 6 else NO_OTHERS)
            registry.put("d", make_spec("v4"), rollout=ROLLOUT)
            with opened(tmp_path) as second:
                assert second.remove("d")


@pytest.mark.parametrize("schema", [5, 6])
def test_of_the_rows_that_several_servers_had_of_a_name_the_latest_of_the_api_stays(
    tmp_path: Path, schema: int
) -> None:
    rows = [
        ("1-a", "v1", "api", 1.0),
        ("2-b", "v3", "api", 3.0),
        ("3-c", "v2", "api", 2.0),
        ("4-d", "v4", "folder", 4.0),
    ]
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v0"))
        registry.put("b", make_spec("v0"))
    make_older(tmp_path, schema)
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection:
        for writer, version, origin, loaded_at_s in rows:
            connection.execute("CREATE TEMP TABLE one AS SELECT * FROM adapters WHERE name = 'a' LIMIT 1")
            connection.execute(
                "UPDATE one SET writer = ?, spec = ?, origin = ?, loaded_at = ?",
                (writer, spec_to_json(make_spec(version)), origin, loaded_at_s),
            )
            connection.execute("INSERT OR REPLACE INTO adapters SELECT * FROM one")
            connection.execute("DROP TABLE one")
        connection.commit()
    assert [(entry.name, entry.spec.version) for _, entry in read_registry(tmp_path)] == [
        ("a", "v3"),
        ("b", "v0"),
    ]
    with opened(tmp_path) as registry:
        assert registry.remove("a")
        assert registry.names() == ["b"]


def test_the_repository_of_an_adapter_is_kept_with_its_commit(tmp_path: Path) -> None:
    repo = HubRepo(repo_id="org/pirate", revision="0" * 40)
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"), source=repo)
        put_many(registry, [("b", make_spec("v1")), ("c", make_spec("v1"))], sources={"c": repo})
    with opened(tmp_path) as registry:
        assert {entry.name: entry.source for entry in registry.all()} == {"a": repo, "b": None, "c": repo}
        registry.put("a", make_spec("v2"))
        assert [entry.source for _, entry in read_registry(tmp_path)] == [None, None, repo]
        registry._connection.execute("UPDATE adapters SET source = '../x'")
        with pytest.raises(StorageError, match="is damaged"):
            registry.all()


def test_the_other_versions_of_a_name_are_kept_with_it(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"), rollout=ROLLOUT)
        put_many(registry, [("b", make_spec("v1")), ("c", make_spec("v1"))], rollouts={"c": ROLLOUT})
    with opened(tmp_path) as registry:
        assert {entry.name: entry.rollout for entry in registry.all()} == {
            "a": ROLLOUT,
            "b": NO_OTHERS,
            "c": ROLLOUT,
        }
        registry.put("a", make_spec("v2"))
        assert [entry.rollout for _, entry in read_registry(tmp_path)] == [NO_OTHERS, NO_OTHERS, ROLLOUT]
        registry._connection.execute("UPDATE adapters SET canary = '{}'")
        with pytest.raises(StorageError, match="is damaged"):
            registry.all()


def test_a_deleted_database_is_made_again_with_the_other_versions(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"), rollout=ROLLOUT)
        for file in tmp_path.glob(f"{DATABASE_FILE}*"):
            file.unlink()
        entry = registry.get("a")
        assert entry is not None
        assert entry.rollout == ROLLOUT


def test_one_bad_name_leaves_out_all(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        with pytest.raises(InvalidRequestError):
            put_many(registry, [("a", make_spec("v1")), ("b//c", make_spec("v1"))])
        assert registry.names() == []


def test_base_models_are_kept_apart(tmp_path: Path) -> None:
    with opened(tmp_path, "one") as one, opened(tmp_path, "two") as two:
        one.put("a", make_spec("v1"))
        two.put("a", make_spec("v2"))
        two.put("b", make_spec("v2"))
        assert one.names() == ["a"]
        entry = one.get("a")
        assert entry is not None
        assert entry.spec.version == "v1"
        assert [(base, entry.name) for base, entry in read_registry(tmp_path)] == [
            ("one", "a"),
            ("two", "a"),
            ("two", "b"),
        ]


def test_the_base_model_key_depends_on_the_shape() -> None:
    from dataclasses import replace

    assert base_model_key("m", SHAPE) == base_model_key("m", replace(SHAPE))
    assert base_model_key("m", SHAPE) != base_model_key("m", replace(SHAPE, num_layers=5))


def test_two_connections_see_each_other(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put("a", make_spec("v1"))
        assert two.names() == ["a"]
        one.put("a", make_spec("v2"))
        assert versions(two) == {"a": "v2"}


def test_what_a_killed_process_committed_is_there_and_nothing_is_half_written(tmp_path: Path) -> None:
    with start_writer(tmp_path) as writer, opened(tmp_path) as reader:
        assert writer.stdout is not None
        try:
            for _ in range(40):
                last = int(writer.stdout.readline())
                assert f"a{last}-0" in reader.names()  # a second process, while the first one writes
        finally:
            writer.kill()
    with opened(tmp_path) as registry:
        names = set(registry.names())
        assert {f"a{number}-{part}" for number in range(last + 1) for part in range(3)} <= names
        assert len(names) % 3 == 0
        assert len(registry.all()) == len(names)
        registry.put("after", make_spec("v"))


def test_a_file_size_limit_changes_nothing_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("before", make_spec("v"))
    with start_writer(tmp_path, max_file_bytes=200_000) as writer:
        output, _ = writer.communicate(timeout=60)
    assert writer.returncode == 0
    *committed, failure = output.splitlines()
    assert failure.startswith("StorageError")
    assert "nothing was changed" in failure
    with opened(tmp_path) as registry:
        assert len(registry.names()) == 1 + 3 * len(committed)
        registry.put("after", make_spec("v"))


def test_a_full_disk_changes_nothing_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("before", make_spec("v"))
        [num_pages] = registry._connection.execute("PRAGMA page_count").fetchone()
        registry._connection.execute(f"PRAGMA max_page_count = {num_pages + 2}")
        with pytest.raises(StorageError, match="the disk is full, nothing was changed"):
            put_many(registry, [(f"a{n}", make_spec("v", num_layers=64)) for n in range(50)])
        assert registry.names() == ["before"]
        registry.put("small", make_spec("v"))
        assert registry.names() == ["before", "small"]


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere; drop to nobody while the body runs."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY_UID)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_explained(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    with without_privileges():
        with pytest.raises(StorageError, match=r"cannot be written.*make the state folder writable"):
            AdapterRegistry(open_folder, BASE_MODEL)
        with pytest.raises(StorageError, match="cannot be made: Permission denied"):
            AdapterRegistry(open_folder / "sub", BASE_MODEL)


def test_a_database_that_cannot_be_written_is_explained(open_folder: Path) -> None:
    with opened(open_folder) as registry:
        registry.put("a", make_spec("v"))
    (open_folder / DATABASE_FILE).chmod(0o444)
    open_folder.chmod(0o555)
    with without_privileges(), pytest.raises(StorageError, match="cannot be written"):
        AdapterRegistry(open_folder, BASE_MODEL)


def test_a_state_folder_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StorageError, match="cannot be made"):
        AdapterRegistry(tmp_path / "state", BASE_MODEL)


def test_a_file_that_is_no_database_is_explained(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(StorageError, match=r"is damaged .*move it away together with its -wal"):
        AdapterRegistry(tmp_path, BASE_MODEL)


def test_a_damaged_database_is_found_when_it_is_opened(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        put_many(registry, [(f"a{n}", make_spec("v")) for n in range(200)])
    with (tmp_path / DATABASE_FILE).open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 8192)
    with pytest.raises(StorageError, match="is damaged"):
        AdapterRegistry(tmp_path, BASE_MODEL)


def test_a_damaged_entry_is_explained(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("a", make_spec("v"))
        registry._connection.execute("UPDATE adapters SET spec = '{}'")
        with pytest.raises(StorageError, match="the entry of adapter 'a' is damaged"):
            registry.all()


def test_the_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry._connection.execute("PRAGMA user_version = 8")
    with pytest.raises(StorageError, match=r"newer version \(schema 8, this one knows 7\)"):
        AdapterRegistry(tmp_path, BASE_MODEL)


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StorageError, match="database of another program"):
        AdapterRegistry(tmp_path, BASE_MODEL)


def test_a_folder_without_registry_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is it the state folder of a server"):
        read_registry(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_new_database_is_opened_by_several_at_once(tmp_path: Path) -> None:
    """Two servers that start on one new state folder do this."""

    def open_one(number: int, ready: Barrier) -> dict[str, str]:
        ready.wait()
        with opened(tmp_path / f"{number}") as registry:
            return versions(registry)

    with ThreadPoolExecutor(4) as pool:
        for number in range(40):
            (tmp_path / f"{number}").mkdir()
            ready = Barrier(4)
            openings = [pool.submit(open_one, number, ready) for _ in range(4)]
            assert [opening.result() for opening in openings] == [{}] * 4
