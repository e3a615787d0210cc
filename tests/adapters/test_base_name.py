"""An adapter's word for its base model may be another model's, or just another word."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.base_name import base_names, name_adapters, other_base, public_name
from loraplex.adapters.spec import CONFIG_FILE

HUB_FOLDER = "/home/somebody/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abcd"


def adapter_of(folder: Path, base: Any) -> Path:
    """A folder with as much of a checkpoint as names the base."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


@pytest.mark.parametrize(
    ("base", "model"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-0.5B", "/models/qwen2.5-0.5b/"),
        ("C:\\models\\Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        (HUB_FOLDER, "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-0.5B", HUB_FOLDER),
        (None, "Qwen/Qwen2.5-0.5B"),
        ("", "Qwen/Qwen2.5-0.5B"),
        (" ", "Qwen/Qwen2.5-0.5B"),
        ("./", "Qwen/Qwen2.5-0.5B"),
        (7, "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_the_same_model_under_another_path_is_no_other(tmp_path: Path, base: Any, model: str) -> None:
    assert other_base(adapter_of(tmp_path, base), base_names(model)) is None


@pytest.mark.parametrize("base", ["Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B", "x" * 5000])
def test_another_model_is_named(tmp_path: Path, base: str) -> None:
    other = other_base(adapter_of(tmp_path, base), base_names("Qwen/Qwen2.5-0.5B"))
    assert other is not None
    assert other[:20] == base[:20]
    assert len(other) <= 100


def test_a_base_model_is_known_by_its_folder_and_by_what_it_is_served_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Qwen2.5-0.5B"
    folder.mkdir()
    (tmp_path / "current").symlink_to(folder)
    adapter = adapter_of(tmp_path / "adapter", "Qwen/Qwen2.5-0.5B")
    assert other_base(adapter, base_names(str(tmp_path / "current"))) is None
    assert other_base(adapter, base_names("/models/x", "qwen2.5-0.5b")) is None
    assert other_base(adapter, base_names("/models/x")) == "Qwen/Qwen2.5-0.5B"
    monkeypatch.chdir(folder)
    assert other_base(adapter, base_names(os.curdir)) is None


def test_files_that_cannot_be_read_name_nothing(tmp_path: Path) -> None:
    known = base_names("base")
    assert other_base(tmp_path / "nothing", known) is None
    assert other_base(tmp_path, known) is None
    (tmp_path / CONFIG_FILE).write_text("{")
    assert other_base(tmp_path, known) is None


def test_of_many_adapters_some_are_named() -> None:
    assert name_adapters(["a"]) == "adapter 'a'"
    assert name_adapters(["a", "b"]) == "adapters 'a', 'b'"
    assert name_adapters(list("abcdefg")) == "adapters 'a', 'b', 'c', 'd', 'e' and 2 more"


def test_a_folder_is_called_by_its_name_and_a_repository_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Qwen2.5-0.5B"
    snapshot = tmp_path / "models--Qwen--Other" / "snapshots" / "0123abcd"
    for each in (folder, snapshot):
        each.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for model in (f"{folder}", f"{folder}/", ".", "../Qwen2.5-0.5B"):
        assert public_name(model) == "Qwen2.5-0.5B"
    assert public_name(str(snapshot)) == "Other"
    assert public_name("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert public_name("/") == "/"
