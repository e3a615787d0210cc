from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from fake_openai import FakeServer

from loraplex.bench.client import BenchError, CompletionClient, encode_request
from loraplex.bench.records import RequestRecord
from loraplex.core.words import no_server


def complete(base_url: str, model: str, *, output_tokens: int = 4, timeout_s: float = 60.0) -> RequestRecord:
    async def main() -> RequestRecord:
        async with CompletionClient(base_url, api_key="secret", timeout_s=timeout_s) as client:
            request = encode_request(model=model, prompt_token_ids=[11, 12, 13], output_tokens=output_tokens)
            return await client.complete(request)

    return asyncio.run(main())


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_good_request_is_timed_token_by_token(fake: FakeServer) -> None:
    record = complete(fake.base_url, "the-base")
    assert record.ok
    assert (record.prompt_tokens, record.output_tokens, len(record.token_times_s)) == (3, 4, 4)
    assert record.first_token_s is not None
    assert record.arrival_s <= record.first_token_s <= record.finish_s == record.token_times_s[-1]
    assert list(record.token_times_s) == sorted(record.token_times_s)


def test_the_request_fixes_lengths_exactly(fake: FakeServer) -> None:
    complete(fake.base_url + "/v1/", "the-base", output_tokens=7)
    assert fake.bodies == [
        {
            "model": "the-base",
            "prompt": [11, 12, 13],
            "max_tokens": 7,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert fake.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("model", "error", "num_tokens"),
    [
        ("refuse", "HTTP 404: no such model", 0),
        ("crash", "HTTP 502: <html>gateway</html>", 0),
        ("die", "ClientPayloadError", 2),
        ("cut", "ended without [DONE] after 2 chunks", 2),
        ("error", "engine died", 2),
        ("short", "asked for 4 tokens, got 3", 3),
        ("no-usage", "no usage chunk", 4),
    ],
)
def test_a_failed_request_says_why(fake: FakeServer, model: str, error: str, num_tokens: int) -> None:
    record = complete(fake.base_url, model)
    assert not record.ok
    assert record.error is not None
    assert error in record.error
    assert record.finish_s >= record.arrival_s
    if model != "die":  # what an aborted connection still delivers is the kernel's choice
        assert len(record.token_times_s) == num_tokens


def test_connection_refused_is_a_failed_request() -> None:
    record = complete(unused_url(), "the-base")
    assert record.error is not None
    assert record.error.startswith("no server answers at ")
    assert record.first_token_s is None


def test_a_server_that_never_answers_is_given_up(fake: FakeServer) -> None:
    record = complete(fake.base_url, "hang", timeout_s=0.2)
    assert record.error == "no complete answer within 0.2 s"


def find_base(base_url: str) -> str:
    async def main() -> str:
        async with CompletionClient(base_url) as client:
            return await client.base_model()

    return asyncio.run(main())


def test_the_base_model_is_the_first_without_a_parent(fake: FakeServer) -> None:
    assert find_base(fake.base_url) == "the-base"


def test_a_server_with_adapters_only_needs_a_model_named(fake: FakeServer) -> None:
    fake.models = [{"id": "lora-a", "parent": "x"}]
    with pytest.raises(BenchError, match="--model"):
        find_base(fake.base_url)


def test_a_server_out_of_reach_is_named() -> None:
    url = unused_url()
    with pytest.raises(BenchError) as caught:
        find_base(url)
    reason = f"[Errno {errno.ECONNREFUSED}] Connection refused"
    assert str(caught.value) == no_server(url, reason)


def test_a_host_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(BenchError, match=r"^no server answers at http://host\.invalid:1 \("):
        find_base("http://host.invalid:1")


@pytest.mark.parametrize("models", [["the-base"], None, [{"name": "x"}]])
def test_a_server_that_is_not_openai_compatible_is_named(fake: FakeServer, models: object) -> None:
    fake.models = models  # type: ignore[assignment]
    with pytest.raises(BenchError, match="not an OpenAI model list"):
        find_base(fake.base_url)
