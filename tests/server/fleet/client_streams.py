"""Streams as the openai client sees them, undisturbed and disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import PATIENCE_S, replicas, wait_until

from loraplex.server.fleet.decision_log import logged_decisions
from loraplex.server.fleet.routing_events import Sent, call_id_of

MAX_TOKENS = 500
SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 3,
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logprobs": 2,
}


@dataclass
class Seen:
    """Everything that a client sees of one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class Stream:
    """Each choice as a client sees it, and the number of tokens in the usage. `call_id`: its id, which two
    streams that are alike do not share."""

    seen: list[Seen]
    num_tokens: int
    call_id: str = field(compare=False)


def stream(url: str, on_chunk: Callable[[int], None] = lambda number: None, **options: Any) -> Stream:
    seen = [Seen() for _ in range(options.get("n", 1))]
    num_tokens, call_id = 0, ""
    fields = {"model": "one", "prompt": "the dog", "max_tokens": MAX_TOKENS, **options}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        chunks = client.completions.create(
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}, **fields
        )
        for number, chunk in enumerate(chunks):
            call_id = chunk.id
            for choice in chunk.choices:
                one = seen[choice.index]
                one.text += choice.text
                one.finish_reason = choice.finish_reason or one.finish_reason
                if choice.logprobs is not None:
                    one.tokens += choice.logprobs.tokens or []
                    one.logprobs += choice.logprobs.token_logprobs or []
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            on_chunk(number)
    return Stream(seen, num_tokens, call_id)


def num_sent(state: Path, call_id: str) -> int:
    """Return how often the choices of a call were sent to a replica, by the log of decisions."""
    return sum(
        isinstance(event, Sent) and call_id_of(event.request_id) == call_id
        for events in logged_decisions(state)
        for event in events
    )


def check_disturbed(
    url: str, state: Path, disturb: Callable[[int], None], expected: Stream, **options: Any
) -> None:
    """Run a stream with `disturb`, which is given a replica that has it: it is to be as `expected`, which had
    the same options and was not disturbed. `state`: the state folder of the fleet."""

    def on_chunk(number: int) -> None:
        if number == 1:
            busy = [row["replica"] for row in replicas(url) if row["in_flight"]]
            disturb(busy[0])

    found = stream(url, on_chunk, **options)
    wait_until(
        lambda: num_sent(state, found.call_id) > options.get("n", 1), "nothing was sent to another replica"
    )
    assert found.num_tokens == expected.num_tokens
    for one, other in zip(found.seen, expected.seen, strict=True):
        assert (one.text, one.tokens, one.finish_reason) == (other.text, other.tokens, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
