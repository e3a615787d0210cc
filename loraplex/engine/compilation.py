"""Compiles the grammars of requests beside the engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import Final

from loraplex.core.errors import InvalidRequestError, LoraplexError
from loraplex.core.request import EngineRequest
from loraplex.engine.grammars import AnswerGrammar, Grammars

logger = logging.getLogger(__name__)

_NUM_THREADS: Final = 2


class GrammarCompilation:
    """Requests whose grammars are being compiled. For one thread, except for the compiling itself."""

    def __init__(self, grammars: Grammars | None) -> None:
        """`grammars`: None for an engine without a tokenizer, which refuses structured output."""
        self._grammars = grammars
        self._compiling: dict[str, tuple[EngineRequest, Future[AnswerGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._compiling)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._compiling

    def begin(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError if this engine has no structured output."""
        wanted = request.params.structured_output
        assert wanted is not None
        if self._grammars is None:
            raise InvalidRequestError(
                f"{wanted.param} needs a tokenizer, and this engine was made without one; leave it out",
                param=wanted.param,
            )
        self._compiling[request.request_id] = request, self._threads.submit(self._grammars.compile, request)

    def cancel(self, request_id: str) -> EngineRequest | None:
        """Forget a request, and return it; None if it is not here."""
        if request_id not in self._compiling:
            return None
        request, future = self._compiling.pop(request_id)
        future.cancel()
        return request

    def take(self) -> Iterator[tuple[EngineRequest, AnswerGrammar | LoraplexError]]:
        """Yield requests whose compilation has ended since the last call, with what came of it."""
        for request_id, (request, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[request_id]
                error = future.exception()
                if error is None:
                    yield request, future.result()
                elif isinstance(error, LoraplexError):
                    yield request, error
                else:  # a bug, of ours or of the library: no other request shall end by it
                    logger.error("structured output of %s cannot be compiled", request_id, exc_info=error)
                    yield request, LoraplexError(f"the structured output cannot be compiled: {error}")

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation has ended; not at all if there is none."""
        if self._compiling:
            futures = [future for _, future in self._compiling.values()]
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars")
