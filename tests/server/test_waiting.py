"""A limit on waiting requests: refused at once with the time to retry after, and released whatever
happens."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from server_fixtures import USER, Api, Served, live
from serving_fakes import says
from test_live_server import connect, request_bytes

from loraplex.core.clock import ManualClock
from loraplex.core.errors import InvalidRequestError
from loraplex.core.tenants import NOBODY, Caller, TenantPolicy
from loraplex.server.body import BodyLimits
from loraplex.server.errors import QueueFullError
from loraplex.server.waiting import Refused, WaitingBook, WaitingLimits, WaitingTicket

ServedFactory = Callable[..., Served]


def book_of(clock: ManualClock | None = None, **limits: Any) -> WaitingBook:
    return WaitingBook(WaitingLimits(**limits), clock or ManualClock())


def admit(book: WaitingBook, prompts: list[list[int]], num_siblings: int = 1) -> WaitingTicket:
    ticket = book.admit(num_siblings * len(prompts))
    try:
        ticket.encoded(prompts, num_siblings)
    except BaseException:
        ticket.close()
        raise
    return ticket


def test_requests_count_until_their_first_token() -> None:
    book = book_of(max_requests=3)
    ticket = admit(book, [[1, 2], [3]])
    assert (book.num_requests, book.num_tokens) == (2, 3)
    ticket.started(0)
    ticket.started(0)
    assert (book.num_requests, book.num_tokens) == (1, 1)
    ticket.close()
    ticket.close()
    assert (book.num_requests, book.num_tokens) == (0, 0)


def test_each_choice_of_a_call_counts() -> None:
    book = book_of(max_requests=4, max_tokens=100)
    ticket = admit(book, [[1] * 10, [1] * 5], 2)
    assert (book.num_requests, book.num_tokens) == (4, 30)
    ticket.started(1)
    assert (book.num_requests, book.num_tokens) == (3, 20)
    ticket.started(3)
    assert (book.num_requests, book.num_tokens) == (2, 15)


@pytest.mark.parametrize(
    ("limits", "kind"), [({"max_requests": 2}, "requests"), ({"max_tokens": 9}, "tokens")]
)
def test_what_finds_the_queue_full_is_refused_and_not_counted(limits: dict[str, int], kind: str) -> None:
    book = book_of(**limits)
    admit(book, [[1] * 4], 2)
    with pytest.raises(QueueFullError) as caught:
        admit(book, [[1] * 4])
    assert (caught.value.kind, caught.value.retry_after_s) == (kind, 1)
    assert (book.num_requests, book.num_tokens, book.num_refused.total()) == (2, 8, 1)


@pytest.mark.parametrize("tenants", [(), ("acme",), ("acme", "globex")])
def test_a_full_queue_does_not_tell_a_tenant_how_many_wait(tenants: tuple[str, ...]) -> None:
    book = book_of(max_requests=40)
    book.set_tenants([TenantPolicy(name=name) for name in tenants])
    caller = Caller(tenant="acme") if tenants else NOBODY
    message = ""
    while not message:
        try:
            book.admit(1, caller=caller)
        except QueueFullError as error:
            message = str(error)
    assert book.num_requests == (30 if len(tenants) == 2 else 40)
    full = {
        0: "40 requests wait and at most 40 may",
        1: "at most 40 requests may wait",
        2: "at most 40 requests may wait, and the places left are kept for other tenants",
    }[len(tenants)]
    assert message == f"the server's queue is full: {full}; try again in 1 s"


def test_a_call_that_never_fits_says_which_option_to_raise() -> None:
    with pytest.raises(InvalidRequestError, match=r"--max-waiting\b"):
        book_of(max_requests=3).admit(4)
    with pytest.raises(InvalidRequestError, match="--max-waiting-tokens"):
        admit(book_of(max_tokens=3), [[1] * 4])


def test_requests_count_before_their_prompts_are_encoded() -> None:
    book = book_of(max_requests=1)
    ticket = book.admit(1)
    assert (book.num_requests, book.num_tokens) == (1, 0)
    with pytest.raises(QueueFullError):
        book.admit(1)
    ticket.close()
    ticket = book.admit(1)
    ticket.encoded([[1, 2]], 1)
    assert (book.num_requests, book.num_tokens) == (1, 2)
    ticket.close()
    assert (book.num_requests, book.num_tokens) == (0, 0)


@pytest.mark.parametrize(("every_s", "expected_s"), [(0.001, 1), (0.1, 20), (100.0, 60)])
def test_the_time_to_come_back_follows_the_pace_of_starts(every_s: float, expected_s: int) -> None:
    clock = ManualClock()
    book = book_of(clock, max_requests=400)
    ticket = admit(book, [[1]] * 400)
    for choice in range(200):
        ticket.started(choice)
        clock.advance(every_s)
    admit(book, [[1]] * 200)
    with pytest.raises(QueueFullError) as caught:
        book.admit(1)
    assert caught.value.retry_after_s == expected_s


def test_time_in_which_nobody_waits_says_nothing_of_the_pace() -> None:
    clock = ManualClock()
    book = book_of(clock, max_requests=400)
    clock.advance(3600)
    for _ in range(2):
        ticket = admit(book, [[1]] * 20)
        for choice in range(20):
            clock.advance(0.1)
            ticket.started(choice)
        clock.advance(3600)
    admit(book, [[1]] * 400)
    with pytest.raises(QueueFullError) as caught:
        book.admit(1)
    assert caught.value.retry_after_s == 20  # half of them, at ten per second


def test_over_http_a_full_queue_is_a_429_that_clients_understand(make_served: ServedFactory) -> None:
    resume = asyncio.Event()
    served = make_served(says("Hello", pause_after=0, resume=resume), waiting=WaitingLimits(max_requests=1))
    with live(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        # Its headers arrive although no token does: it counts from then on.
        with client.chat.completions.create(model="base", messages=USER, stream=True) as first:
            assert served.deps.waiting.num_requests == 1
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="base", messages=USER)
            assert caught.value.response.headers["retry-after"] == "1"
            assert "loraplex:requests_refused_total" in httpx.get(f"{url}/metrics").text
            error = caught.value.response.json()["error"]
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            first.close()
        # Disconnecting releases the place.
        while served.deps.waiting.num_requests:
            client.models.list()


def test_one_call_may_not_queue_more_choices_than_may_wait(make_api: Callable[..., Api]) -> None:
    api = make_api(waiting=WaitingLimits(max_requests=8))
    response = api.post("/v1/completions", {"model": "base", "prompt": ["a"] * 3, "n": 3, "max_tokens": 1})
    assert response.status_code == 400
    assert "--max-waiting" in response.json()["error"]["message"]
    assert api.served.engine.cancelled == []


def test_all_places_are_given_back_after_answers_and_errors(make_api: Callable[..., Api]) -> None:
    api = make_api()
    for body in ({"prompt": "hi", "n": 3}, {"prompt": ["a", "b"], "stream": True}, {"prompt": "x" * 5000}):
        api.post("/v1/completions", {"model": "base", "max_tokens": 2, **body})
        waiting = api.served.deps.waiting
        assert (waiting.num_requests, waiting.num_tokens) == (0, 0)


class Gate:
    """Blocks what a server encodes, from when it is asked to until `open`."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = served.deps.text.tokenizer
        encode_many = tokenizer.encode_many
        self.was_reached, self.open = threading.Event(), threading.Event()

        def held_up(texts: Sequence[str], **options: Any) -> list[list[int]]:
            self.was_reached.set()
            assert self.open.wait(60)
            return encode_many(texts, **options)

        monkeypatch.setattr(tokenizer, "encode_many", held_up)


LONG = "word " * 400
"""A text too long to be encoded on the event loop."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_that_are_being_encoded_take_places(
    make_api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    api = make_api(waiting=WaitingLimits(max_requests=2))
    gate = Gate(api.served, monkeypatch)
    text = (
        {"prompt": LONG} if path == "/v1/completions" else {"messages": [{"role": "user", "content": LONG}]}
    )
    body = {"model": "base", **text}

    async def go() -> list[int]:
        sent = [asyncio.create_task(api.send("POST", path, json=body)) for _ in range(5)]
        async with asyncio.timeout(60):
            refused = [
                (await answer).status_code for answer in itertools.islice(asyncio.as_completed(sent), 3)
            ]
        gate.open.set()
        await asyncio.wait(sent)
        return refused

    assert api.run(go()) == [429] * 3
    waiting = api.served.deps.waiting
    assert (waiting.num_requests, waiting.num_tokens) == (0, 0)
    assert waiting.num_refused == {Refused.QUEUE_FULL: 3}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_bodies_are_held_until_their_texts_are_encoded(
    make_api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    api = make_api(limits=BodyLimits(max_held_bytes=5000))
    gate = Gate(api.served, monkeypatch)
    body = {"model": "base", "prompt": LONG}

    async def go() -> httpx.Response:
        sent = [asyncio.create_task(api.send("POST", path, json=body)) for _ in range(3)]
        async with asyncio.timeout(60):
            refused = await next(asyncio.as_completed(sent))
        gate.open.set()
        await asyncio.wait(sent)
        return refused

    refused = api.run(go())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert api.served.deps.bodies._held_bytes == 0
    assert api.post("/tokenize", body).status_code == 200


def test_a_client_that_leaves_while_its_prompt_is_encoded_gives_its_place_back(
    make_served: ServedFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_served()
    gate = Gate(served, monkeypatch)
    with live(served) as url:
        try:
            with connect(url) as connection:
                connection.sendall(request_bytes("/v1/completions", {"model": "pirate", "prompt": LONG}))
                assert gate.was_reached.wait(60)
                assert served.deps.waiting.num_requests == 1
            # The text is still being encoded.
            while served.deps.waiting.num_requests or served.deps.bodies._held_bytes:
                httpx.get(f"{url}/health")
        finally:
            gate.open.set()
        assert httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "pirate"}).status_code == 200
    assert served.engine.requests == []
