"""The stages of a request in docs/architecture.md are those of the code: every name there can be imported."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
_ROW: Final = re.compile(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|[^|]*\|$", re.MULTILINE)
_MOST_HOPS: Final = 15


def hops() -> dict[int, list[str]]:
    """Return the names in each row of the table."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {int(number): re.findall(r"`([\w.]+)`", calls) for number, calls in _ROW.findall(page)}


@cache
def modules() -> dict[str, list[str]]:
    """Return the modules by the names of their files."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "loraplex").rglob("*.py"):
        found.setdefault(path.stem, []).append(module_of(path))
    return found


@cache
def definitions() -> dict[str, list[str]]:
    """Return the modules that define each class and function at their top."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "loraplex").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(module_of(path))
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def resolves(name: str) -> bool:
    """Return whether some module has the class or function that is named, all of it."""
    first, *rest = name.split(".")
    candidates = [(module, (first, *rest)) for module in definitions().get(first, ())]
    if rest:
        candidates += [(module, tuple(rest)) for module in modules().get(first, ())]
    return any(_has(importlib.import_module(module), parts) for module, parts in candidates)


def _has(found: object, parts: Sequence[str]) -> bool:
    for part in parts:
        found = getattr(found, part, None)
    return found is not None


def test_a_request_has_at_most_fifteen_hops() -> None:
    assert 0 < len(hops()) <= _MOST_HOPS
    assert list(hops()) == list(range(1, len(hops()) + 1))
    assert all(hops().values())


@pytest.mark.parametrize("name", [name for names in hops().values() for name in names])
def test_every_hop_is_code(name: str) -> None:
    assert resolves(name)


def test_names_that_are_gone_are_noticed() -> None:
    assert not resolves("Engine.no_such_method")
    assert not resolves("NoSuchClass")
    assert not resolves("continuing.no_such_function")


def test_a_module_is_no_hop() -> None:
    assert resolves("generation_routes._start_chat")
    assert not resolves("generation_routes")
