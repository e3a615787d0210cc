"""Structured output of a real fleet, and of a real engine of two processes, by the official client."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from server_process import replicas, serving
from tool_templates import tool_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["two replicas", pytest.param("two shards", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("base")
    base = tiny.save_model(folder, vocab_size=448, max_position_embeddings=2048)
    tool_tokenizer("hermes").save_pretrained(folder)
    tiny.save_adapter(folder / "adapters" / "poet", base, rank=4)
    options = ["--adapters", str(folder / "adapters"), "--state-dir", str(tmp_path_factory.mktemp("state"))]
    command = "fleet serve" if request.param == "two replicas" else "serve"
    options += {"two replicas": ["--replicas", "2"], "two shards": ["--tensor-parallel", "2"]}[request.param]
    with serving(folder, *options, command=command) as (_, found, _):
        yield found


def test_the_official_client_gets_what_its_schema_says(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for model in ("tiny", "poet"):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Where to?"}],
                response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}},
                n=2,
                seed=1,
                max_completion_tokens=200,
            )
            for choice in answer.choices:
                found = json.loads(choice.message.content or "")
                assert found.keys() == {"city", "hot"}
                assert (choice.finish_reason, found["city"] in ("Rome", "Oslo")) == ("stop", True)


def test_streams_and_other_requests_are_served_beside_it(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        structured = client.completions.create(
            model="poet",
            prompt="the dog",
            stream=True,
            max_tokens=100,
            extra_body={"guided_choice": ["a b", "c"]},
        )
        free = client.completions.create(model="poet", prompt="the dog", max_tokens=20)
        assert "".join(chunk.choices[0].text for chunk in structured) in ("a b", "c")
        assert free.choices[0].text not in ("a b", "c")
        for refused, fix in (
            ("(", "correct the regular expression"),
            ("a{1000000000}", "make repetitions and lengths smaller"),
        ):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=fix):
                    client.completions.create(
                        model="tiny", prompt="x", stream=stream, extra_body={"guided_regex": refused}
                    )


@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings_end_structured_answers_and_streams_of_them(url: str, n: int) -> None:
    asked: dict[str, Any] = {"model": "poet", "prompt": "the dog", "max_tokens": 50, "n": n, "seed": 1}
    asked["extra_body"] = {"guided_regex": "[a-c]{3}END[0-9]{3}"}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        complete = client.completions.create(**asked)
        for choice in complete.choices:
            assert re.fullmatch("[a-c]{3}END[0-9]{3}", choice.text)
        stops = ["-", "ND"]
        stopped = client.completions.create(**asked, stop=stops)
        texts = dict.fromkeys(range(n), "")
        ends: dict[int, str] = {}
        for chunk in client.completions.create(**asked, stop=stops, stream=True):
            for part in chunk.choices:
                texts[part.index] += part.text
                if part.finish_reason is not None:
                    ends[part.index] = part.finish_reason
    assert [choice.text for choice in stopped.choices] == [each.text[:4] for each in complete.choices]
    assert [choice.text for choice in stopped.choices] == list(texts.values())
    assert {choice.finish_reason for choice in stopped.choices} == {*ends.values()} == {"stop"}


def test_the_official_client_gets_calls_of_its_tools(url: str) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "book", "parameters": SCHEMA}}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="poet",
            messages=[{"role": "user", "content": "Hi"}],
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "book"}},
            max_completion_tokens=200,
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.slow
def test_a_structured_stream_goes_on_when_its_replica_is_killed(url: str) -> None:
    """The last test of this module: it does not wait for the replica to be back."""
    if httpx.get(f"{url}/v1/fleet").status_code == 404:
        pytest.skip("one engine, whose death ends its streams")
    regex = "([a-f]{3}-){400}END"  # so long that the replica dies before it has all of it
    asked: dict[str, Any] = {"model": "poet", "prompt": "the dog", "max_tokens": 1800, "seed": 5}
    asked["extra_body"] = {"guided_regex": regex}
    text, killed = "", None
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(**asked).choices[0]
        for chunk in client.completions.create(**asked, stream=True):
            text += chunk.choices[0].text
            if killed is None and text:
                [killed] = [row for row in replicas(url) if row["in_flight"]]
                os.kill(killed["pid"], signal.SIGKILL)
    assert re.fullmatch(regex, whole.text)
    assert text == whole.text
    page = httpx.get(f"{url}/metrics").text
    continued = re.search(r'^loraplex:continuations_total{[^}]*reason="died"} (\S+)$', page, re.MULTILINE)
    assert continued is not None
    assert float(continued[1]) == 1
