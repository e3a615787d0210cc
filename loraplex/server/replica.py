"""A replica of a fleet: an engine whose requests another replica can continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

from loraplex.core.request import EngineRequest
from loraplex.engine.output_stream import Take
from loraplex.server.supervised_engine import SupervisedEngine


class Continuation(StrEnum):
    """The result when a replica continues a request with output tokens generated elsewhere.

    SAME: the tokens that the first replica would have generated. RESAMPLED: as good an answer, but not that
    of its seed, because the replica samples as for a first token. IMPOSSIBLE: the replica takes the tokens so
    far as part of the prompt, so penalties would not count them, or their log-probabilities could not be told
    apart from the prompt's.
    """

    SAME = "same"
    RESAMPLED = "resampled"
    IMPOSSIBLE = "impossible"


class Replica(SupervisedEngine, Protocol):
    """A SupervisedEngine that is one of several."""

    def open(self, request: EngineRequest) -> AbstractAsyncContextManager[Take]:
        """Have the replica serve a request until the context ends. Yields the function that takes its outputs
        one by one. Entering the context and taking raise what `generate` does; leaving it after an error may
        raise another one instead."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """The versions that this replica refuses although others may accept them, with the reasons in words.
        It retries them from time to time."""
        ...

    @property
    def stalled(self) -> Sequence[str]:
        """The ids of requests in flight for which it has sent nothing for so long that another replica should
        continue them, if one can: it may hang unnoticed."""
        ...

    @property
    def computes(self) -> bool:
        """Return whether it has recently shown that it computes any request. A request that stalls
        nevertheless was most likely preempted."""
        ...

    def continuation(self, request: EngineRequest) -> Continuation:
        """Return the result of continuing a request that has output tokens."""
        ...

    def hand_over(self, request_id: str | None = None) -> None:
        """Give up the requests in flight, or one of them: outputs that arrived are delivered, then the
        requests raise RequestMovedError. A request that is not in flight, or cannot be given up alone right
        now, continues."""
        ...

    def hand_over_stalled(self, request_ids: Sequence[str]) -> None:
        """Give up stalled requests: they raise EngineSilentError, because a request may be what the replica
        hangs on. The replica gets no others until it completes one, unless it sends tokens of other
        requests."""
        ...
