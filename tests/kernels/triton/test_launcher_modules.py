"""A kernel keeps its launcher, whichever modules are loaded after it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from triton.runtime import build

from loraplex.kernels.triton.launcher_modules import load_modules_apart, loaded_apart

NAME = "a_launcher_of_this_test"


def load_again(name: str, path: str) -> ModuleType:
    """Load a compiled module as Python does one that it knows: into the object that has the name."""
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__["launch"] = lambda: path
    return module


@pytest.fixture(autouse=True)
def forget_module() -> Any:
    yield
    sys.modules.pop(NAME, None)


def test_a_launcher_is_not_replaced_by_the_next_one() -> None:
    assert load_again(NAME, "first") is load_again(NAME, "second"), "else there is nothing to keep apart"
    load = loaded_apart(load_again)
    first, second = load(NAME, "first"), load(NAME, "second")
    assert (first.launch(), second.launch()) == ("first", "second")


def test_triton_loads_its_modules_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", load_again)
    load_modules_apart()
    load_modules_apart()
    first = build._load_module_from_path(NAME, "first")
    build._load_module_from_path(NAME, "second")
    assert first.launch() == "first"
    assert build._load_module_from_path.__wrapped__ is load_again, "once is enough"


def test_nothing_is_done_where_triton_has_no_such_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_load_module_from_path")
    load_modules_apart()
    assert not hasattr(build, "_load_module_from_path")
