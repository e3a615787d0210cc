"""The seats of running requests: where the device keeps the last token of each for its next step."""

from __future__ import annotations

from collections.abc import Set

from loraplex.engine.batch import BuiltBatch
from loraplex.engine.cuda.step_buffers import SCRATCH_SEAT
from loraplex.engine.cuda.step_runner import RowSeats


class Seats:
    """Assigns `num_seats` seats to requests. A request gets one in its first step."""

    def __init__(self, num_seats: int) -> None:
        self._seats: dict[str, int] = {}
        self._free = [seat for seat in range(num_seats) if seat != SCRATCH_SEAT]

    def __getitem__(self, request_id: str) -> int:
        return self._seats[request_id]

    def leave(self, request_id: str) -> None:
        """Free a request's seat, if it has one. Steps in flight still write to it, but before any step of
        its next owner."""
        seat = self._seats.pop(request_id, None)
        if seat is not None:
            self._free.append(seat)

    def for_step(self, built: BuiltBatch) -> RowSeats:
        """Return the seats of a step's rows, after giving one to each request that has none."""
        follows: list[bool] = []
        row_seats: list[int] = []
        for chunk in built.chunks:
            seat = self._take(chunk.request_id)
            follows += [chunk.follows] * chunk.num_tokens
            row_seats += [seat] * chunk.num_tokens
        logit_seats = [SCRATCH_SEAT] * built.batch.logit_rows_L.shape[0]
        for request_id, row in built.sampling.items():
            logit_seats[row] = self._seats[request_id]
        return RowSeats(follows=follows, rows=row_seats, logits=logit_seats)

    def _take(self, request_id: str) -> int:
        seat = self._seats.get(request_id)
        if seat is None:
            seat = self._seats[request_id] = self._free.pop()
        return seat

    def check_integrity(self, request_ids: Set[str]) -> None:
        """Assert that only these requests have seats, and each its own."""
        assert self._seats.keys() <= request_ids
        assert len({*self._seats.values(), *self._free}) == len(self._seats) + len(self._free)
