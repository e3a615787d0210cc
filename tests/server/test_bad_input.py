from __future__ import annotations

import copy
import gzip
import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from server_fixtures import USER, Api, Served, make_server
from serving_fakes import byte_level_backend, hf_tokenizer
from tokenizers.processors import TemplateProcessing

from loraplex.engine.tokenizer import Tokenizer
from loraplex.server.app import create_app
from loraplex.server.body import BodyLimits
from loraplex.server.engine_status import EngineState, EngineStatus
from loraplex.server.requests import ChatRequest, CompletionRequest

CALL = {"function": {"name": "f", "arguments": "{}"}}
CHAT = {"model": "base", "messages": USER}
COMPLETION = {"model": "base", "prompt": "hi"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server for all tests that change nothing of it: to make one takes longer than to refuse a request."""
    api = Api(make_server(tmp_path_factory.mktemp("server")))
    yield api
    api.close()


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    """The server of all tests, as if no other had asked it for anything."""
    yield shared
    shared.served.engine.requests.clear()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error object, which must have OpenAI's format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("temperature", 1e9),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("n", 0), ("n", 129),
        ("n", "2"), ("seed", 2**70), ("seed", 1.5), ("max_tokens", -1), ("max_tokens", 1000),
        ("min_tokens", -1),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("logit_bias", {"-5": 1}), ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": None}), ("logit_bias", {"999": 1}), ("logit_bias", [1]),
        ("stop", ""), ("stop", [""]), ("stop", ["x"] * 17), ("stop", 5), ("stop", ["x" * 2000]),
        ("stop_token_ids", [-1]), ("stop_token_ids", [400]), ("stop_token_ids", 4),
        ("stream", "yes"), ("stream_options", {"include_usage": True}), ("best_of", 2), ("ignore_eos", 1),
        ("model", None), ("model", 5), ("user", 5), ("include_stop_str_in_output", "x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_wrong_value_is_refused_with_the_fields_name(api: Api, path: str, field: str, value: Any) -> None:
    base = CHAT if "chat" in path else COMPLETION
    error = error_of(api.post(path, {**base, field: value}))
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(field)
    assert api.served.engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}), ("modalities", ["audio"]),
        ("reasoning_effort", "high"), ("web_search_options", {}),
        ("use_beam_search", True), ("verbosity", "low"), ("suffix", "x"),
        ("moderation", {"model": "m"}),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_but_is_not_supported_is_refused(
    api: Api, field: str, value: Any
) -> None:
    error = error_of(api.post("/v1/chat/completions", {**CHAT, field: value}))
    assert error["param"] == field
    assert error["message"].startswith(f"`{field}` is not supported by this server; leave it out")


def test_an_empty_list_is_said_to_be_empty(api: Api) -> None:
    error = error_of(api.post("/v1/chat/completions", {**CHAT, "messages": []}))
    assert error["message"] == "messages is empty; give at least one item"


def test_suffix_is_not_supported_for_completions_either(api: Api) -> None:
    error = error_of(api.post("/v1/completions", {**COMPLETION, "suffix": "x"}))
    assert (error["param"], error["message"]) == (
        "suffix",
        "`suffix` is not supported by this server; leave it out",
    )


@pytest.mark.parametrize(
    ("message", "param", "advice"),
    [
        ({"role": "robot", "content": "x"}, "role", "send system, developer, user, assistant or tool"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "content[0].type",
            "send text alone",
        ),
        (
            {"role": "user", "content": [{"image_url": {}, "type": "image_url"}]},
            "content[0].image_url",
            "send text alone",
        ),
    ],
)
def test_messages_of_a_kind_that_is_not_supported_are_told_what_is(
    api: Api, message: dict[str, Any], param: str, advice: str
) -> None:
    error = error_of(api.post("/v1/chat/completions", {**CHAT, "messages": [message]}))
    assert error["param"] == f"messages[0].{param}"
    assert error["message"].endswith(f"is not supported by this server; {advice}")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_openais_client_is_known(theirs: type, ours: type[msgspec.Struct]) -> None:
    assert set(theirs.__annotations__) <= set(ours.__struct_fields__)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "tool_call_id": "x"}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "x"}], "messages[0].tool_call_id"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "messages"),
        ([{"role": "user", "content": "long " * 1000}], "messages"),
    ],
)
def test_wrong_messages_are_refused_where_they_are_wrong(api: Api, messages: Any, param: str) -> None:
    assert error_of(api.post("/v1/chat/completions", {**CHAT, "messages": messages}))["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        ["a", 1],
        [1, [2]],
        [400],
        [-1],
        [10**30],
        [1.5],
        "",
        None,
        {"a": 1},
        [True],
        [1] * 256,
        ["a", ""],
    ],
)
def test_wrong_prompts_are_refused(api: Api, prompt: Any) -> None:
    error = error_of(api.post("/v1/completions", {**COMPLETION, "prompt": prompt}))
    assert error["param"].startswith(("prompt", "max_tokens"))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "long " * 1000}]}, "messages"),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 256}, "max_tokens"),
        ("/v1/completions", {"prompt": [1] * 256}, "prompt"),
        # Single ids are not checked in a prompt that is too long anyway.
        ("/v1/completions", {"prompt": [1] * 256 + ["x"]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 255, "max_tokens": 2}, "max_tokens"),
    ],
)
def test_what_does_not_fit_the_context_has_openais_code(
    api: Api, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(api.post(path, {"model": "base", **fields}))
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["", ["hi", ""]])
def test_an_empty_prompt_is_refused_even_if_the_tokenizer_makes_a_token_of_it(
    make_api: Callable[..., Api], prompt: Any
) -> None:
    backend = copy.deepcopy(byte_level_backend())
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    api = make_api()
    api.served.deps.text.tokenizer = Tokenizer(hf_tokenizer(tokenizer_object=backend))
    assert api.served.deps.text.tokenizer.encode("") == [0]
    error = error_of(api.post("/v1/completions", {**COMPLETION, "prompt": prompt}))
    assert error["param"] == "prompt"
    assert "empty" in error["message"]
    assert api.post("/v1/completions", {**COMPLETION, "prompt": "a"}).status_code == 200


def test_too_many_choices_are_refused(api: Api) -> None:
    error = error_of(api.post("/v1/completions", {**COMPLETION, "prompt": [[1]] * 100, "n": 100}))
    assert "2048" in error["message"]


def test_an_unknown_field_is_refused_with_its_likely_name(api: Api) -> None:
    error = error_of(api.post("/v1/chat/completions", {**CHAT, "temperatur": 1}))
    assert error["param"] == "temperatur"
    assert "'temperature'" in error["message"]


def test_fields_that_need_each_other(api: Api) -> None:
    assert error_of(api.post("/v1/chat/completions", {**CHAT, "top_logprobs": 2}))["param"] == "top_logprobs"
    assert error_of(api.post("/v1/chat/completions", {**CHAT, "max_tokens": 0}))["param"] == "max_tokens"
    assert error_of(api.post("/v1/completions", {**COMPLETION, "max_tokens": 0}))["param"] == "max_tokens"
    error = error_of(api.post("/v1/completions", {**COMPLETION, "max_tokens": 2, "min_tokens": 3}))
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"model": "base"} trailing', b"\xef\xbb\xbf{}",
        b'{"model": "base", "prompt": "x", "temperature": NaN}',
        b'{"model": "base", "prompt": "x", "temperature": Infinity}',
        b'{"model": "base", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "base", "prompt": "x", "temperature": 1e999}',
        b'{"model": "base", "prompt": "x", "metadata": {"a": NaN}}',
        b'{"model": "base", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "base", "prompt": "\\ud800"}', b'{"model": "\\udfff", "prompt": "x"}',
        b'{"model": "base", "prompt": "x", "\\ud800": 1}', b'{"model": "base", "prompt": "\xff"}',
        b'{"model": "base", "prompt": "x", "metadata": {"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize", "/detokenize"],
)
def test_a_body_that_is_no_good_json_is_refused(api: Api, path: str, body: bytes) -> None:
    error_of(api.post(path, content=body))


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"model": "base", "temperature": NaN}', "NaN and Infinity are not JSON"),
        (b'{"model": "base", "temperature": -Infinity}', "NaN and Infinity are not JSON"),
        (b'{"model": "base", "prompt": "a \\ud83d b"}', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\\\\\udc00"}', r"\udc00 is half of a character"),
        (b'{"model": "base", "prompt": "\\ud83d\\ude00\\uDE00"}', r"\uDE00 is half of a character"),
        (b'{"model": "base", "prompt": "\\ud83d and so on"}', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\ud83d\\ud83e\\udd16"}', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\ud83d\\u0041 b"}', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\udc00 and so on"}', r"\udc00 is half of a character"),
        (b'{"model": "base", "\\ud83d": 1}', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\\\\\ud83d"}', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\ud83d"', r"\ud83d is half of a character"),
        (b'{"model": "base", "prompt": "\\ud83d', "Input data was truncated"),
        (b'{"model": "base", "prompt": "a \\\\ud83d', "Input data was truncated"),
        (b'{"model": "base", "prompt": "a \\\\ud83d b', "Input data was truncated"),
        (b'{"model": "base", "prompt": "\\ud83d\\ude', "Input data was truncated"),
        (b'{"model": "base", "prompt": "\\ud83d\\ude00", }', "trailing comma"),
    ],
    ids=str,
)
def test_what_is_no_json_is_told_what_it_is(api: Api, body: bytes, hint: str) -> None:
    assert hint in error_of(api.post("/v1/completions", content=body))["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 128, not 0"),
        ({"n": 10**200}, "n must be a whole number from 1 to 128, not one of many digits"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ({"temperature": "hot"}, "temperature must be a number from 0 to 100, not 'hot'"),
        ({"stream": "yes"}, "stream must be true or false, not 'yes'"),
        ({"messages": "hi"}, "messages must be a list of at least 1 item, not 'hi'"),
        ({"messages": [5]}, "messages[0] must be an object, not 5"),
        (
            {"messages": [{"role": 5, "content": "x"}]},
            "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool', not 5",
        ),
        (
            {"messages": [{"role": "user", "content": {}}]},
            "messages[0].content must be a string or a list, not an empty object",
        ),
        (
            {"cache_salt": "x" * 300},
            "must be a string of 1 to 256 characters, not a string of 300 characters",
        ),
        ({"logit_bias": {"1": 101}}, "logit_bias[...] must be a number from -100 to 100"),
        ({"logit_bias": {"1" * 11: 1}}, "a key of logit_bias must be a string of at most 10 characters"),
        ({"bad_words": ["a", 5]}, "bad_words[1] must be a string of 1 to "),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": 5}]}]},
            "messages[0].tool_calls must be a list that is empty, not a list of 1 item",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
            "messages[0].tool_calls must be a list, not 5",
        ),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type must be 'function', not 'x'"),
        (
            {"tool_choice": {"type": "x", "function": {"name": "f"}}},
            "tool_choice.type must be 'function', not 'x'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}]},
            "messages[0].tool_calls[0].type must be 'function', not 'x'",
        ),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed(api: Api, fields: dict[str, Any], message: str) -> None:
    error = error_of(api.post("/v1/chat/completions", {"model": "base", "messages": USER, **fields}))
    assert message in error["message"]
    assert error["param"].startswith(next(iter(fields)))


def test_a_wrong_value_before_broken_json_is_told_without_what_came(api: Api) -> None:
    body = b'{"model": "base", "prompt": "x", "n": 0, "seed": }'
    assert error_of(api.post("/v1/completions", content=body))["message"] == (
        "n must be a whole number from 1 to 128"
    )
    assert error_of(api.post("/v1/completions", content=b"[]"))["message"] == (
        "the body must be an object, not an empty list"
    )


@pytest.mark.parametrize("num_chars", [2**16, 2**17])
def test_a_large_body_is_not_decoded_again_to_quote_from_it(api: Api, num_chars: int) -> None:
    message = error_of(api.post("/v1/completions", {"model": "base", "prompt": "x" * num_chars, "n": 0}))[
        "message"
    ]
    is_quoted = message.endswith(", not 0")
    assert is_quoted == (num_chars < 2**17)
    assert message.startswith("n must be a whole number from 1 to 128")
    wrong = {"role": "user", "content": "x" * num_chars, "tool_calls": [CALL]}
    message = error_of(api.post("/v1/chat/completions", {"model": "base", "messages": [wrong]}))["message"]
    assert " or " not in message, "nobody knows the rule of which role it is"


def test_a_wrong_value_of_a_query_is_told_what_is_allowed(api: Api) -> None:
    error = error_of(api.get("/v1/adapters?limit=none"))
    assert error["message"].startswith("limit must be a whole number from ")
    assert error["message"].endswith(", not 'none'")


def test_an_unknown_model_without_a_near_name_is_told_where_the_names_are(api: Api) -> None:
    error = error_of(api.post("/v1/completions", {**COMPLETION, "model": "zzzz"}), 404)
    assert "/v1/models" in error["message"]


def test_what_is_quoted_from_the_client_is_short(api: Api) -> None:
    error = error_of(api.post("/v1/completions", {**COMPLETION, "model": "x" * 100_000}), 404)
    assert len(error["message"]) < 500
    error = error_of(api.post("/v1/completions", {**COMPLETION, "x" * 100_000: 1}))
    assert len(error["message"]) < 500
    error = error_of(api.request("GET", "/" + "x" * 10_000), 404)
    assert len(error["message"]) < 500


def test_a_compressed_body_is_refused_as_such(api: Api) -> None:
    body = gzip.compress(json.dumps(COMPLETION).encode())
    for encoding in ("gzip", "GZIP", "gzip, br"):
        headers = {"content-encoding": encoding}
        error = error_of(api.post("/v1/completions", content=body, headers=headers), 415)
        assert "uncompressed" in error["message"]
    assert (
        api.post("/v1/completions", COMPLETION, headers={"content-encoding": "identity"}).status_code == 200
    )


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused(make_api: Callable[..., Api], declared: bool) -> None:
    api = make_api(limits=BodyLimits(max_body_bytes=1000))
    body = json.dumps({**COMPLETION, "user": "x" * 2000}).encode()

    async def parts() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    error = error_of(api.post("/v1/completions", content=body if declared else parts()), 413)
    assert "1,000" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
def test_wrong_paths_and_methods_are_answered_in_the_same_shape(
    api: Api, method: str, path: str, status: int
) -> None:
    error = error_of(api.request(method, path), status)
    assert path in error["message"]


def test_a_bug_is_answered_without_its_details(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(api.served.deps.adapters, "lease", broken)

    error = error_of(api.post("/v1/completions", COMPLETION), 500)
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": b"Bearer \xff\xfe"}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer zwei-ü".encode()}, 200),
    ],
)
def test_every_route_but_health_wants_an_api_key(
    make_api: Callable[..., Api], header: dict[str, Any], status: int
) -> None:
    api = make_api(api_keys=("one", "zwei-ü"))
    assert api.get("/health", headers=header).status_code == 200
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        response = api.get(path, headers=header)
        assert response.status_code == status
        if status == 401:
            error_of(response, 401)


def test_tokenize_and_detokenize(api: Api) -> None:
    answer = api.post("/tokenize", {"prompt": "Hello world", "model": "pirate"}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    assert api.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hello world"}
    chat = api.post("/tokenize", {"messages": USER}).json()
    text = api.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": USER}, 400),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404),
        ("/detokenize", {"tokens": [400]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {}, 400),
    ],
)
def test_wrong_tokenize_requests_are_refused(api: Api, path: str, body: Any, status: int) -> None:
    error_of(api.post(path, body), status)


def test_health_follows_the_engine(make_api: Callable[..., Api]) -> None:
    api = make_api()
    assert api.get("/health").status_code == 200
    api.served.engine.dead = True
    response = api.get("/health")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "it is being restarted" in response.json()["error"]["message"]
    assert response.json()["status"] == "restarting"
    assert api.get("/health/ready").content == response.content
    assert api.get("/health/live").status_code == 200
    assert api.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (EngineState.STARTING, "the engine is starting"),
        (EngineState.RESTARTING, "died (SIGKILL); it is being restarted"),
        (EngineState.FAILED, "died too often; see the log and restart the server"),
    ],
)
def test_health_says_what_the_matter_is(
    make_served: Callable[..., Served], state: EngineState, words: str
) -> None:
    message = words.partition(";")[0]
    status = EngineStatus(state=state, message=message, num_restarts=3, pid=None)
    served = make_served()
    api = Api(replace(served, app=create_app(replace(served.deps, engine_status=lambda: status))))
    try:
        response = api.get("/health")
        assert (response.status_code, response.json()["error"]["message"]) == (503, words)
        assert response.json()["error"]["code"] == "engine_down"
        assert 'loraplex:engine_restarts_total{model_name="base"} 3.0' in api.get("/metrics").text
    finally:
        api.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": ""}] * 100_000}),
        ("/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": ""}] * 3000}),
        (
            "/v1/chat/completions",
            {"model": "base", "messages": [{"role": "user", "content": "x" * 3_600_000}]},
        ),
        ("/v1/completions", {"model": "base", "prompt": ["x"] * 100_000}),
        ("/v1/completions", {"model": "base", "prompt": "x" * 3_600_000}),
        ("/v1/completions", {"model": "base", "prompt": [5] * 1_000_000}),
        ("/v1/completions", {"model": "base", "prompt": "x", "stop_token_ids": [5] * 2000}),
        (
            "/v1/completions",
            {"model": "base", "prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}},
        ),
        (
            "/v1/completions",
            {
                "model": "base",
                "prompt": ["x"] * 16,
                "n": 128,
                "logit_bias": {str(i): 1 for i in range(100)},
            },
        ),
        (
            "/v1/completions",
            {"model": "base", "prompt": ["x"] * 16, "n": 128, "bad_words": ["Hello world"] * 64},
        ),
        ("/v1/completions", {"model": "base", "prompt": "x", "metadata": {"a": [[[]]] * 100_000}}),
        (
            "/v1/chat/completions",
            {
                "model": "base",
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"function": {"name": "f", "arguments": '{"a":[' + "{}," * 10_000 + "{}]}"}}
                        ],
                    }
                ],
            },
        ),
        ("/tokenize", {"prompt": "x" * 3_600_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 3000}),
        ("/detokenize", {"tokens": [5] * 1_000_000}),
    ],
    ids=lambda value: reprlib.repr(value)[:40],  # the whole of it takes half a second
)
def test_huge_requests_are_refused_without_the_work_they_ask_for(
    api: Api, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = api.served.deps.text.tokenizer
    encoded_chars: list[int] = []
    encode_many = tokenizer.encode_many

    def counted(texts: Sequence[str], **options: Any) -> list[list[int]]:
        encoded_chars.append(sum(map(len, texts)))
        return encode_many(texts, **options)

    monkeypatch.setattr(tokenizer, "encode_many", counted)
    response = api.post(path, body)
    assert response.status_code in (400, 413), response.text[:500]
    assert response.json()["error"]["message"]
    assert sum(encoded_chars) < 10_000
    assert api.served.engine.requests == []
