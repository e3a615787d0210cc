"""Tools in chats, of a real engine and by the official client: calls are enforced, read and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import tiny
from server_fixtures import live, make_server
from tool_templates import VOCAB_SIZE, tool_tokenizer

from loraplex.engine.async_local import LocalAsyncEngine
from loraplex.engine.build import build_core
from loraplex.engine.options import EngineOptions
from loraplex.engine.text_engine import TextEngine
from loraplex.engine.tokenizer import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Look.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time.now"}},
]
CONTEXT = 1024
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
FAMILIES = ["qwen3", "llama3", "mistral"]
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "time.now": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TextEngine]]:
    """Yield text engines by family, each with a small model of random weights."""
    made = {}
    for name in FAMILIES:
        folder: Path = tmp_path_factory.mktemp("model")
        tiny.save_model(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=CONTEXT)
        hf = tool_tokenizer(name)
        hf.save_pretrained(folder)
        core = build_core(EngineOptions(model=str(folder), kv_memory_bytes=1 << 20, max_model_len=CONTEXT))
        made[name] = TextEngine(
            engine=LocalAsyncEngine(core),
            tokenizer=Tokenizer(hf, eos_token_ids=(2,)),
            max_model_len=CONTEXT,
            vocab_size=VOCAB_SIZE,
        )
    yield made
    for text in made.values():
        text.engine.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def client_of(
    engines: dict[str, TextEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., openai.OpenAI]]:
    """Yield what returns a client of one server, which is given the engine of a family first."""
    served = make_server(tmp_path_factory.mktemp("state"))
    with live(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def use(family: str) -> openai.OpenAI:
            text = served.deps.text
            chosen = engines[family]
            text.engine, text.tokenizer, text.prompts = chosen.engine, chosen.tokenizer, chosen.prompts
            text.max_model_len, text.vocab_size = chosen.max_model_len, chosen.vocab_size
            return client

        yield use


def check_calls(calls: Any, names: set[str]) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_follows_its_schema(client_of: Callable[..., openai.OpenAI], family: str) -> None:
    options: Any = {"messages": ASK, "tools": TOOLS, "model": "base", "max_tokens": 400}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    chats = client_of(family).chat.completions
    answer = chats.create(**options, tool_choice="required", parallel_tool_calls=False, n=2, seed=1)
    for choice in answer.choices:
        check_calls(choice.message.tool_calls, {"weather", "time.now"})
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert len(choice.message.tool_calls or ()) == 1
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 2
    named = {"type": "function", "function": {"name": "weather"}}
    answer = chats.create(**options, tool_choice=named, seed=2, logprobs=True)
    (choice,) = answer.choices
    check_calls(choice.message.tool_calls, {"weather"})
    assert choice.finish_reason == "tool_calls"
    assert choice.logprobs is not None


def test_streamed_calls_are_those_of_the_whole_answer(client_of: Callable[..., openai.OpenAI]) -> None:
    options: Any = {
        "messages": ASK, "tools": TOOLS, "model": "base", "max_tokens": 400, "tool_choice": "required",
        "seed": 3, "n": 2, "parallel_tool_calls": False,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip
    chats = client_of("qwen3").chat.completions
    whole = chats.create(**options)
    found: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    num_parts = 0
    for chunk in chats.create(**options, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                assert call.function is not None
                name, arguments = found.setdefault(choice.index, ["", ""])
                found[choice.index] = [
                    name + (call.function.name or ""), arguments + (call.function.arguments or "")
                ]  # fmt: skip
                num_parts += 1
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    for choice in whole.choices:
        (call,) = choice.message.tool_calls or ()
        assert found[choice.index] == [call.function.name, call.function.arguments]
        assert ends[choice.index] == choice.finish_reason == "tool_calls"
    assert num_parts > 6, "arguments come in pieces"


def test_calls_of_responses(client_of: Callable[..., openai.OpenAI]) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    options: Any = {
        "tools": tools, "model": "base", "max_output_tokens": 400, "tool_choice": "required",
        "parallel_tool_calls": False,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "seed": 3},
    }  # fmt: skip
    responses: Any = client_of("qwen3").responses
    whole = responses.create(input="How is the weather?", **options)
    [call] = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)

    events = list(responses.create(input="How is the weather?", stream=True, **options))
    deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 3, "arguments come in pieces"
    assert [each.sequence_number for each in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert [each.arguments for each in last.response.output] == [call.arguments]
    assert [each.type for each in events if each.type != "response.function_call_arguments.delta"] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    history: Any = [{"role": "user", "content": "How is the weather?"}, *whole.output, result]
    after = responses.create(input=history, **{**options, "tool_choice": "auto", "max_output_tokens": 5})
    assert after.usage.input_tokens > whole.usage.input_tokens
    assert (after.status, after.incomplete_details.reason) == ("incomplete", "max_output_tokens")
