"""`kill -9` under streams: real fleets, of engine processes and of servers, and the real openai client, which
sees the answer that it would have had."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import PATIENCE_S, replicas, serving, wait_until

MAX_TOKENS = 500
SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 3,
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three engine processes."""
    state = tmp_path_factory.mktemp("state")
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(state), "--replicas", "3")
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url


@dataclass
class Seen:
    """All that a client sees of one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def stream(
    url: str, on_chunk: Callable[[int], None] = lambda number: None, **options: Any
) -> tuple[list[Seen], int]:
    """Return what a client sees of each choice, and how many tokens it is told to have got."""
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
    return seen, num_tokens


def num_sent(url: str) -> int:
    return sum(row["sent"] for row in replicas(url))


def check_disturbed(url: str, disturb: Callable[[int], None], **options: Any) -> None:
    """Have a stream answered twice: with `disturb`, which is given a replica that has it, and without."""
    expected, num_expected = stream(url, **options)
    before = num_sent(url)

    def on_chunk(number: int) -> None:
        if number == 1:
            busy = [row["replica"] for row in replicas(url) if row["in_flight"]]
            disturb(busy[0])

    found, num_found = stream(url, on_chunk, **options)
    assert num_sent(url) > before + options.get("n", 1), "nothing was sent to another replica"
    assert num_found == num_expected
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.tokens, one.finish_reason) == (other.text, other.tokens, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_streams_outlive_their_engine_processes(fleet: str) -> None:
    def kill(number: int) -> None:
        os.kill(replicas(fleet)[number]["pid"], signal.SIGKILL)

    def is_whole() -> bool:
        return all(row["state"] == "ready" for row in replicas(fleet))

    check_disturbed(fleet, kill, **SAMPLED)
    wait_until(is_whole, "the replica is back")
    (whole,), _ = stream(fleet, temperature=0)
    stop = next(
        part
        for start in range(len(whole.text) - 40, len(whole.text) - 3)
        if whole.text.find(part := whole.text[start : start + 3]) > len(whole.text) // 2
    )
    check_disturbed(fleet, kill, temperature=0, stop=stop)
    wait_until(is_whole, "the replica is back")
    drained: list[int] = []

    def drain(number: int) -> None:
        answer = httpx.post(f"{fleet}/v1/fleet/drain", json={"replica": number, "move": True})
        assert answer.status_code == 200, answer.text
        drained.append(number)

    check_disturbed(fleet, drain, **SAMPLED)
    (number,) = drained
    assert replicas(fleet)[number]["in_flight"] == 0


def test_a_stream_outlives_the_server_behind_the_front(
    front: str, backends: list[tuple[subprocess.Popen[str], str]]
) -> None:
    """It ends one of the backends: those that use them afterwards have to take the others."""
    short: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    expected = stream(front, **short)
    killed: list[int] = []

    def kill(number: int) -> None:
        backends[number][0].kill()
        backends[number][0].wait()
        killed.append(number)

    check_disturbed(front, kill, **SAMPLED)
    for _ in range(8):
        assert stream(front, **short) == expected
    states = [row["state"] for row in replicas(front)]
    (number,) = killed
    assert states.pop(number) == "unreachable"
    assert states == ["ready", "ready"]
