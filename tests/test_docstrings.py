"""Docstrings are sentences: none begins with a word that makes it a fragment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
FOLDERS: Final = ("loraplex", "benchmarks", "scripts", "tests")
FRAGMENTS: Final = ("Of", "By", "Whether", "What", "Whoever", "How", "Where", "When", "As", "For")


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each fragment among docstrings, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.split():
                    first = text.split()[0].rstrip(",:;")
                    if first in FRAGMENTS:
                        yield statement.lineno, first


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_sentences(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word} ..."
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, word in fragments(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with a verb, or with a noun that has one"


def test_fragments_are_found_wherever_they_are() -> None:
    source = '"""Whether it is."""\nA = 1\n"""Of a row."""\ndef f():\n    """Return what is."""\n'
    source += 'class C:\n    """By name."""\n    x: int\n    """Offset."""\n    y: int\n    """How many."""\n'
    assert list(fragments(source)) == [(1, "Whether"), (3, "Of"), (7, "By"), (11, "How")]
