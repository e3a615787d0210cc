"""A replica of a fleet: an engine whose requests another one can go on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

from loraplex.core.request import EngineRequest
from loraplex.engine.output_stream import Take
from loraplex.server.supervised_engine import SupervisedEngine


class Continuation(StrEnum):
    """What comes of a request on a replica that is given tokens of its answer made elsewhere.

    SAME: what the first replica would have made. RESAMPLED: as good an answer, but not the one of its seed,
    as the replica draws as for a first token. IMPOSSIBLE: the tokens made so far are a part of the prompt
    there, and a penalty would not count them, or their log-probabilities be told apart from the prompt's.
    """

    SAME = "same"
    RESAMPLED = "resampled"
    IMPOSSIBLE = "impossible"


class Replica(SupervisedEngine, Protocol):
    """A SupervisedEngine with others beside it."""

    def open(self, request: EngineRequest) -> AbstractAsyncContextManager[Take]:
        """Have the replica serve a request until the context is left, and give what takes its outputs one by
        one. Entering the context and taking raise what `generate` does; leaving it after an error may raise
        another in its place."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """The versions that it was asked to know and refuses, by itself and not as the others would, with the
        reason in words. It tries them again from time to time."""
        ...

    @property
    def stalled(self) -> Sequence[str]:
        """The ids of requests in flight that it has sent nothing of for so long that another one should go on
        with them, if one can: something may hang there that nobody notices."""
        ...

    @property
    def computes(self) -> bool:
        """Tell whether it has shown lately that it computes any request. A request that has stalled all the
        same was most likely preempted."""
        ...

    def continuation(self, request: EngineRequest) -> Continuation:
        """Tell what comes of a request that has tokens of its answer."""
        ...

    def hand_over(self, request_id: str | None = None) -> None:
        """Give up the requests in flight, or one of them: what has come of them is delivered, then they raise
        RequestMovedError. One that is not in flight, or cannot be given up alone just now, goes on."""
        ...

    def hand_over_stalled(self, request_ids: Sequence[str]) -> None:
        """Give up requests that have stalled: they raise EngineSilentError, as a request may be
        what the replica hangs on. It is sent no others until it completes one, unless it sends tokens of
        others."""
        ...
