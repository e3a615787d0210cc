"""Drives an engine core by hand, checking its books after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.request import FinishReason, TokenLogprob
from loraplex.engine.core import Engine


@dataclass
class Finished:
    """All that came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    adapter_hit: bool | None = None
    error: str | None = None
    error_param: str | None = None


def step(engine: Engine, done: dict[str, Finished]) -> None:
    """One step; outputs are added to `done`."""
    for output in engine.step():
        request = done.setdefault(output.request_id, Finished())
        assert request.finish_reason is None, "output after the end"
        request.token_ids += output.token_ids
        request.logprobs += output.logprobs
        request.prompt_logprobs = request.prompt_logprobs or output.prompt_logprobs
        request.finish_reason = output.finish_reason
        request.stop_token_id = output.stop_token_id
        request.num_cached_tokens = output.num_cached_tokens
        request.adapter_hit = output.adapter_hit
        request.error = output.error
        request.error_param = output.error_param
    engine.take_removed_adapters()
    engine.check_integrity()


def run_to_end(engine: Engine, max_steps: int = 20_000) -> dict[str, Finished]:
    """Step until nothing is left; every request that was added must end."""
    done: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        step(engine, done)
    assert not engine.has_work(), "the engine does not come to an end"
    assert all(request.finish_reason is not None for request in done.values())
    return done
