"""A state folder that two servers use, or that is taken away from one: nothing is lost, and it is said."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from registry_writer import BASE_MODEL, make_spec
from test_registry import opened, start_writer, versions, without_privileges

from loraplex.adapters.registry import DATABASE_FILE, AdapterRegistry, Origin, Removal, read_registry
from loraplex.adapters.server_mark import MARKS_FOLDER
from loraplex.core.errors import StorageError


def names_on_disk(state_dir: Path) -> set[str]:
    return {entry.name for _, entry in read_registry(state_dir)}


@contextmanager
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The body must log no warning."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        yield
    assert caplog.messages == []


def test_an_untouched_folder_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with quiet(caplog), opened(tmp_path) as registry:
        database = os.stat(tmp_path / DATABASE_FILE).st_ino
        registry.names()
        registry.put("a", make_spec("v1"))
        registry.remove("a")
        assert registry.all() == []
        assert os.stat(tmp_path / DATABASE_FILE).st_ino == database
    with quiet(caplog), opened(tmp_path) as registry:
        registry.put("a", make_spec("v1"))
        assert registry.other_servers == []
    assert list((tmp_path / MARKS_FOLDER).iterdir()) == []


@pytest.mark.parametrize("lost", ["folder", "database", "log"])
def test_a_folder_deleted_while_in_use_is_made_again(
    tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    with opened(state) as registry:
        registry.put("before", make_spec("v1"))
        registry.put("gone", make_spec("v1"))
        registry.remove("gone")
        match lost:
            case "folder":
                shutil.rmtree(state)
            case "database":
                (state / DATABASE_FILE).unlink()
            case "log":
                (state / f"{DATABASE_FILE}-wal").unlink()
        registry.put("after", make_spec("v2"))
        assert any("deleted or replaced while in use" in message for message in caplog.messages)
        assert names_on_disk(state) == {"before", "after"}
        with quiet(caplog):
            assert registry.remove("before").was_there
    assert names_on_disk(state) == {"after"}


def test_entries_of_an_earlier_run_survive_a_deleted_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.put("old", make_spec("v1"))
    with opened(tmp_path) as registry:
        shutil.rmtree(tmp_path)
        registry.put("new", make_spec("v2"))
    assert names_on_disk(tmp_path) == {"old", "new"}


def test_a_folder_that_cannot_be_made_again_fails_in_words(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with opened(state) as registry:
        registry.put("a", make_spec("v1"))
        shutil.rmtree(state)
        state.write_text("in the way")
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot be made"):
                registry.put("b", make_spec("v1"))
        state.unlink()
        registry.put("c", make_spec("v1"))
    assert names_on_disk(state) == {"a", "c"}


def test_a_folder_replaced_by_that_of_another_server_gets_both(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.put("mine", make_spec("v1"))
        shutil.rmtree(tmp_path)
        with opened(tmp_path) as two:
            two.put("theirs", make_spec("v2"))
            one.put("more", make_spec("v3"))
            two.put("last", make_spec("v4"))
            expected = {"mine": "v1", "theirs": "v2", "more": "v3", "last": "v4"}
            assert versions(one) == versions(two) == expected
    assert names_on_disk(tmp_path) == set(expected)


def test_two_servers_that_lose_their_folder_put_everything_back(tmp_path: Path) -> None:
    clock = iter(range(1000))
    with (
        closing(AdapterRegistry(tmp_path, BASE_MODEL, wall_clock_s=lambda: next(clock))) as one,
        closing(AdapterRegistry(tmp_path, BASE_MODEL, wall_clock_s=lambda: next(clock))) as two,
    ):
        two.put("theirs", make_spec("v1"))
        assert versions(one) == {"theirs": "v1"}
        two.put("theirs", make_spec("v2"))  # what `one` knows is old now
        shutil.rmtree(tmp_path)
        one.put("mine", make_spec("v3"))
        two.put("more", make_spec("v4"))
        assert versions(one) == versions(two) == {"theirs": "v2", "mine": "v3", "more": "v4"}
        assert one.other_servers == two.other_servers == [os.getpid()]


def test_neither_of_two_servers_removes_what_the_other_wrote(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put("a", make_spec("v1"))
        two.put("b", make_spec("v1"))
        assert two.remove("a") == Removal(was_there=False, held_by=os.getpid())
        assert one.remove_many(["a", "b"]) == {
            "a": Removal(was_there=True, held_by=None),
            "b": Removal(was_there=False, held_by=os.getpid()),
        }
        assert versions(one) == {"b": "v1"}


def test_neither_of_two_servers_overwrites_what_the_other_wrote(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put("a", make_spec("v1"))
        with pytest.raises(StorageError, match=rf"process {os.getpid()}\).*--state-dir of its own"):
            two.put("a", make_spec("v2"))
        blocked = two.put_many([("a", make_spec("v2")), ("b", make_spec("v2"))], origin=Origin.FOLDER)
        assert blocked == {"a": os.getpid()}
        assert versions(one) == {"a": "v1", "b": "v2"}
        one.put("a", make_spec("v3"))
        assert versions(two) == {"a": "v3", "b": "v2"}


@pytest.mark.parametrize("first_unloads", [True, False])
@pytest.mark.parametrize("origins", [(Origin.API, Origin.API), (Origin.API, Origin.FOLDER)])
def test_what_two_servers_loaded_stays_for_the_one_that_did_not_unload_it(
    tmp_path: Path, first_unloads: bool, origins: tuple[Origin, Origin]
) -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(opened(tmp_path)) for _ in range(2))
        one.put("a", make_spec("v1"), origin=origins[0])
        two.put("a", make_spec("v1"), origin=origins[1])
        leaving, staying = (one, two) if first_unloads else (two, one)
        assert leaving.remove("a") == Removal(was_there=True, held_by=os.getpid())
        leaving.close()
        entry = staying.get("a")
        assert entry is not None
        assert entry.origin is origins[1 if first_unloads else 0]
    with opened(tmp_path) as restarted:
        assert restarted.all() == [entry]
        assert restarted.remove("a") == Removal(was_there=True, held_by=None)
        assert restarted.names() == []


def test_each_server_sees_its_own_entry_of_a_name(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put("a", make_spec("v1"), origin=Origin.FOLDER)
        two.put("a", make_spec("v1"), origin=Origin.API)
        origins = [entry.origin for registry in (one, two) for entry in registry.all()]
        assert origins == [Origin.FOLDER, Origin.API]
        assert one.names() == two.names() == ["a"]
    [(_, entry)] = read_registry(tmp_path)
    assert entry.origin is Origin.API, "what was loaded by hand is not known from anywhere else"


def test_a_server_of_another_user_is_not_taken_for_dead(open_folder: Path) -> None:
    for mode in (0o444, 0o000):
        with opened(open_folder) as theirs:
            theirs.put("a", make_spec("v1"))
            for path in (open_folder, open_folder / MARKS_FOLDER):
                path.chmod(0o777)
            for path in open_folder.glob(f"{DATABASE_FILE}*"):
                path.chmod(0o666)
            [mark] = (open_folder / MARKS_FOLDER).iterdir()
            mark.chmod(mode)
            with without_privileges(), opened(open_folder) as mine:
                assert mine.other_servers == [os.getpid()]
                assert mine.remove("a") == Removal(was_there=False, held_by=os.getpid())
                with pytest.raises(StorageError, match="registered 'a' as another version"):
                    mine.put("a", make_spec("v2"))


def test_the_entries_of_a_server_that_ended_are_inherited(tmp_path: Path) -> None:
    with start_writer(tmp_path) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with opened(tmp_path) as early:
            assert early.other_servers == [writer.pid]
            assert not early.remove("a0-0").was_there
            writer.kill()
            writer.wait()
            assert early.other_servers == []
            with opened(tmp_path) as heir:
                assert not early.remove("a0-0").was_there
                assert heir.remove("a0-0").was_there
            assert early.remove("a0-1").was_there
    with opened(tmp_path) as registry:
        registry.put("a0-2", make_spec("other"))


def test_servers_of_other_base_models_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path, "another") as two:
        assert one.other_servers == two.other_servers == []
        one.put("a", make_spec("v1"))
        two.put("a", make_spec("v2"))
        assert (versions(one), versions(two)) == ({"a": "v1"}, {"a": "v2"})
