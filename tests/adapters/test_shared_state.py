"""A state folder that two servers use, or that is taken away from one: nothing is lost, and it is said."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from registry_writer import BASE_MODEL, make_spec
from test_registry import ROLLOUT, opened, start_writer, versions, without_privileges

from loraplex.adapters.registry import DATABASE_FILE, AdapterRegistry, Origin, read_registry
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
            assert registry.remove("before")
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


def test_a_server_that_finds_its_lost_folder_made_again_takes_nothing_back(tmp_path: Path) -> None:
    clock = iter(range(1000))
    with (
        closing(AdapterRegistry(tmp_path, BASE_MODEL, wall_clock_s=lambda: next(clock))) as one,
        closing(AdapterRegistry(tmp_path, BASE_MODEL, wall_clock_s=lambda: next(clock))) as two,
    ):
        one.put("kept", make_spec("v1"))
        one.put("moved", make_spec("v1"))
        for name in two.states():  # as a server that follows does
            two.look_up(name)
        shutil.rmtree(tmp_path)
        one.put("moved", make_spec("v2"))
        assert two.has_changed()
        assert versions(one) == versions(two) == {"kept": "v1", "moved": "v2"}


def test_a_name_is_what_the_last_server_made_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put("a", make_spec("v1"), origin=Origin.FOLDER)
        two.put("a", make_spec("v2"))
        assert versions(one) == versions(two) == {"a": "v2"}
        assert one.all() == two.all()
        assert one.remove("a")
        assert not two.remove("a")
        assert one.names() == two.names() == []


def test_of_two_changes_at_once_one_is_done_and_the_other_learns_of_it(tmp_path: Path) -> None:
    clock = iter(range(1000))
    with (
        closing(AdapterRegistry(tmp_path, BASE_MODEL, wall_clock_s=lambda: next(clock))) as one,
        closing(AdapterRegistry(tmp_path, BASE_MODEL, wall_clock_s=lambda: next(clock))) as two,
    ):
        one.put("a", make_spec("v1"))
        one.put("b", make_spec("v1"))
        seen = two.states()
        one.put("a", make_spec("v2"))
        now = two.put_unless_changed([("a", make_spec("v3")), ("b", make_spec("v3"))], seen=seen)
        assert now.keys() == {"b"}
        assert two.states() == one.states() == {"a": one.states()["a"], **now}
        assert versions(one) == {"a": "v2", "b": "v3"}
        assert two.put_unless_changed([("c", make_spec("v1"))], seen={}).keys() == {"c"}
        assert one.put_unless_changed([("c", make_spec("v2"))], seen={}) == {}
        assert one.put_unless_changed([("c", make_spec("v1"))], seen={}).keys() == {"c"}, "that is what it is"


def test_beside_another_server_nothing_is_forgotten_at_a_start(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.put("a", make_spec("v1"), origin=Origin.FOLDER)
        with opened(tmp_path) as two:
            assert two.remove_unless_shared(["a"]) == ()
            assert versions(two) == {"a": "v1"}
        assert one.remove_unless_shared(["a"]) == ["a"]
        assert one.names() == []


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
                assert mine.remove_unless_shared(["a"]) == ()


def test_a_server_that_was_killed_does_not_count(tmp_path: Path) -> None:
    with start_writer(tmp_path) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with opened(tmp_path) as registry:
            assert registry.other_servers == [writer.pid]
            assert registry.remove_unless_shared(["a0-0"]) == ()
            writer.kill()
            writer.wait()
            assert registry.other_servers == []
            assert registry.remove_unless_shared(["a0-0"]) == ["a0-0"]
            assert {"a0-1", "a0-2"} <= set(registry.names())


def test_only_changes_by_others_count_as_such(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        for registry in (one, two):
            assert registry.has_changed()
            assert not registry.has_changed()
        one.put("a", make_spec("v1"), rollout=ROLLOUT)
        assert not one.has_changed()
        assert two.has_changed()
        assert not two.has_changed()
        with opened(tmp_path):
            pass
        assert not two.has_changed(), "a server that only starts changes nothing"
        found = [two.has_version(version) for version in ("v1", "v9", "v0", "other")]
        assert found == [True, True, False, False], "a previous version is not in use"


def test_servers_of_other_base_models_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path, "another") as two:
        assert one.other_servers == two.other_servers == []
        one.put("a", make_spec("v1"))
        two.put("a", make_spec("v2"))
        assert (versions(one), versions(two)) == ({"a": "v1"}, {"a": "v2"})
