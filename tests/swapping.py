"""Swaps files for others at the worst moment: after they were looked at, just before they are opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_on_open: list[Callable[[str], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Python reports every opening of a file here, just before it calls the system."""
    if event == "open" and _on_open and isinstance(arguments[0], str | os.PathLike):
        _on_open[-1](os.fspath(arguments[0]))


sys.addaudithook(_audit)


@contextmanager
def before_opening(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once, at the last moment before a file of that name is opened."""

    def on_open(path: str) -> None:
        if os.path.basename(path) == name and _on_open:
            _on_open.pop()  # what `act` itself opens is not meant
            act()

    _on_open.append(on_open)
    try:
        yield
        assert not _on_open, f"{name} was never opened"
    finally:
        _on_open.clear()


def point(link: Path, target: Path) -> None:
    """Make `link` a symlink to `target`, atomically."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.symlink_to(target)
    os.replace(temporary, link)
