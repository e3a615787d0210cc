"""Reading a file that the page cache holds, by one thread or by several at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex.perf.line import Line, fit_line


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCost:
    """A line for each number of readers that was measured, fewest first.

    No formula between them: how much more readers help depends on caches and memory channels, and may well
    be more than their number.
    """

    by_readers: tuple[tuple[int, Line], ...]

    def __post_init__(self) -> None:
        numbers = [number for number, _ in self.by_readers]
        assert numbers, "at least one number of readers was measured"
        assert numbers == sorted(set(numbers)), "numbers of readers grow"

    def seconds(self, num_bytes: float, num_readers: int = 1) -> float:
        """Of a number that was not measured, take the next smaller one that was: more cost no more."""
        return self.line(num_readers).seconds(num_bytes)

    def best_readers(self, num_bytes: float, most: int) -> int:
        """The number of at most `most` that reads this amount soonest; the smallest of equals."""
        numbers = [number for number, _ in self.by_readers if number <= most]
        return min(numbers, key=lambda number: self.seconds(num_bytes, number), default=1)

    def line(self, num_readers: int) -> Line:
        """What `seconds` takes for this number."""
        fitting = [line for number, line in self.by_readers if number <= num_readers]
        return fitting[-1] if fitting else self.by_readers[0][1]


def fit_read_cost(samples: Mapping[int, Sequence[tuple[float, float]]]) -> ReadCost:
    """From (bytes, seconds) by number of readers."""
    return ReadCost(by_readers=tuple((number, fit_line(samples[number])) for number in sorted(samples)))
