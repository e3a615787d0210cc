from __future__ import annotations

import io
import json
import shlex
from typing import Any

import pytest
from rich.console import Console

from loraplex.server.banner import Announcer, PhaseTimes

ADAPTERS = ["french", "haiku", "json", "pirate"]


def banner(
    prompts: dict[str, str] | None = None,
    *,
    has_chat: bool = True,
    num_skipped: int = 0,
    replicas: str | None = None,
    batching: str | None = None,
) -> str:
    out = io.StringIO()
    announcer = Announcer(prompts, Console(file=out, soft_wrap=True))
    announcer.ready(
        host="127.0.0.1",
        port=8000,
        base_model="tiny",
        adapters=ADAPTERS,
        num_skipped=num_skipped,
        needs_key=False,
        has_chat=has_chat,
        replicas=replicas,
        batching=batching,
    )
    return out.getvalue()


def examples(prompts: dict[str, str] | None = None, *, has_chat: bool = True) -> list[dict[str, Any]]:
    """Return the bodies of the command lines that a banner shows."""
    shown = banner(prompts, has_chat=has_chat).splitlines()
    lines = [line for line in shown if line.strip().startswith("curl")]
    return [json.loads(shlex.split(line)[-1]) for line in lines]


def test_a_fleet_has_its_replicas_in_the_banner() -> None:
    assert "replicas" not in banner()
    assert "\n  replicas    2, policy auto\n" in banner(replicas="2, policy auto")


def test_a_batching_policy_that_is_not_the_default_is_in_the_banner() -> None:
    assert "batching" not in banner()
    assert "\n  batching    auto\n" in banner(batching="auto")


@pytest.mark.parametrize(
    ("num_in_flight", "line"),
    [
        (0, "shutting down"),
        (1, "shutting down: waiting up to 5 s for 1 request in flight"),
        (12, "shutting down: waiting up to 5 s for 12 requests in flight"),
    ],
)
def test_the_end_is_said_with_what_it_waits_for(num_in_flight: int, line: str) -> None:
    out = io.StringIO()
    announcer = Announcer(console=Console(file=out, soft_wrap=True))
    announcer.stopping(num_in_flight=num_in_flight, grace_s=5.0)
    announcer.stopped()
    assert out.getvalue().splitlines() == [line, "shut down"]


@pytest.mark.parametrize(("number", "words"), [(0, "0 adapters"), (1, "1 adapter"), (2000, "2,000 adapters")])
def test_adapters_are_counted_in_english(number: int, words: str) -> None:
    out = io.StringIO()
    Announcer(console=Console(file=out, soft_wrap=True)).registered(number)
    assert out.getvalue() == f"registered {words}\n"


def test_a_start_is_told_by_its_longest_phases() -> None:
    now_s = 100.0

    def clock() -> float:
        return now_s

    times = PhaseTimes("starting", clock)
    for phase, seconds in (("starting", 2.0), ("reading", 5.0), ("a moment", 0.1), ("reading", 1.0)):
        times.begin(phase)
        now_s += seconds
    assert times.summary() == "8.1 s: starting 2.0 s, reading 6.0 s"


def test_an_example_ends_soon_and_makes_sense() -> None:
    for has_chat in (False, True):
        bodies = examples(has_chat=has_chat)
        assert [(body["max_tokens"], body["temperature"]) for body in bodies] == [(128, 0)] * 3


@pytest.mark.parametrize(
    ("num_skipped", "words"), [(0, None), (1, "1 adapter; the log"), (2000, "2,000 adapters; the log")]
)
def test_the_number_of_adapters_left_out_is_shown(num_skipped: int, words: str | None) -> None:
    lines = [line for line in banner(num_skipped=num_skipped).splitlines() if "left out" in line]
    assert lines == ([] if words is None else [f"  left out    {words} says why"])


def test_the_first_adapters_with_a_prompt_are_shown() -> None:
    shown = examples({"pirate": "Ahoy?", "nobody": "Who?", "haiku": "The moon?", "json": "Cats?"})
    assert [body["model"] for body in shown] == ["tiny", "pirate", "haiku"]
    assert shown[1]["messages"][0]["content"] == "Ahoy?"
    assert [body["model"] for body in examples()] == ["tiny", "french", "haiku"]
