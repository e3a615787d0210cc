"""Amounts used in the last minute, against a limit: a sliding window.

    slots of 0.1 s    | 3 | 0 | 5 | 2 | ...            each expires 60 s after its end
                      '--- used ---------'  + debt

In no minute more than the limit is *booked*. What is used beyond it, as the length of an answer is not known
when it begins, is debt: it is booked as soon as earlier amounts expire, and until then nothing more may be
used. So the limit holds on average, whatever the sizes of requests.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_SLOTS_PER_S: Final = 10
_KEPT_SLOTS: Final = 60 * _SLOTS_PER_S + 1
_KEPT_S: Final = _KEPT_SLOTS / _SLOTS_PER_S


class MinuteWindow:
    """`limit`: what may be used in a minute, None for any amount; it may be changed at any time."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._slots: deque[list[int]] = deque()  # [slot, amount], oldest first
        self._booked = 0
        self._debt = 0

    def use(self, amount: int, now_s: float) -> None:
        """Use an amount, even beyond the limit."""
        self._advance(now_s)
        booked = amount
        if self.limit is not None:
            booked = 0 if self._debt else min(amount, max(self.limit - self._booked, 0))
        self._book(booked, int(now_s * _SLOTS_PER_S))
        self._debt += amount - booked

    def give_back(self, amount: int, now_s: float) -> None:
        """Undo the use of an amount, the latest first."""
        self._advance(now_s)
        undone = min(amount, self._debt)
        self._debt -= undone
        amount -= undone
        while amount > 0 and self._slots:
            slot = self._slots[-1]
            undone = min(amount, slot[1])
            slot[1] -= undone
            amount -= undone
            self._booked -= undone
            if slot[1] == 0:
                self._slots.pop()

    def room(self, now_s: float) -> int:
        """Return what may be used now; negative if too much was used. Not without a limit."""
        assert self.limit is not None
        self._advance(now_s)
        return self.limit - self._booked - self._debt

    def wait_s(self, wanted: int, now_s: float) -> float:
        """Return the seconds until there is room for an amount, which must be within the limit."""
        missing = wanted - self.room(now_s)
        if missing <= 0:
            return 0.0
        assert self.limit is not None
        rounds, missing = divmod(missing - 1, self.limit) if self._debt else (0, missing - 1)
        for slot, amount in self._slots:
            missing -= amount
            if missing < 0:
                return max(self._expiry_s(slot) - now_s, 0.0) + _KEPT_S * rounds
        return _KEPT_S * (rounds + 1)

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until all that was used has expired."""
        self._advance(now_s)
        if not self._slots:
            return 0.0
        rounds = 0 if self.limit is None else -(-self._debt // self.limit)
        return self._expiry_s(self._slots[-1][0]) - now_s + _KEPT_S * rounds

    def _advance(self, now_s: float) -> None:
        """Let amounts expire, and book debt in their places."""
        now = int(now_s * _SLOTS_PER_S)
        slots = self._slots
        while slots and (expired := slots[0][0] + _KEPT_SLOTS) <= now:
            _, amount = slots.popleft()
            self._booked -= amount
            free = self._debt if self.limit is None else max(self.limit - self._booked, 0)
            repaid = min(self._debt, free)
            self._debt -= repaid
            self._book(repaid, expired)

    def _book(self, amount: int, slot: int) -> None:
        if amount <= 0:
            return
        self._booked += amount
        if self._slots and self._slots[-1][0] >= slot:
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])

    @staticmethod
    def _expiry_s(slot: int) -> float:
        return (slot + _KEPT_SLOTS) / _SLOTS_PER_S
