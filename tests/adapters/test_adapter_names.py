from __future__ import annotations

from pathlib import Path

import pytest
from adapter_factory import write_adapter

from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.names import MAX_NAME_CHARS, validate_adapter_name
from loraplex.core.errors import AdapterError, InvalidRequestError


@pytest.mark.parametrize(
    "name", ["a", "sql-v2", "Team_7.final", "-", "0", "org/sql", "a/b/c.1", "x" * MAX_NAME_CHARS]
)
def test_good_names_pass(name: str) -> None:
    assert validate_adapter_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "a/.b",
        "a\\b",
        "base:adapter",
        "a b",
        "a\n",
        "é",
        "a\0",
        "x" * 129,
    ],
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="adapter name") as caught:
        validate_adapter_name(name, param="lora_name")
    assert caught.value.param == "lora_name"


def test_adapters_of_a_folder_are_found_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("zeta", "alpha", "mid"):
        write_adapter(tmp_path / name)
    (tmp_path / "README.md").write_text("not a folder")
    found = discover_adapters(tmp_path)
    assert found.adapters == tuple((name, tmp_path / name) for name in ("alpha", "mid", "zeta"))
    assert found.notes == ()


def test_adapters_of_folders_in_a_folder_have_names_of_two_parts(tmp_path: Path) -> None:
    for name in ("sql", "org/sql", "org/poet", "sql/checkpoint-3", "org/.hidden", "a/b/too-deep"):
        write_adapter(tmp_path / name)
    found = discover_adapters(tmp_path)
    assert found.adapters == tuple((name, tmp_path / name) for name in ("org/poet", "org/sql", "sql"))
    deep, hidden = found.notes
    assert f"skipped {tmp_path / 'a'}: no adapter_config.json" in deep
    assert "not a valid adapter name" in hidden


def test_what_is_skipped_is_noted(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good")
    write_adapter(tmp_path / "bad name")
    (tmp_path / "empty").mkdir()
    found = discover_adapters(tmp_path)
    assert [name for name, _ in found.adapters] == ["good"]
    assert len(found.notes) == 2
    assert "not a valid adapter name" in found.notes[0]
    assert "no adapter_config.json in it" in found.notes[1]


def test_an_adapter_given_in_place_of_its_parent_is_noted(tmp_path: Path) -> None:
    found = discover_adapters(write_adapter(tmp_path / "a"))
    assert found.adapters == ()
    assert "is itself an adapter" in found.notes[0]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="does not exist; create it"):
        discover_adapters(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match="is a file"):
        discover_adapters(tmp_path / "file")
