"""The stages of a request in docs/architecture.md are those of the code: every name there can be imported."""

from __future__ import annotations

import ast
import importlib
import re
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
def places() -> dict[str, list[str]]:
    """Return the modules that define each name at their top, and those that are called by each name."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "loraplex").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found.setdefault(path.stem, []).append(module)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(module)
    return found


def resolves(name: str) -> bool:
    """Return whether some module has what is named, all of it."""
    first, *rest = name.split(".")
    for place in places().get(first, ()):
        found: object = importlib.import_module(place)
        for part in rest if place.endswith(f".{first}") else (first, *rest):
            found = getattr(found, part, None)
        if found is not None:
            return True
    return False


def test_a_request_has_at_most_fifteen_hops() -> None:
    assert list(hops()) == list(range(1, _MOST_HOPS + 1))
    assert all(hops().values())


@pytest.mark.parametrize("name", [name for names in hops().values() for name in names])
def test_every_hop_is_code(name: str) -> None:
    assert resolves(name)


def test_names_that_are_gone_are_noticed() -> None:
    assert not resolves("Engine.no_such_method")
    assert not resolves("NoSuchClass")
