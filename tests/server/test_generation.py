from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from server_fixtures import USER, Api, events
from serving_fakes import Script, says, tiny_tokenizer

from loraplex.core.errors import CapacityError, EngineDeadError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.engine.text_engine import LogprobText, TopToken
from loraplex.server.logprobs import chat_logprobs, completion_logprobs

TEXT = "Hello world! How are you?"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": USER, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": "the quick", **fields}


def streamed_text(chunks: list[Any], choice: int = 0) -> str:
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(part["delta"]["content"] if "delta" in part else part["text"] for part in parts)


def test_chat_answers_in_one_piece(api: Api) -> None:
    answer = api.post("/v1/chat/completions", chat()).json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(tiny_tokenizer().encode(TEXT)) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_chat_streams_deltas_that_begin_with_the_role(api: Api) -> None:
    chunks = events(api.post("/v1/chat/completions", chat(stream=True)))
    assert streamed_text(chunks) == TEXT
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


def test_the_last_chunk_has_the_usage_when_asked_for(make_api: Callable[..., Api]) -> None:
    api = make_api(says(TEXT, num_cached_tokens=5))
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, last = events(api.post("/v1/chat/completions", body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(tiny_tokenizer().encode(TEXT)) + 1
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_text_and_bytes(api: Api, stream: bool) -> None:
    response = api.post("/v1/chat/completions", chat(stream=stream, logprobs=True, top_logprobs=2))
    answers = events(response) if stream else [response.json()]
    entries = [e for a in answers for c in a["choices"] for e in c["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert entries[0]["top_logprobs"][0]["token"] == entries[0]["token"]


@pytest.mark.parametrize("model", ["pirate", "base:pirate"])
def test_an_adapter_is_a_model(api: Api, model: str) -> None:
    answer = api.post("/v1/chat/completions", chat(model=model)).json()
    assert answer["model"] == model
    assert api.served.engine.requests[0].adapter == "version-of-pirate"


def test_the_base_model_uses_no_adapter(api: Api) -> None:
    api.post("/v1/completions", completion())
    assert api.served.engine.requests[0].adapter is None


def test_an_unknown_model_is_answered_with_near_names(api: Api) -> None:
    response = api.post("/v1/chat/completions", chat(model="pirat"))
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert "'pirate'" in error["message"]


def test_content_may_come_in_text_parts(api: Api) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert api.post("/v1/chat/completions", chat(messages=messages)).status_code == 200
    prompt = tiny_tokenizer().decode(api.served.engine.requests[0].prompt_token_ids)
    assert "<|im_start|>system\nbe brief<|im_end|>" in prompt
    assert "<|im_start|>user\none\ntwo<|im_end|>" in prompt


def test_template_options_reach_the_prompt(api: Api) -> None:
    api.post("/v1/chat/completions", chat(chat_template_kwargs={"shout": True}))
    assert tiny_tokenizer().decode(api.served.engine.requests[0].prompt_token_ids).endswith("HEY ")


def test_completions_default_to_sixteen_tokens_and_chat_to_the_context(api: Api) -> None:
    api.post("/v1/completions", completion())
    api.post("/v1/chat/completions", chat())
    first, second = api.served.engine.requests
    assert first.params.max_tokens == 16
    assert second.params.max_tokens == 256 - len(second.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the quick", [tiny_tokenizer().encode("the quick")]),
        (["the", "dog"], [tiny_tokenizer().encode("the"), tiny_tokenizer().encode("dog")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_a_prompt_has_four_forms(api: Api, prompt: Any, expected: list[list[int]]) -> None:
    answer = api.post("/v1/completions", completion(prompt=prompt)).json()
    assert [request.prompt_token_ids for request in api.served.engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("stream", [False, True])
def test_choices_count_through_prompts_and_n(make_api: Callable[..., Api], stream: bool) -> None:
    def script(request: EngineRequest) -> Script:
        letter = tiny_tokenizer().encode("a" if request.params.seed == 0 else "b")
        return Script(token_ids=[request.prompt_token_ids[0], *letter])

    api = make_api(script)
    first, second = (tiny_tokenizer().encode(text)[0] for text in ("x", "y"))
    response = api.post(
        "/v1/completions", completion(prompt=[[first], [second]], n=2, seed=0, stream=stream, best_of=2)
    )
    if stream:
        chunks = events(response)
        texts = [streamed_text(chunks, choice) for choice in range(4)]
    else:
        texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == ["xa", "xb", "ya", "yb"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the quick", tiny_tokenizer().encode("the quick")])
def test_echo_repeats_the_prompt_with_its_logprobs(api: Api, stream: bool, prompt: Any) -> None:
    body = completion(prompt=prompt, echo=True, logprobs=1, stream=stream)
    response = api.post("/v1/completions", body)
    choices = [c for a in (events(response) if stream else [response.json()]) for c in a["choices"]]
    text = "".join(choice["text"] for choice in choices)
    assert text == "the quick" + TEXT
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert "".join(tokens) == text
    assert all(text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))
    assert choices[0]["logprobs"]["token_logprobs"][0] is None
    assert choices[0]["logprobs"]["top_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_token_ids_come_with_the_stop_token_and_the_prompts_ids(
    api: Api, stream: bool, logprobs: int | None
) -> None:
    prompts = [tiny_tokenizer().encode("the quick"), tiny_tokenizer().encode("brown fox")]
    body = completion(prompt=prompts, n=2, stream=stream, logprobs=logprobs, return_token_ids=True)
    response = api.post("/v1/completions", body)
    choices = [c for a in (events(response) if stream else [response.json()]) for c in a["choices"]]
    expected = [*tiny_tokenizer().encode(TEXT, add_special_tokens=False), 2]
    for index in range(4):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == expected
        # The prompt's ids come once, with the first chunk.
        assert [choice.get("prompt_token_ids") for choice in mine] == [
            prompts[index // 2],
            *[None] * (len(mine) - 1),
        ]


def test_no_token_ids_unless_asked_for(api: Api) -> None:
    [choice] = api.post("/v1/completions", completion()).json()["choices"]
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in choice


def test_token_ids_end_where_a_stop_string_ends_the_text(api: Api) -> None:
    [choice] = api.post("/v1/completions", completion(stop=" you", return_token_ids=True)).json()["choices"]
    assert tiny_tokenizer().decode(choice["token_ids"]).endswith(" you")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_may_name_tokens_by_their_ids(api: Api, stream: bool) -> None:
    body = completion(logprobs=2, stream=stream, return_tokens_as_token_ids=True)
    response = api.post("/v1/completions", body)
    choices = [c for a in (events(response) if stream else [response.json()]) for c in a["choices"]]
    token_ids = tiny_tokenizer().encode(TEXT, add_special_tokens=False)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == [f"token_id:{token_id}" for token_id in token_ids]
    first = token_ids[0]
    assert choices[0]["logprobs"]["top_logprobs"][0] == {
        f"token_id:{first}": -0.5,
        f"token_id:{first + 1}": -1.5,
    }


def test_parts_of_characters_go_by_their_bytes_and_impossible_tokens_have_a_finite_logprob() -> None:
    entries = [
        LogprobText(token_id=1, piece=b"<s>", logprob=None, special=True),
        LogprobText(token_id=5, piece=b"a\xc3", logprob=float("-inf")),
        LogprobText(
            token_id=6,
            piece=b"\xa4b",
            logprob=-1.0,
            top=(TopToken(6, b"\xa4b", -1.0), TopToken(7, b"\xa5", -2.0)),
        ),
    ]
    written = completion_logprobs(entries, [0, 0, 1])
    assert written.text_offset == [0, 0, 1]
    assert written.token_logprobs == [None, -9999.0, -1.0]
    assert written.tokens == ["<s>", "bytes:a\\xc3", "bytes:\\xa4b"]
    assert written.top_logprobs[2] == {"bytes:\\xa4b": -1.0, "bytes:\\xa5": -2.0}


LIKELIER = (TopToken(8, b"A", -0.1), TopToken(9, b"B", -2.5))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        pytest.param(
            LogprobText(token_id=7, piece=b"C", logprob=-5.0, top=LIKELIER),
            {"A": -0.1, "B": -2.5, "C": -5.0},
            id="the token of the answer is there though it is not among the likeliest",
        ),
        pytest.param(
            LogprobText(token_id=7, piece=b"C", logprob=-5.0),
            {"C": -5.0},
            id="also where none were asked for",
        ),
        pytest.param(
            LogprobText(token_id=7, piece=b"A", logprob=-5.0, top=LIKELIER),
            {"bytes:\\x41": -0.1, "B": -2.5, "A": -5.0},
            id="the answer's token has the text and the likelier one of the same text goes by its bytes",
        ),
        pytest.param(
            LogprobText(token_id=8, piece=b"A", logprob=-0.1, top=(*LIKELIER, TopToken(3, b"B", -3.0))),
            {"A": -0.1, "B": -2.5, "bytes:\\x42": -3.0},
            id="of two others the likelier has the text",
        ),
        pytest.param(
            LogprobText(
                token_id=8,
                piece=b"",
                logprob=-1.0,
                top=tuple(TopToken(i, b"", -float(i)) for i in range(1, 9)),
            ),
            {"": -8.0, "bytes:": -1.0},
            id="of many the likeliest is kept",
        ),
    ],
)
def test_top_logprobs_of_completions_lose_no_token_of_the_answer(
    entry: LogprobText, expected: dict[str, float]
) -> None:
    written = completion_logprobs([entry], [0])
    assert written.top_logprobs == [expected]


def test_top_logprobs_of_chat_hold_tokens_of_the_same_text_side_by_side() -> None:
    top = (TopToken(8, b"A", -0.1), TopToken(7, b"A", -5.0))
    [entry] = chat_logprobs([LogprobText(token_id=7, piece=b"A", logprob=-5.0, top=top)]).content
    assert (entry.token, entry.logprob) == ("A", -5.0)
    assert [(other.token, other.logprob) for other in entry.top_logprobs] == [("A", -0.1), ("A", -5.0)]


def half_characters() -> list[int]:
    """Tokens of one byte each: a, the first byte of an emoji, b, all four of it, c."""
    letters = {0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0x80: "Ģ"}
    names = ["a", letters[0xF0], "b", *(letters[byte] for byte in "😀".encode()), "c"]
    token_ids = [tiny_tokenizer().pieces.backend.token_to_id(name) for name in names]
    assert tiny_tokenizer().decode(token_ids) == "a\ufffdb😀c"
    return token_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_are_right_behind_half_a_character(
    make_api: Callable[..., Api], stream: bool, echo: bool
) -> None:
    api = make_api(lambda request: Script(token_ids=half_characters()))
    body = completion(prompt=half_characters(), echo=echo, logprobs=0, stream=stream)
    response = api.post("/v1/completions", body)
    choices = [c for a in (events(response) if stream else [response.json()]) for c in a["choices"]]
    assert "".join(choice["text"] for choice in choices) == "a\ufffdb😀c" * (1 + echo)
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    expected = [0, 1, 2, 3, 3, 3, 3, 4]
    assert offsets == expected + [5 + offset for offset in expected] * echo


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_stay_within_a_text_that_a_stop_string_cut(api: Api, stream: bool) -> None:
    response = api.post("/v1/completions", completion(logprobs=0, stop="ld! How are", stream=stream))
    choices = [c for a in (events(response) if stream else [response.json()]) for c in a["choices"]]
    text = "".join(choice["text"] for choice in choices)
    assert text == "Hello wor"
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert offsets == sorted(offsets)
    assert max(offsets) == len(text)
    assert "ld! How are" in "".join(tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_of_nothing_but_its_end_counts_one_token(
    make_api: Callable[..., Api], path: str, stream: bool
) -> None:
    api = make_api(lambda request: Script(token_ids=[]))
    fields: dict[str, Any] = {"stream": stream, **({"logprobs": 0} if path == "/v1/completions" else {})}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    response = api.post(path, (completion if path == "/v1/completions" else chat)(**fields))
    answers = events(response) if stream else [response.json()]
    assert answers[-1]["usage"]["completion_tokens"] == 1
    [choice] = [choice for answer in answers for choice in answer["choices"]]
    assert choice["finish_reason"] == "stop"
    if path == "/v1/completions":
        assert (choice["text"], choice["logprobs"]["tokens"]) == ("", [])
    assert 'vllm:generation_tokens_total{model_name="base"} 1.0' in api.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_no_tokens_gives_the_prompt_alone(api: Api, stream: bool) -> None:
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = completion(echo=True, max_tokens=0, logprobs=0, stream=stream, **fields)
    response = api.post("/v1/completions", body)
    answers = events(response) if stream else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert "".join(choice["text"] for choice in choices) == "the quick"
    assert choices[-1]["finish_reason"] == "length"
    assert answers[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(api: Api, path: str, stream: bool) -> None:
    make = completion if path == "/v1/completions" else chat
    response = api.post(path, make(stop=" How", stream=stream))
    if stream:
        chunks = events(response)
        assert streamed_text(chunks) == "Hello world!"
        last = chunks[-1]["choices"][0]
    else:
        last = response.json()["choices"][0]
        assert last.get("text", last.get("message", {}).get("content")) == "Hello world!"
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] == " How"


def test_every_sampling_field_reaches_the_engine(api: Api) -> None:
    fields = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
        "seed": 11, "presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "6": 3}, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True,
        "bad_words": ["dog"],
    }  # fmt: skip
    assert api.post("/v1/completions", completion(**fields)).status_code == 200
    params = api.served.engine.requests[0].params
    # Stop strings are matched in texts, which an engine does not have.
    expected = {**fields, "logit_bias": ((5, -100.0), (6, 3.0)), "stop": (), "stop_token_ids": (3,)}
    expected["bad_words"] = ("dog",)
    assert {name: getattr(params, name) for name in fields} == expected


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_special_tokens_are_text_if_they_are_to_be(make_api: Callable[..., Api], path: str) -> None:
    api = make_api(says("a<|im_start|>b"))
    for fields, text in (({}, "ab"), ({"skip_special_tokens": False}, "a<|im_start|>b")):
        body = chat(**fields) if "chat" in path else completion(**fields)
        (choice,) = api.post(path, body).json()["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) == text
        parts = [
            each for event in events(api.post(path, {**body, "stream": True})) for each in event["choices"]
        ]
        assert "".join(each.get("text", each.get("delta", {}).get("content", "")) for each in parts) == text


def test_a_chat_has_its_token_ids_if_they_are_wanted(api: Api) -> None:
    body = chat(return_token_ids=True, max_tokens=4)
    whole = api.post("/v1/chat/completions", body).json()
    prompt = api.served.engine.requests[-1].prompt_token_ids
    ids = tiny_tokenizer().encode(TEXT)[:4]
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, ids)
    first, *others = events(api.post("/v1/chat/completions", {**body, "stream": True}))
    assert first["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in each for each in others)
    assert [i for each in (first, *others) for i in each["choices"][0]["token_ids"]] == ids
    assert "token_ids" not in api.post("/v1/chat/completions", chat()).json()["choices"][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_by_token_id(api: Api, path: str) -> None:
    body = {**(chat() if "chat" in path else completion(logprobs=0)), "prompt_logprobs": 2}
    answer = api.post(path, body).json()
    found = (answer if "chat" in path else answer["choices"][0])["prompt_logprobs"]
    prompt = api.served.engine.requests[-1].prompt_token_ids
    assert (found[0], len(found)) == (None, len(prompt))
    name = tiny_tokenizer().decode([prompt[1]])
    assert found[1][str(prompt[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": name}
    assert found[1][str(prompt[1] + 1)]["rank"] == 2
    if "chat" not in path:
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] - 1
    refused = api.post(path, {**body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("prompt", ["the dog", [1, 2, 3, 4, 5], ["a b c", "d e f g"], [[1, 2, 3], [4, 5]]])
def test_the_end_of_a_prompt_can_be_kept_alone(api: Api, prompt: Any) -> None:
    api.post("/v1/completions", completion(prompt=prompt))
    whole = [request.prompt_token_ids for request in api.served.engine.requests]
    api.served.engine.requests.clear()
    answer = api.post(
        "/v1/completions", completion(prompt=prompt, truncate_prompt_tokens=2, echo=True)
    ).json()
    cut = [request.prompt_token_ids for request in api.served.engine.requests]
    assert cut == [ids[-2:] for ids in whole]
    for choice, ids in zip(answer["choices"], cut, strict=True):
        assert choice["text"] == tiny_tokenizer().decode(ids) + TEXT


def test_a_prompt_beyond_the_context_is_cut_to_fit_it(api: Api) -> None:
    limit = api.served.deps.text.max_model_len
    for prompt in ([5] * (limit + 9), "the dog " * 10 * limit):
        body = completion(prompt=prompt, max_tokens=7)
        assert api.post("/v1/completions", body).status_code == 400
        body["truncate_prompt_tokens"] = -1
        assert api.post("/v1/completions", body).status_code == 200
        assert len(api.served.engine.requests[-1].prompt_token_ids) == limit - 7
    body = chat(messages=[{"role": "user", "content": "the dog " * limit}], truncate_prompt_tokens=20)
    assert api.post("/v1/chat/completions", body).status_code == 200
    assert len(api.served.engine.requests[-1].prompt_token_ids) == 20
    assert api.post("/v1/chat/completions", {**body, "truncate_prompt_tokens": 0}).status_code == 400


def test_lorax_names_an_adapter_beside_the_model(api: Api) -> None:
    for model in ("base", "", "pirate"):
        answer = api.post("/v1/completions", completion(model=model, adapter_id="pirate")).json()
        assert answer["model"] == "pirate"
        assert api.served.engine.requests[-1].adapter == "version-of-pirate"
    refused = api.post("/v1/completions", completion(model="poet", adapter_id="pirate"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "adapter_id")
    assert api.post("/v1/chat/completions", chat(adapter_id="nobody")).status_code == 404


def test_the_priority_reaches_the_engine(api: Api) -> None:
    api.post("/v1/completions", completion(priority=-3))
    api.post("/v1/chat/completions", chat())
    assert [request.priority for request in api.served.engine.requests] == [-3, 0]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_can_be_off_in_two_ways(api: Api, top_k: int) -> None:
    api.post("/v1/completions", completion(top_k=top_k))
    assert api.served.engine.requests[0].params.top_k == 0


def test_fields_without_effect_are_accepted(api: Api) -> None:
    fields = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [],
        "parallel_tool_calls": True, "tool_choice": "none", "response_format": {"type": "text"},
        "modalities": ["text"], "audio": None, "logit_bias": None, "stop": None, "n": None,
        "skip_special_tokens": True, "use_beam_search": False, "prompt_cache_key": "k",
    }  # fmt: skip
    assert api.post("/v1/chat/completions", chat(**fields)).status_code == 200


def test_a_stream_that_fails_in_the_queue_has_its_headers_and_ends_with_the_error(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(says(TEXT, fail_after=0))
    response = api.post("/v1/chat/completions", chat(stream=True))
    assert response.status_code == 200
    [event] = response.text.strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "out of luck"


@pytest.mark.parametrize(
    ("stream", "failure", "status"),
    [
        (False, CapacityError("never fits"), 400),
        (True, CapacityError("never fits"), 400),
        (False, EngineDeadError("it died"), 503),
        (True, EngineDeadError("it died"), 503),
        (False, None, 500),
    ],
)
def test_a_failure_before_a_request_is_queued_is_an_http_error(
    make_api: Callable[..., Api], stream: bool, failure: Exception | None, status: int
) -> None:
    api = make_api(says(TEXT, fail_after=0, failure=failure))
    response = api.post("/v1/chat/completions", chat(stream=stream))
    assert response.status_code == status
    assert (str(failure) if failure else "out of luck") in response.json()["error"]["message"]


@pytest.mark.parametrize("failure", [EngineDeadError("it died"), None, RuntimeError("a bug")])
def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(
    make_api: Callable[..., Api], failure: Exception | None
) -> None:
    api = make_api(says(TEXT, fail_after=2, failure=failure))
    response = api.post("/v1/chat/completions", chat(stream=True))
    assert response.status_code == 200
    *_, last = [line for line in response.text.split("\n\n") if line]
    assert last.startswith('data: {"error":{"message":')
    assert "a bug" not in last


def test_a_lease_is_given_back_whatever_happens(make_api: Callable[..., Api]) -> None:
    api = make_api(says(TEXT, fail_after=2, failure=EngineDeadError("it died")))
    api.post("/v1/chat/completions", chat(model="pirate"))
    api.post("/v1/chat/completions", chat(model="pirate", stream=True))
    api.post("/v1/chat/completions", chat(model="pirate", max_tokens=100000))
    assert api.served.service._uses["version-of-pirate"].idle


@pytest.mark.parametrize(
    ("param", "status", "code"), [("model", 400, "adapter_unavailable"), (None, 500, None)]
)
def test_an_adapter_that_is_lost_is_the_models_fault(
    api: Api, monkeypatch: pytest.MonkeyPatch, param: str | None, status: int, code: str | None
) -> None:
    async def lost(request: EngineRequest, script: Script) -> AsyncGenerator[EngineOutput, None]:
        yield EngineOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error="its files are gone from /srv/adapters/globex/pirate",
            error_param=param,
        )

    monkeypatch.setattr(api.served.engine, "_outputs", lost)
    response = api.post("/v1/chat/completions", {"model": "pirate", "messages": USER})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["message"] == "its files are gone from (a path)"
