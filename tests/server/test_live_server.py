"""A server over a real socket: the official client, and clients that behave badly."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from server_fixtures import USER, Served, live
from serving_fakes import says

from loraplex.core.errors import EngineDeadError
from loraplex.server.body import BodyLimits

TEXT = "Hello world! How are you?"
ServedFactory = Callable[..., Served]


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=30)


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def test_the_openai_client_lists_models(make_served: ServedFactory) -> None:
    with live(make_served()) as url, client_of(url) as client:
        assert [model.id for model in client.models.list()] == ["base", "pirate", "poet"]


def test_the_openai_client_chats(make_served: ServedFactory) -> None:
    with live(make_served()) as url, client_of(url) as client:
        answer = client.chat.completions.create(
            model="pirate",
            messages=USER,
            n=2,
            logprobs=True,
            top_logprobs=2,
            seed=1,
            max_completion_tokens=50,
        )
        assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(entry.token for entry in logprobs.content) == TEXT
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


def test_an_answer_can_be_sent_back_as_history(make_served: ServedFactory) -> None:
    with live(make_served()) as url, client_of(url) as client:
        answer = client.chat.completions.create(model="base", messages=USER).choices[0].message
        history: Any = [*USER, answer, *USER]
        as_dict: Any = [*USER, answer.model_dump(), *USER]
        for messages in (history, as_dict):
            assert client.chat.completions.create(model="base", messages=messages).choices


def test_the_openai_client_streams_a_chat(make_served: ServedFactory) -> None:
    with live(make_served()) as url, client_of(url) as client:
        stream = client.chat.completions.create(
            model="base", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None


def test_the_openai_client_accumulates_a_chat_stream(make_served: ServedFactory) -> None:
    with (
        live(make_served()) as url,
        client_of(url) as client,
        client.chat.completions.stream(model="base", messages=USER) as stream,
    ):
        final = stream.get_final_completion()
        assert final.choices[0].message.content == TEXT
        assert final.choices[0].finish_reason == "stop"


def test_the_openai_client_completes(make_served: ServedFactory) -> None:
    with live(make_served()) as url, client_of(url) as client:
        answer = client.completions.create(
            model="base", prompt=["a", "b"], max_tokens=50, echo=True, logprobs=1
        )
        assert [choice.text for choice in answer.choices] == ["a" + TEXT, "b" + TEXT]
        stream = client.completions.create(model="base:poet", prompt=[5, 6], max_tokens=50, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_the_asynchronous_openai_client(make_served: ServedFactory) -> None:
    async def talk(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="pirate", messages=USER, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    with live(make_served()) as url:
        assert asyncio.run(talk(url)) == [TEXT] * 8


def test_errors_are_the_openai_clients_own(make_served: ServedFactory) -> None:
    with live(make_served(api_keys=("key",))) as url:
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, "key") as client:
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(model="nobody", messages=USER)
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="base", messages=USER, temperature=-1)
            assert refused.value.param == "temperature"


def test_a_stream_that_fails_is_an_error_for_the_openai_client(make_served: ServedFactory) -> None:
    served = make_served(says(TEXT, fail_after=2, failure=EngineDeadError("the engine died")))
    with live(served) as url, client_of(url) as client:
        stream = client.chat.completions.create(model="base", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)


@pytest.mark.parametrize("n", [1, 2])
def test_hanging_up_in_the_middle_of_a_stream_cancels_the_request(make_served: ServedFactory, n: int) -> None:
    served = make_served(says(TEXT, pause_after=2))
    with live(served) as url, client_of(url) as client:
        stream = client.chat.completions.create(model="pirate", messages=USER, stream=True, n=n)
        next(iter(stream))
        assert served.engine.was_paused.wait(30)
        stream.close()
        assert served.engine.was_cancelled.wait(30)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_while_waiting_cancels_the_request(make_served: ServedFactory, stream: bool) -> None:
    served = make_served(says(TEXT, pause_after=0))
    with live(served) as url:
        connection = connect(url)
        body = {"model": "pirate", "messages": USER, "stream": stream}
        connection.sendall(request_bytes("/v1/chat/completions", body))
        assert served.engine.was_paused.wait(30)
        connection.close()
        assert served.engine.was_cancelled.wait(30)


def test_a_half_sent_body_times_out_with_an_answer(make_served: ServedFactory) -> None:
    served = make_served(limits=BodyLimits(read_timeout_s=0.05))
    with live(served) as url, connect(url) as connection:
        whole = request_bytes("/v1/chat/completions", {"model": "base", "messages": USER})
        connection.sendall(whole[:-10])
        status, body = read_response(connection)
        assert status == 408
        assert json.loads(body)["error"]["code"] == "body_timeout"
        assert connection.recv(1) == b""  # and the connection is closed


def test_hanging_up_in_the_middle_of_the_body_harms_nobody(make_served: ServedFactory) -> None:
    served = make_served()
    with live(served) as url:
        with connect(url) as connection:
            connection.sendall(request_bytes("/v1/completions", {"model": "base", "prompt": "x"})[:-5])
        with client_of(url) as client:
            assert client.completions.create(model="base", prompt="x").choices[0].text == TEXT


def test_eleven_megabytes_are_refused_and_the_server_goes_on(make_served: ServedFactory) -> None:
    with live(make_served()) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        body = json.dumps({"model": "base", "prompt": "x" * 11_000_000}).encode()
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "body_too_large"
        connection.close()

        chunked = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        parts = (body[start : start + 65536] for start in range(0, len(body), 65536))
        chunked.request("POST", "/v1/completions", parts, encode_chunked=True)
        assert chunked.getresponse().status == 413
        chunked.close()
        with client_of(url) as client:
            assert client.completions.create(model="base", prompt="x").choices[0].text == TEXT


def test_a_bug_ends_its_request_and_not_the_connection(
    make_served: ServedFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError

    served = make_served()
    request = request_bytes("/v1/completions", {"model": "base", "prompt": "x"})
    with live(served) as url, connect(url) as connection:
        with monkeypatch.context() as patched:
            patched.setattr(served.deps.adapters, "lease", broken)
            connection.sendall(request)
            assert read_response(connection)[0] == 500
        connection.sendall(request)
        assert read_response(connection)[0] == 200
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


def test_a_bug_before_the_body_was_read_keeps_the_connection(
    make_served: ServedFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError

    served = make_served()
    request = request_bytes("/v1/completions", {"model": "base", "prompt": "x", "user": "y" * 1000})
    with live(served) as url, connect(url) as connection:
        with monkeypatch.context() as patched:
            patched.setattr(served.deps.bodies, "read", broken)
            connection.sendall(request[:-500])
            assert read_response(connection)[0] == 500
        connection.sendall(request[-500:] + request)
        assert read_response(connection)[0] == 200


def test_a_client_that_does_not_read_holds_up_nobody(make_served: ServedFactory) -> None:
    # 64 choices with 20 logprobs a token: megabytes, more than the buffers of an unread connection hold.
    served = make_served(says(TEXT * 9, tokens_per_output=1))
    with live(served) as url, connect(url) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"model": "base", "prompt": "x", "stream": True, "max_tokens": 200, "n": 64, "logprobs": 20}
        lazy.sendall(request_bytes("/v1/completions", body))
        with client_of(url) as client:
            for _ in range(3):
                assert client.completions.create(model="base", prompt="x", max_tokens=50).choices[0].text


def test_garbage_on_the_socket_is_answered_with_400(make_served: ServedFactory) -> None:
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(b"\x16\x03\x01 this is not http\r\n\r\n")
        assert read_response(connection)[0] == 400
