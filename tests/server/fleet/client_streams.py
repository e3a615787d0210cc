"""Streams as the openai client sees them, undisturbed and disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import openai
import pytest
from server_process import PATIENCE_S, replicas

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


class Stream(NamedTuple):
    """Each choice as a client sees it, and the number of tokens in the usage."""

    seen: list[Seen]
    num_tokens: int


def stream(url: str, on_chunk: Callable[[int], None] = lambda number: None, **options: Any) -> Stream:
    seen = [Seen() for _ in range(options.get("n", 1))]
    num_tokens = 0
    fields = {"model": "one", "prompt": "the dog", "max_tokens": MAX_TOKENS, **options}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        chunks = client.completions.create(
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}, **fields
        )
        for number, chunk in enumerate(chunks):
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
    return Stream(seen, num_tokens)


def num_sent(url: str) -> int:
    return sum(row["sent"] for row in replicas(url))


def check_disturbed(url: str, disturb: Callable[[int], None], expected: Stream, **options: Any) -> None:
    """Run a stream with `disturb`, which is given a replica that has it: it is to be as `expected`, which had
    the same options and was not disturbed."""
    before = num_sent(url)

    def on_chunk(number: int) -> None:
        if number == 1:
            busy = [row["replica"] for row in replicas(url) if row["in_flight"]]
            disturb(busy[0])

    found = stream(url, on_chunk, **options)
    assert num_sent(url) > before + options.get("n", 1), "nothing was sent to another replica"
    assert found.num_tokens == expected.num_tokens
    for one, other in zip(found.seen, expected.seen, strict=True):
        assert (one.text, one.tokens, one.finish_reason) == (other.text, other.tokens, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
