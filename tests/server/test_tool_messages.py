"""Conversations with tool calls and their results, as the model's chat template gets them."""

from __future__ import annotations

from typing import Any

import pytest
from server_fixtures import Api
from serving_fakes import hf_tokenizer, tiny_tokenizer

from loraplex.engine.prompt_encoder import PromptEncoder
from loraplex.engine.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}"
    "{% if message.name %} {{ message.name }}{% endif %}"
    "{% if message.tool_call_id %} #{{ message.tool_call_id }}{% endif %}] {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<call {{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }} "
    "{{ call.function.arguments.city }}>{% endfor %}{{ '\\n' }}{% endfor %}"
)
"""A template written like those of the hub: calls have their arguments as objects."""


def call(arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def conversation(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks"},
    ]


def prompt_of(api: Api) -> str:
    return tiny_tokenizer().decode(api.served.engine.requests[-1].prompt_token_ids)


@pytest.fixture
def tool_api(api: Api) -> Api:
    text = api.served.deps.text
    text.tokenizer = Tokenizer(hf_tokenizer(chat_template=TEMPLATE))
    text.prompts = PromptEncoder(text.tokenizer, max_model_len=text.max_model_len)
    return api


@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}])
def test_calls_and_results_reach_the_template_as_it_expects_them(tool_api: Api, arguments: Any) -> None:
    body = {"model": "base", "messages": conversation(arguments)}
    assert tool_api.post("/v1/chat/completions", body).status_code == 200
    assert prompt_of(tool_api).splitlines() == [
        "[user] How is the weather?",
        '[assistant] <call call_1 weather {"city": "Köln"} Köln>',
        "[tool weather #call_1] rain",  # the name is the call's: OpenAI's clients send none
        "[assistant] It rains.",
        "[user] Thanks",
    ]


def test_what_openais_client_sends_back_of_an_answer_is_accepted(tool_api: Api) -> None:
    answer = {
        "role": "assistant", "content": "", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [call("")], "name": None,
    }  # fmt: skip
    parts = [{"type": "text", "text": "sun"}]
    result = {"role": "tool", "tool_call_id": "call_1", "name": "other", "content": parts}
    body = {"model": "base", "messages": [answer, result]}
    assert tool_api.post("/v1/chat/completions", body).status_code == 200
    lines = prompt_of(tool_api).splitlines()
    assert lines == ["[assistant] <call call_1 weather {} >", "[tool other #call_1] sun"]


@pytest.mark.parametrize("message", conversation("{}")[1:3])
def test_a_template_that_does_not_know_tools_refuses_them(api: Api, message: dict[str, Any]) -> None:
    response = api.post("/v1/chat/completions", {"model": "base", "messages": [message]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "does not know tools" in error["message"]
    assert api.served.engine.requests == []
