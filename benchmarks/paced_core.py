"""An engine core without a model that emits tokens at a set pace. Each token carries the time it was emitted.

It is for benchmarks of everything in front of engines: any delay that a client sees was added on the way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.stats import EngineStats
from loraplex.engine.options import EngineOptions

FIRST_TOKEN_S: Final = 0.02
PACE_S: Final = 0.05
NUM_TIMES: Final = 16_384
TICK_S: Final = 1e-4
"""Seconds of a tick. A token's id is the time in ticks, modulo NUM_TIMES: processes on one machine share a
clock."""
_LONGEST_WAIT_S: Final = 0.001
"""Most seconds of a step, so that a new request does not wait for the next token of another one."""


def token_now() -> int:
    return int(time.monotonic() / TICK_S) % NUM_TIMES


def age_s(token_id: int) -> float:
    """Return the seconds since a token was emitted, if these are less than the span of ids."""
    return (token_now() - token_id) % NUM_TIMES * TICK_S


@dataclass(slots=True)
class _Paced:
    request: EngineRequest
    due_s: float
    num_left: int


@dataclass(kw_only=True)
class PacedCore:
    """An EngineCore that serves any number of requests at the same pace."""

    max_model_len: int = 4096
    num_required: int = 0
    _running: dict[str, _Paced] = field(default_factory=dict)
    _removed: list[str] = field(default_factory=list)

    def add_request(self, request: EngineRequest) -> None:
        assert request.params.max_tokens is not None
        due_s = time.monotonic() + FIRST_TOKEN_S
        self._running[request.request_id] = _Paced(request, due_s, request.params.max_tokens)

    def cancel(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def add_adapter(self, spec: AdapterSpec) -> None:
        pass

    def stage_adapter(self, version: str) -> None:
        pass

    def remove_adapter(self, version: str) -> None:
        self._removed.append(version)

    def take_removed_adapters(self) -> Sequence[str]:
        removed, self._removed = self._removed, []
        return removed

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> Sequence[EngineOutput]:
        """Wait for the next due token, but only briefly, and emit all due tokens."""
        next_s = min(each.due_s for each in self._running.values())
        time.sleep(min(max(next_s - time.monotonic(), 0.0), _LONGEST_WAIT_S))
        now_s = time.monotonic()
        return [
            self._emit(request_id, each)
            for request_id, each in list(self._running.items())
            if each.due_s <= now_s
        ]

    def _emit(self, request_id: str, paced: _Paced) -> EngineOutput:
        paced.due_s += PACE_S
        paced.num_left -= 1
        has_ended = paced.num_left == 0
        if has_ended:
            del self._running[request_id]
        return EngineOutput(
            request_id=request_id,
            token_ids=(token_now(),),
            finish_reason=FinishReason.LENGTH if has_ended else None,
        )

    def prepare(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_kv_blocks=1 << 16)

    def close(self) -> None:
        pass


def build_core(options: EngineOptions) -> PacedCore:
    return PacedCore()
