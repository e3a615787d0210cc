"""Calls in answers that are written beforehand: how they are reported, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from server_fixtures import Api, events
from serving_fakes import CHAT_TEMPLATE, Script, hf_tokenizer
from tool_templates import tool_tokenizer

from loraplex.core.request import EngineRequest
from loraplex.engine.prompt_encoder import PromptEncoder
from loraplex.engine.tokenizer import Tokenizer
from loraplex.server.chat_options import ChatOptions, ReasoningParser, ToolCallParser

WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CHAT: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class ToolApi:
    """A server whose model has a template that knows tools, and says what it is told to."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.template(tool_tokenizer("qwen3"))
        self.says("Hello")

    def template(self, hf: Any) -> None:
        text = self.api.served.deps.text
        self.tokenizer = Tokenizer(hf)
        text.tokenizer, text.max_model_len = self.tokenizer, 1024
        text.vocab_size = self.tokenizer.vocab_size
        text.prompts = PromptEncoder(self.tokenizer, max_model_len=1024)

    def says(self, text: str) -> None:
        def script(request: EngineRequest) -> Script:
            return Script(token_ids=self.tokenizer.encode(text, add_special_tokens=False))

        self.api.served.engine.script = script

    def options(self, **options: Any) -> None:
        object.__setattr__(self.api.served.deps, "chat", ChatOptions(**options))

    def chat(self, **fields: Any) -> dict[str, Any]:
        response = self.api.post("/v1/chat/completions", {**CHAT, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()["choices"][0]
        return answer

    def refused(self, **fields: Any) -> tuple[str, str]:
        """Return the field at fault and the message."""
        num_requests = len(self.requests)
        response = self.api.post("/v1/chat/completions", {**CHAT, **fields})
        assert (response.status_code, len(self.requests)) == (400, num_requests)
        return response.json()["error"]["param"], response.json()["error"]["message"]

    @property
    def requests(self) -> list[EngineRequest]:
        return self.api.served.engine.requests

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.requests[-1].prompt_token_ids)


@pytest.fixture
def tool_api(api: Api) -> ToolApi:
    return ToolApi(api)


def test_a_call_that_the_model_chooses_is_reported(tool_api: ToolApi) -> None:
    tool_api.says(f"Let me look.\n{CALL}")
    answer = tool_api.chat()
    (call,) = answer["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Let me look.", "tool_calls")
    assert tool_api.prompt.startswith(
        'Tools: [{"type": "function", "function": {"name": "weather", "parameters": {"type": '
    )
    assert tool_api.requests[-1].params.structured_output is None
    tool_api.says("No call.")
    answer = tool_api.chat()
    assert answer["message"] == {"role": "assistant", "content": "No call.", "refusal": None}
    assert answer["finish_reason"] == "stop"


def test_an_answer_and_its_call_go_back_as_history(tool_api: ToolApi) -> None:
    tool_api.says(f"<think>Hm.</think>{CALL}")
    message = tool_api.chat()["message"]
    assert message["reasoning_content"] == "Hm."
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    tool_api.chat(messages=[CHAT["messages"][0], message, result])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<think>Hm.</think>{call}<|im_end|>\n<|im_start|>tool\nrain" in tool_api.prompt


@pytest.mark.parametrize("stops", [None, ["</tool_call>"], ["\n</tool"]])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_parts_of_the_whole(
    tool_api: ToolApi, stops: list[str] | None, logprobs: bool
) -> None:
    tool_api.says(f"<think>\nI look.\n</think>\n\nSo:\n{CALL}\n{CALL}")
    options: dict[str, Any] = {"stop": stops, "logprobs": logprobs, "n": 2}
    whole = tool_api.chat(**options)
    chunks = events(tool_api.api.post("/v1/chat/completions", {**CHAT, **options, "stream": True}))
    deltas = [each for chunk in chunks for each in chunk["choices"] if each["index"] == 1]
    joined: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": {}}
    for delta in (each["delta"] for each in deltas):
        joined["reasoning_content"] += delta.get("reasoning_content", "")
        joined["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            first = joined["calls"].setdefault(call["index"], call)
            if first is not call:
                assert call.keys() == {"index", "function"}
                first["function"]["arguments"] += call["function"]["arguments"]
    message = whole["message"]
    assert (joined["reasoning_content"], joined["content"]) == ("I look.", "So:")
    assert (message["reasoning_content"], message["content"]) == ("I look.", "So:")
    found = [call["function"] for call in joined["calls"].values()]
    assert found == [call["function"] for call in message["tool_calls"]]
    assert len(found) == (2 if stops is None else 1)
    assert deltas[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert deltas[-1]["stop_reason"] == whole["stop_reason"] == (stops and stops[0])
    if logprobs:
        tokens = [
            each["token"] for delta in deltas for each in (delta["logprobs"] or {"content": []})["content"]
        ]
        assert tokens == [each["token"] for each in whole["logprobs"]["content"]]
        assert "<tool_call>" in tokens


def test_a_call_that_is_cut_is_no_reason_to_call(tool_api: ToolApi) -> None:
    tool_api.says(CALL)
    answer = tool_api.chat(stop='"Kö')
    assert (answer["finish_reason"], answer["message"]["tool_calls"][0]["function"]["arguments"]) == (
        "stop", '{"city": ',
    )  # fmt: skip
    answer = tool_api.chat(max_tokens=len(tool_api.tokenizer.encode(CALL)) - 12)
    assert (answer["finish_reason"], answer["message"]["content"]) == ("length", None)
    tool_api.says(CALL + " and so on and on")
    answer = tool_api.chat(max_tokens=len(tool_api.tokenizer.encode(CALL)) + 2)
    assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == ("length", 1)


def test_no_more_than_one_call_unless_they_may_be_parallel(tool_api: ToolApi) -> None:
    tool_api.says(f"{CALL}\n{CALL}")
    assert len(tool_api.chat()["message"]["tool_calls"]) == 2
    assert len(tool_api.chat(parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_without_tools_or_with_the_choice_none_the_text_is_the_content(tool_api: ToolApi) -> None:
    tool_api.says(CALL)
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        assert tool_api.chat(**fields)["message"]["content"] == CALL
        assert "Tools" not in tool_api.prompt


def test_reasoning_is_told_apart_if_it_is_wanted(tool_api: ToolApi) -> None:
    tool_api.says("<think>One.</think>Two.")
    said = tool_api.chat(tools=None)["message"]
    assert (said["reasoning_content"], said["content"]) == ("One.", "Two.")
    said = tool_api.chat(tools=None, include_reasoning=False)["message"]
    assert ("reasoning_content" in said, said["content"]) == (False, "Two.")
    whole = tool_api.chat(tools=None, separate_reasoning=False)["message"]
    assert whole["content"] == "<think>One.</think>Two."
    # A schema of the client's own is for all of the answer.
    for fields in ({"response_format": {"type": "json_object"}}, {"guided_regex": "a+"}):
        assert tool_api.chat(tools=None, **fields)["message"]["content"] == whole["content"]
    tool_api.options(reasoning_parser=ReasoningParser.NONE)
    assert tool_api.chat(tools=None)["message"]["content"] == whole["content"]


def test_reasoning_may_have_begun_or_ended_in_the_prompt(tool_api: ToolApi) -> None:
    tool_api.says("One.</think>Two.")
    begun = tool_api.chat(tools=None, chat_template_kwargs={"begin_thinking": True})["message"]
    assert tool_api.prompt.endswith("<think>\n")
    assert (begun["reasoning_content"], begun["content"]) == ("One.", "Two.")
    tool_api.says("<think>One.")
    ended = tool_api.chat(tools=None, chat_template_kwargs={"enable_thinking": False})["message"]
    assert ended["content"] == "<think>One."


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x', which is not among the tools",
        ),
        ({"tool_choice": "must"}, "tool_choice", "must be 'auto', 'none', 'required' or an object"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name", "two tools are called 'weather'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "a string that matches ^"),
        ({"tools": TOOLS * 129}, "tools", "a list of at most 128 items, not a list of 129 items"),
        ({"tools": "all"}, "tools", "a list of at most 128 items, not 'all'"),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": 1}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "correct the JSON schema",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "its type is to be 'object'",
        ),
        ({"guided_regex": "a"}, "guided_regex", "does not go with tools"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "does not go with tools"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported by this server; send tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    tool_api: ToolApi, fields: dict[str, Any], param: str, message: str
) -> None:
    found, said = tool_api.refused(**fields)
    assert (found, message in said) == (param, True), said


def test_a_template_that_does_not_know_tools_refuses_them(tool_api: ToolApi) -> None:
    tool_api.template(hf_tokenizer(chat_template=CHAT_TEMPLATE))
    param, message = tool_api.refused()
    assert (param, "chat template does not know tools" in message) == ("tools", True)
    tool_api.template(hf_tokenizer(chat_template="{{ tools }}{{ messages }}"))
    param, message = tool_api.refused()
    assert (param, "--tool-call-parser" in message) == ("tools", True)
    tool_api.options(tool_call_parser=ToolCallParser.HERMES)
    tool_api.says(CALL)
    assert tool_api.chat()["finish_reason"] == "tool_calls"
    tool_api.options(tool_call_parser=ToolCallParser.NONE)
    assert tool_api.refused()[0] == "tools"


def test_deeply_nested_parameters_end_no_server(tool_api: ToolApi) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"properties": {"a": schema}}
    tools = [{"function": {"name": "f", "parameters": schema}}]
    response = tool_api.api.post("/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": "required"})
    assert response.status_code in (200, 400), response.text
    assert tool_api.chat()["message"]["content"] == "Hello"


def test_tokens_of_a_conversation_with_tools_are_those_of_its_prompt(tool_api: ToolApi) -> None:
    tool_api.chat()
    body = {key: CHAT[key] for key in ("messages", "tools")}
    response = tool_api.api.post("/tokenize", body)
    assert response.json()["tokens"] == tool_api.requests[-1].prompt_token_ids


def test_templates_that_need_descriptions_get_empty_ones(tool_api: ToolApi) -> None:
    tool_api.template(tool_tokenizer("hermes described"))
    described = {"function": {"name": "time", "description": "The time"}}
    tool_api.chat(tools=[*TOOLS, described])
    assert tool_api.prompt.startswith("- weather: \n- time: The time\n<|im_start|>user")
    response = tool_api.api.post("/tokenize", {**CHAT, "tools": [*TOOLS, described]})
    assert response.json()["tokens"] == tool_api.requests[-1].prompt_token_ids


@pytest.mark.parametrize("family", ["llama3 single", "llama3 first"])
def test_one_call_where_a_history_cannot_have_more(tool_api: ToolApi, family: str) -> None:
    called = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    tool_api.template(tool_tokenizer("llama3"))
    tool_api.says(f"{called}; {called}")
    two = tool_api.chat()["message"]
    assert len(two["tool_calls"]) == 2, "where it can, there are"
    tool_api.template(tool_tokenizer(family))
    for choice in ("auto", "required"):
        answer = tool_api.chat(tool_choice=choice)
        (call,) = answer["message"]["tool_calls"]
        assert answer["finish_reason"] == "tool_calls"
    wanted = tool_api.requests[-1].params.structured_output
    assert wanted is not None
    assert '"; " one' not in wanted.text
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    tool_api.chat(messages=[*CHAT["messages"], answer["message"], result])
    assert called in tool_api.prompt
    if family == "llama3 single":
        param, message = tool_api.refused(messages=[*CHAT["messages"], two, result])
        assert (param, "refused the messages: one call at a time" in message) == ("messages", True)


def test_a_template_that_fails_for_its_tools_blames_them(tool_api: ToolApi) -> None:
    fails = (
        "{% for t in tools or [] %}{% if t.function.name == 'weather' %}{{ raise_exception('no weather') }}"
    )
    template = f"{fails}{{% endif %}}{{% endfor %}}<tool_call>"
    tool_api.template(hf_tokenizer(chat_template=template))
    param, message = tool_api.refused()
    assert (param, "refused the tools: no weather" in message) == ("tools", True)


@pytest.mark.parametrize("family", ["mistral", "mistral strict"])
def test_mistral_gets_ids_that_its_templates_accept(tool_api: ToolApi, family: str) -> None:
    tool_api.template(tool_tokenizer(family))
    tool_api.says('[TOOL_CALLS] [{"name": "weather", "arguments": {}}]')
    answer = tool_api.chat()
    call_id = answer["message"]["tool_calls"][0]["id"]
    assert (len(call_id), call_id.isalnum()) == (9, True)
    assert answer["message"]["content"] is None, "its mark is a special token, and shown for this alone"
    # Those of calls made elsewhere are replaced.
    for given, seen in ((call_id, call_id), ("call_1", None)):
        called = {"role": "assistant", "tool_calls": [{**answer["message"]["tool_calls"][0], "id": given}]}
        result = {"role": "tool", "tool_call_id": given, "content": "rain"}
        tool_api.chat(messages=[*CHAT["messages"], called, result])
        (found,) = re.findall('"id": "(.*?)"', tool_api.prompt)
        assert (len(found), found == (seen or found)) == (9, True)


def test_strict_tools_and_schemas_become_one_grammar(tool_api: ToolApi) -> None:
    strict = [{"function": {"name": "weather", "parameters": WEATHER, "strict": True}}]
    tool_api.chat(tools=strict)
    wanted = tool_api.requests[-1].params.structured_output
    assert wanted is not None
    assert "answer: (head body){0,32} TEXT" in wanted.text
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool_api.chat(response_format=form, chat_template_kwargs={"enable_thinking": False})
    wanted = tool_api.requests[-1].params.structured_output
    assert wanted is not None
    assert "answer: calls | schema_answer" in wanted.text
    assert json.dumps({"const": 1}) in wanted.text
    assert "think" not in wanted.text.splitlines()[0]
