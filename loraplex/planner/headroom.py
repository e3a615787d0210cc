"""Room that a plan leaves on each GPU for more requests than were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.judge import Judge, Verdict

DEFAULT: Final = 0.05
"""Share by which rates are taken for higher. Over half an hour, requests that arrive at random are a few
percent more or fewer than their rate, and a GPU that is full by one seed starves by another."""


class HeadroomJudge:
    """Asks another judge whether a GPU would serve rates that are higher by a share."""

    def __init__(self, judge: Judge, share: float) -> None:
        self._judge = judge
        self._factor = 1.0 + share

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        """See `Judge`."""
        if self._factor == 1.0:
            return self._judge.judge(adapters, num_slots)
        more = [replace(each, rate_rps=each.rate_rps * self._factor) for each in adapters]
        return self._judge.judge(more, num_slots)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        """See `Judge`."""
        return self._judge.fits(max_rank, num_slots)
