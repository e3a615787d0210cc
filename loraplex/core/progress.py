"""Progress of a long task: a bar on a terminal, otherwise a plain line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, float | None], None]
"""Called with the current phase and the share done, 0 to 1; None while the share is unknown."""

_LINE_EVERY_S: Final = 10.0
_LEAST_SHARE: Final = 0.01
"""Share that must be done before the remaining time is estimated."""
_LEAST_S: Final = 2.0


@contextmanager
def shown_progress(
    doing: str, console: Console | None = None, *, expected: str | None = None, left: str | None = "about"
) -> Iterator[Report]:
    """Show progress on `console`, on stderr if None; yields the function to report progress with.

    `expected` says up front how long it may take. `left` is the word before the estimated remaining time: "at
    most" if shares are of an upper bound of the work. None if shares are of one phase each and say nothing
    about the rest.
    """
    if console is None:
        from rich.console import Console as RichConsole

        console = RichConsole(stderr=True, highlight=False, soft_wrap=True)
    write = _line_writer(console)
    if expected is not None:
        write(f"{doing}: {expected}")
    if console.is_terminal:
        with _bar(doing, console, has_estimate=left is not None) as report:
            yield report
    else:
        yield ProgressLines(doing, left=left, write=write)


class ProgressLines:
    """A `Report` that writes a line for each phase, and one every few seconds within a long phase."""

    def __init__(
        self,
        doing: str,
        *,
        left: str | None,
        write: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._doing = doing
        self._left = left
        self._write = write
        self._now_s = now_s
        self._start_s = now_s()
        self._phase = ""
        self._written_s = self._start_s

    def __call__(self, phase: str, done: float | None) -> None:
        now_s = self._now_s()
        if phase == self._phase and now_s - self._written_s < _LINE_EVERY_S:
            return
        self._phase, self._written_s = phase, now_s
        share = "" if done is None else f", {done:.0%}{self._estimate(now_s - self._start_s, done)}"
        self._write(f"{self._doing}: {phase}{share}")

    def _estimate(self, elapsed_s: float, done: float) -> str:
        if self._left is None or done < _LEAST_SHARE or elapsed_s < _LEAST_S:
            return ""
        return f", {self._left} {in_words(elapsed_s * (1 - done) / done)} left"


def in_words(seconds: float) -> str:
    """Return a duration for people: 45 s, 12 min, 3 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _line_writer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, style="dim", markup=False)


@contextmanager
def _bar(doing: str, console: Console, *, has_estimate: bool) -> Iterator[Report]:
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    ]
    if has_estimate:
        columns += [TextColumn("left"), TimeRemainingColumn(compact=True)]
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(doing, total=1.0)
        yield lambda phase, done: bar.update(task, description=f"{doing}: {phase}", completed=done or 0.0)
