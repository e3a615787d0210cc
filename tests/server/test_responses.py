"""/v1/responses, as the openai client uses it, on a server with a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from server_fixtures import Api, Served, live

TEXT = "Hello world! How are you?"


@pytest.fixture
def client(make_served: Callable[..., Served]) -> Iterator[openai.OpenAI]:
    served = make_served()
    with live(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_text_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="pirate", input="hi", instructions="Be short.", metadata={"a": "b"})
    assert (whole.output_text, whole.status, whole.model) == (TEXT, "completed", "pirate")
    assert (whole.instructions, whole.metadata) == ("Be short.", {"a": "b"})
    assert whole.id.startswith("resp_")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    events = list(client.responses.create(model="pirate", input="hi", stream=True))
    kinds = [each.type for each in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == TEXT
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT
    assert [each.sequence_number for each in events] == list(range(len(events)))
    with client.responses.stream(model="base", input="hi") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_items_become_the_messages_of_a_chat(make_api: Callable[..., Api]) -> None:
    api = make_api()
    items: list[Any] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Hello", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ]  # fmt: skip
    given = {"model": "base", "input": items, "instructions": "Be short."}
    assert api.post("/v1/responses", given).status_code == 200
    messages = [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "more"},
    ]  # fmt: skip
    assert api.post("/v1/chat/completions", {"model": "base", "messages": messages}).status_code == 200
    ours, theirs = api.served.engine.requests
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert (ours.params, ours.adapter) == (theirs.params, theirs.adapter)


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="base", input="hi", max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.model_dump()["output"][0]["status"] == "incomplete"
    events = list(client.responses.create(model="base", input="hi", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
    ({"background": True}, "background", "make a batch"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice must be"),
    ({"input": []}, "input", "input is empty; give at least one item"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type",
     "'input_image' is not supported by this server; send text alone"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "send system, developer, user or"),
    ({"top_logprobs": 2}, "top_logprobs", "2 is not supported by this server; leave it out"),
    ({"truncation": "auto"}, "truncation", "not supported by this server; leave it out, or send disabled"),
    ({"input": [{"type": ["message"], "content": "x"}]}, "input[0].type", "not supported"),
    ({"input": "x " * 2000}, "input", "context"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "not supported"),
    ({"model": "nobody"}, "model", "nobody"),
]  # fmt: skip


def test_what_is_not_supported_is_named(make_api: Callable[..., Api]) -> None:
    api = make_api()
    for fields, param, message in REFUSED:
        answer = api.post("/v1/responses", {"model": "base", "input": "hi", **fields})
        assert answer.status_code == (404 if param == "model" else 400), fields
        error = answer.json()["error"]
        assert (error["param"], message in error["message"]) == (param, True), error
