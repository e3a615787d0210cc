"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StopScan:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """The stop strings of a request, prepared once for all texts that they may end.

    Each has a Knuth-Morris-Pratt automaton, so that a character costs constant time however long the strings
    are.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        # Longest first: if one character completes several, the first one found wins.
        self.stops = sorted(stops, key=len, reverse=True)
        self.failures = [_failure_table(stop) for stop in self.stops]
        self.include_stop = include_stop


class StopMatcher:
    """Withholds only text that could be the beginning of a stop string.

    The stop string that is completed first wins, the longest of several completed by one character:
    the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._stops = strings.stops
        self._failures = strings.failures
        self._include_stop = strings.include_stop
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Scan more text. After a stop string was found, do not push again."""
        buffer = self._held + text
        for end, char in enumerate(buffer[len(self._held) :], start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                if self._advance(index, char) == len(stop):
                    cut = end if self._include_stop else end - len(stop)
                    return StopScan(text=buffer[:cut], stop=stop)
        num_held = max(self._matched)
        split = len(buffer) - num_held
        self._held = buffer[split:]
        return StopScan(text=buffer[:split])

    def flush(self) -> str:
        """Return the withheld text: no more text follows, so it was no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, index: int, char: str) -> int:
        """Feed one character to one automaton, and return how many characters of its stop string now
        match."""
        stop, failure, state = self._stops[index], self._failures[index], self._matched[index]
        while state and stop[state] != char:
            state = failure[state - 1]
        if stop[state] == char:
            state += 1
        self._matched[index] = state
        return state


def _failure_table(pattern: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is a suffix of it."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table
