"""How far a long command is, on stderr: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import typer

Report = Callable[[str, float], None]
"""Takes what is being done and the share of everything that is done, 0 to 1."""

_LINE_EVERY_S: Final = 15.0
_LEAST_SHARE: Final = 0.01
"""Done, before what is left can be estimated."""
_LEAST_S: Final = 2.0


@contextmanager
def shown_progress(doing: str, *, expected: str, at_most: bool = False) -> Iterator[Report]:
    """Show the progress of a command that takes long; yields what is to be called with it.

    `expected` says up front how long it may take. `at_most`: shares are of the most there may be to do, so
    that estimates are upper bounds.
    """
    from rich.console import Console

    typer.echo(f"{doing}: {expected}", err=True)
    if Console(stderr=True).is_terminal:
        with _bar(doing) as report:
            yield report
    else:
        yield ProgressLines(doing, at_most=at_most)


class ProgressLines:
    """A `Report` that writes a line for each phase, and one every few seconds within a long one."""

    def __init__(
        self,
        doing: str,
        *,
        at_most: bool = False,
        write: Callable[[str], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._doing = doing
        self._about = "at most" if at_most else "about"
        self._write = write or _write_line
        self._now_s = now_s
        self._start_s = now_s()
        self._phase = ""
        self._written_s = self._start_s

    def __call__(self, phase: str, done: float) -> None:
        now_s = self._now_s()
        if phase == self._phase and now_s - self._written_s < _LINE_EVERY_S:
            return
        self._phase, self._written_s = phase, now_s
        self._write(f"{self._doing}: {phase}, {done:.0%}{self._left(now_s - self._start_s, done)}")

    def _left(self, elapsed_s: float, done: float) -> str:
        if done < _LEAST_SHARE or elapsed_s < _LEAST_S:
            return ""
        return f", {self._about} {in_words(elapsed_s * (1 - done) / done)} left"


def in_words(seconds: float) -> str:
    """A duration as people say it: 45 s, 12 min, 3 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _bar(doing: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(doing, total=1.0)
        yield lambda phase, done: bar.update(task, description=f"{doing}: {phase}", completed=done)


def _write_line(line: str) -> None:
    typer.echo(line, err=True)
