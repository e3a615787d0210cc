"""Files and batches, as the openai client uses them, on a server with a fake engine."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from server_fixtures import USER, Served, live
from server_process import wait_until
from serving_fakes import Script, says

from loraplex.core.errors import StorageError
from loraplex.core.tenants import BATCH_PRIORITY
from loraplex.server.batches import batch_run
from loraplex.server.batches.objects import ENDED, BatchObject, BatchStatus, FileObject, new_id
from loraplex.server.batches.runner import BatchRunner
from loraplex.server.batches.store import BatchLimits, BatchStore
from loraplex.server.waiting import WaitingLimits

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def line(custom_id: str, model: str = "pirate", url: str = CHAT, **fields: Any) -> str:
    given = {"messages": USER} if url == CHAT else {"prompt": "hi"}
    body = {"model": model, "max_tokens": 4, **given, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@contextmanager
def running(served: Served) -> Iterator[openai.OpenAI]:
    with live(served) as url, client_of(url) as client:
        yield client


@pytest.fixture
def client(make_served: Callable[..., Served]) -> Iterator[openai.OpenAI]:
    with running(make_served(batches=BatchLimits(max_file_bytes=20_000, max_lines=50))) as client:
        yield client


def upload(client: openai.OpenAI, *lines: str | bytes) -> Any:
    content = b"\n".join(each.encode() if isinstance(each, str) else each for each in lines)
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def begin(client: openai.OpenAI, *lines: str | bytes, endpoint: Any = CHAT, **options: Any) -> Any:
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    found = client.batches.retrieve(batch_id)

    def is_over() -> bool:
        nonlocal found
        found = client.batches.retrieve(batch_id)
        return found.status in set(ENDED)

    wait_until(is_over, "the batch has not ended")
    return found


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    read = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    assert not [name for name, count in Counter(each["custom_id"] for each in read).items() if count > 1]
    return {each["custom_id"]: each for each in read}


def test_a_batch_from_upload_to_results(client: openai.OpenAI) -> None:
    lines = [line(f"q{i}", ("pirate", "poet", "base")[i % 3]) for i in range(30)]
    batch = begin(client, *lines, line("lost", "nobody"), "", metadata={"run": "7"})
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"run": "7"}, CHAT)
    assert batch.expires_at == batch.created_at + 86400

    done = ended(client, batch.id)
    assert (done.status, done.errors) == ("completed", None)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (31, 30, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    answers = results(client, done.output_file_id)
    assert set(answers) == {f"q{i}" for i in range(30)}
    one = answers["q1"]
    assert one["id"].startswith("batch_req_")
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    assert one["response"]["request_id"].startswith("req-")
    assert one["response"]["body"]["model"] == "poet"
    assert one["response"]["body"]["choices"][0]["message"]["content"].startswith("H")
    lost = results(client, done.error_file_id)["lost"]["response"]
    assert (lost["status_code"], lost["body"]["error"]["code"]) == (404, "model_not_found")

    listed = client.files.list()
    assert {file.id for file in listed} == {done.input_file_id, done.output_file_id, done.error_file_id}
    assert [each.id for each in client.files.list(purpose="batch")] == [done.input_file_id]
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert [each.id for each in client.batches.list()] == [batch.id]
    for file in listed:
        assert client.files.delete(file.id).deleted
    assert list(client.files.list()) == []
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(done.output_file_id)


def test_lines_come_after_live_requests_and_few_adapters_at_a_time(
    make_served: Callable[..., Served],
) -> None:
    names = tuple(f"a{i}" for i in range(12))
    served = make_served(names=names)
    with running(served) as client:
        lines = [line(f"{i}-{name}", name, TEXT, priority=-5) for i in range(3) for name in names]
        assert ended(client, begin(client, *lines, endpoint=TEXT).id).request_counts.completed == 36
        client.completions.create(model="a1", prompt="hi", max_tokens=1)
    *batched, live_one = served.engine.requests
    assert {each.priority for each in batched} == {BATCH_PRIORITY}
    assert live_one.priority == 0
    first_ones = [each.adapter for each in batched[:12]]
    assert len(set(first_ones)) == 4


@pytest.mark.parametrize("num_turns", range(4))
def test_a_runner_that_is_cancelled_as_something_changes_ends(
    make_served: Callable[..., Served], num_turns: int
) -> None:
    deps = make_served().deps
    store = deps.batches
    assert store is not None

    async def scenario() -> None:
        runner = BatchRunner(deps, store)
        running = asyncio.create_task(runner.run())
        while not runner._wake._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        store.changed()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=5)
        assert done == {running}

    asyncio.run(scenario())
    deps.adapters.registry.close()


def test_responses_in_a_batch(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/responses"}
    asked["body"] = {"model": "poet", "input": "hi"}
    over = ended(client, begin(client, json.dumps(asked), endpoint="/v1/responses").id)
    body = results(client, over.output_file_id)["a"]["response"]["body"]
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "poet")


def test_pages_of_lists(client: openai.OpenAI) -> None:
    files = [upload(client, line("a")) for _ in range(3)]
    batches = [begin(client, line("a")) for _ in range(3)]
    first = client.batches.list(limit=2)
    assert [each.id for each in first.data] == [batches[2].id, batches[1].id]
    assert [each.id for each in client.batches.list(limit=2)] == [each.id for each in reversed(batches)]
    assert [each.id for each in client.files.list(order="asc", limit=1)][:3] == [each.id for each in files]


BROKEN = [
    ("{", "invalid_json_line", "line 2 is not valid JSON"),
    (b"\xff\xfe", "invalid_json_line", "line 2 is not valid JSON"),
    ('{"body": ' + "[" * 5000, "invalid_json_line", "line 2 is not valid JSON"),
    ("[1]", "invalid_line", "line 2 is not a request"),
    ('{"custom_id": 3, "method": "POST", "url": "/", "body": {}}', "invalid_line", "line 2 is not a request"),
    (line("ok"), "duplicate_custom_id", "line 2 has the custom_id of line 1: 'ok'"),
    (line("s", stream=True), "stream_not_supported", "line 2 asks for a stream"),
    (line("t", url=TEXT), "mismatched_endpoint", "line 2 is for '/v1/completions'"),
    (line("u").replace('"model"', '"module"'), "invalid_body", "line 2 has a wrong body"),
    (line("v").replace("POST", "GET"), "invalid_line", "line 2 is not a request"),
]


@pytest.mark.parametrize(("text", "code", "message"), BROKEN)
def test_a_broken_line_is_named(client: openai.OpenAI, text: str | bytes, code: str, message: str) -> None:
    failed = ended(client, begin(client, line("ok"), text, line("ok2")).id)
    assert (failed.status, failed.output_file_id) == ("failed", None)
    [error] = failed.errors.data
    assert (error.line, error.code) == (2, code)
    assert message in error.message


def test_a_byte_order_mark_is_no_part_of_a_line(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, b"\xef\xbb\xbf" + line("a").encode(), line("b")).id)
    assert results(client, batch.output_file_id).keys() == {"a", "b"}


def test_an_empty_file_and_one_with_too_many_lines_fail(client: openai.OpenAI) -> None:
    assert ended(client, begin(client, "\n\n").id).errors.data[0].code == "empty_file"
    many = ended(client, begin(client, *(line(str(i)) for i in range(51))).id)
    assert many.errors.data[0].code == "too_many_requests"
    assert "more than the 50 requests" in many.errors.data[0].message


def test_errors_of_many_lines_are_counted(client: openai.OpenAI) -> None:
    errors = ended(client, begin(client, *["{"] * 130).id).errors.data
    assert [each.line for each in errors] == [*range(1, 101), None]
    assert errors[-1].message == "30 more lines are broken"


def test_bad_uploads_are_refused_and_leave_nothing(client: openai.OpenAI, tmp_path: Path) -> None:
    url = f"{client.base_url}files"
    with pytest.raises(openai.APIStatusError, match=r"larger than the 20,000 bytes") as caught:
        upload(client, b"x" * 20_001)
    assert caught.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match=r"larger than the 20,000 bytes"):
        upload(client, b"x" * 500_000)
    with pytest.raises(openai.BadRequestError, match="purpose is 'fine-tune'"):
        client.files.create(file=b"{}", purpose="fine-tune")

    def chunks() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(20):
            yield b"x" * 10_000

    kind = {"content-type": "multipart/form-data; boundary=b"}
    refused = {
        "no form": httpx.post(url, json={"file": "x"}),
        "no boundary": httpx.post(url, content=b"", headers={"content-type": "multipart/form-data"}),
        "cut": httpx.post(url, content=b"--b\r\nContent-Disposition: form-data", headers=kind),
        "garbage": httpx.post(url, content=b"\0" * 1000, headers=kind),
        "no file": httpx.post(url, data={"purpose": "batch"}, files={"other": b"x"}),
        "two files": httpx.post(url, files=[("file", b"x"), ("file", b"y")], data={"purpose": "batch"}),
        "no purpose": httpx.post(url, files={"file": b"x"}),
        "endless": httpx.post(url, content=chunks(), headers=kind),
        "long field": httpx.post(url, files={"file": b"x"}, data={"purpose": "p" * 300}),
        "many fields": httpx.post(url, files=[("purpose", (None, "batch"))] * 9),
    }
    statuses = {name: response.status_code for name, response in refused.items()}
    assert statuses == {**dict.fromkeys(refused, 400), "endless": 413}
    assert all(response.json()["error"]["message"] for response in refused.values())
    foreign = httpx.post(url, files={"file": b"x"}, headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert list(tmp_path.rglob("file-*")) == []


def test_a_name_is_only_shown(client: openai.OpenAI) -> None:
    file = client.files.create(file=("../../etc/pass\x00wd.jsonl", b"{}"), purpose="batch")
    assert file.filename.startswith("pass")
    assert "/" not in file.filename


@pytest.mark.parametrize(
    "bad", ["file-..", "..%2F..%2Fetc%2Fpasswd", "file-" + "0" * 32, "batch_" + "g" * 32]
)
def test_no_other_path_is_reached(client: openai.OpenAI, bad: str) -> None:
    for path in (f"files/{bad}", f"files/{bad}/content", f"batches/{bad}"):
        assert httpx.get(f"{client.base_url}{path}").status_code == 404, path
    assert httpx.delete(f"{client.base_url}files/{bad}").status_code == 404
    assert httpx.post(f"{client.base_url}batches/{bad}/cancel").status_code == 404


def test_bad_batches_are_refused(client: openai.OpenAI) -> None:
    def create(**fields: Any) -> Any:
        given = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        client.batches.create(**{**given, **fields})

    with pytest.raises(openai.NotFoundError, match="there is no file") as refused:
        create()
    assert refused.value.param == "input_file_id"
    for fields, message in (
        ({"endpoint": "/v1/embeddings"}, "send /v1/chat/completions, /v1/completions or /v1/responses"),
        ({"completion_window": "1 day"}, "'1 day'; give minutes, hours or days, such as 90m, 24h or 30d"),
        ({"completion_window": "31d"}, "at most 30d"),
        ({"completion_window": "0"}, "is '0'; give minutes, hours or days"),
        ({"metadata": {"k": "x" * 513}}, "must be a string of at most 512 characters"),
        ({"metadata": {"k" * 65: "x"}}, "a key of metadata must be a string of at most 64 characters"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            create(**fields)


@pytest.mark.parametrize("window", ["90m", "1.5h", "5400s", "5400"])
def test_a_window_is_any_duration(client: openai.OpenAI, window: Any) -> None:
    file = upload(client, line("a"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window)
    assert batch.completion_window == window
    assert batch.expires_at == batch.created_at + 5400


class Held:
    """An engine's script in which every answer after the first `num_free` waits."""

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free
        self.num_held = 0

    def __call__(self, request: Any) -> Script:
        self._num_free -= 1
        script = says("Hello world!")(request)
        if self._num_free >= 0:
            return script
        self.num_held += 1
        return replace(script, pause_after=0)


def has_answered(client: openai.OpenAI, batch_id: str, num_lines: int) -> None:
    """Wait until so many answers are on disk."""
    wait_until(
        lambda: client.batches.retrieve(batch_id).request_counts.completed == num_lines, "lines are answered"
    )


def test_a_cancelled_batch_keeps_its_answers(make_served: Callable[..., Served]) -> None:
    held = Held(3)
    with running(make_served(held)) as client:
        batch = begin(client, *(line(f"q{i}") for i in range(40)))
        has_answered(client, batch.id, 3)
        with pytest.raises(openai.ConflictError, match="reads this file"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        over = ended(client, batch.id)
        assert over.status == "cancelled"
        assert over.cancelling_at <= over.cancelled_at
        answers = results(client, over.output_file_id)
        left = results(client, over.error_file_id)
        assert set(answers) | set(left) == {f"q{i}" for i in range(40)}
        assert (len(answers), len(left)) == (3, 37)
        assert {each["error"]["code"] for each in left.values()} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError, match="it is cancelled"):
            client.batches.cancel(batch.id)
        client.files.delete(batch.input_file_id)


def test_a_batch_expires(make_served: Callable[..., Served]) -> None:
    held = Held(2)
    served = make_served(held)
    assert served.deps.batches is not None
    now_s = [1e9]
    object.__setattr__(served.deps.batches, "wall_clock_s", lambda: now_s[0])
    with running(served) as client:
        batch = begin(client, *(line(f"q{i}") for i in range(4)))
        has_answered(client, batch.id, 2)
        now_s[0] += 86_400
        over = ended(client, batch.id)
        assert (over.status, over.expired_at) == ("expired", over.expires_at)
        assert len(results(client, over.output_file_id)) == 2
        left = results(client, over.error_file_id).values()
        assert [each["error"]["code"] for each in left] == ["batch_expired"] * 2


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (errno.ENOSPC, "disk_full", "delete files that you do not need (DELETE /v1/files/ID)"),
        (errno.EIO, "storage_failed", "ask its operator, whose log says why"),
    ],
)
def test_a_batch_that_waits_for_the_disk_says_why(
    make_served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, number: int, code: str, told: str
) -> None:
    is_full, sync = threading.Event(), os.fsync

    def synced(file: int) -> None:
        if is_full.is_set() and "batches/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        sync(file)

    monkeypatch.setattr(batch_run, "_DISK_RETRY_S", 0.05)
    with running(make_served()) as client:
        file = upload(client, line("a"), line("b"))
        monkeypatch.setattr(os, "fsync", synced)
        is_full.set()
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert batch.waits is None

        def shown() -> Any:
            return client.batches.retrieve(batch.id).waits

        wait_until(lambda: shown() is not None, "the batch does not say why it waits")
        assert shown()["code"] == code
        assert told in shown()["message"]
        assert "/batches" not in shown()["message"], "paths are the operator's"
        assert client.batches.list().data[0].waits["code"] == code
        is_full.clear()
        over = ended(client, batch.id)
        assert (over.status, over.request_counts.completed, over.waits) == ("completed", 2, None)


def test_a_batch_whose_counts_could_not_be_written_at_once_writes_them(
    make_served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_results, has_failed, sync, replace_file = threading.Event(), threading.Event(), os.fsync, os.replace

    def synced(file: int) -> None:
        sync(file)
        has_results.set()

    def replaced(old: Any, new: Any, **options: Any) -> None:
        if has_results.is_set() and not has_failed.is_set() and "batch_" in str(new):
            has_failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace_file(old, new, **options)

    monkeypatch.setattr(batch_run, "_DISK_RETRY_S", 0.05)
    with running(make_served(Held(1))) as client:
        file = upload(client, line("a"), line("b"))
        has_results.clear()
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", replaced)
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        has_answered(client, batch.id, 1)
        assert has_failed.is_set()
        assert client.batches.retrieve(batch.id).waits is None


def test_a_batch_of_another_server_is_not_said_to_wait(make_served: Callable[..., Served]) -> None:
    deps = make_served().deps
    store = deps.batches
    assert store is not None
    here, there = store.owned_by(""), BatchStore(root=store.root, base_model=store.base_model).owned_by("")
    file_id, path = here.new_content()
    path.write_text(line("a"))
    here.add(FileObject(id=file_id, bytes=1, created_at=1, filename="in", purpose="batch"))
    batch = BatchObject(
        id=new_id("batch", 1.0), endpoint=CHAT, input_file_id=file_id, completion_window="1h", created_at=1,
        expires_at=2**40,
    )  # fmt: skip
    here.create_batch(batch)
    assert here.batch(batch.id).waits is None
    here.wait_for_disk(batch.id, StorageError("the disk fails"))
    assert here.batch(batch.id).waits is not None

    async def runs_here() -> None:
        runner = asyncio.create_task(BatchRunner(deps, store).run())
        async with asyncio.timeout(5):
            while store.waits:
                await asyncio.sleep(0)
        runner.cancel()
        await asyncio.wait([runner])

    with there.claim(batch.id) as is_theirs:
        assert is_theirs
        asyncio.run(runs_here())
        here.wait_for_disk(batch.id, StorageError("the disk fails"))
        found = there.stored(batch.id)
        assert found is not None
        there.save(
            structs.replace(found, batch=structs.replace(batch, status=BatchStatus.COMPLETED, completed_at=2))
        )
    assert (here.batch(batch.id).status, here.batch(batch.id).waits) == ("completed", None)
    assert not store.waits
    deps.adapters.registry.close()


def test_few_lines_wait_at_a_time(make_served: Callable[..., Served]) -> None:
    held = Held(0)
    with running(make_served(held, waiting=WaitingLimits(max_requests=24))) as client:
        batch = begin(client, *(line(f"q{i}") for i in range(10)))
        wait_until(lambda: held.num_held == 3, "lines are sent")
        client.batches.cancel(batch.id)
        ended(client, batch.id)
        assert held.num_held == 3


def test_another_server_goes_on_where_one_stopped(make_served: Callable[..., Served]) -> None:
    names = {f"q{i}" for i in range(20)}
    held = Held(7)
    with running(make_served(held)) as client:
        batch = begin(client, *map(line, sorted(names)))
        has_answered(client, batch.id, 7)
    with running(make_served(says("Again!"))) as client:
        over = ended(client, batch.id)
        assert (over.status, over.request_counts.completed) == ("completed", 20)
        answers = results(client, over.output_file_id)
        assert set(answers) == names
        texts = Counter(
            each["response"]["body"]["choices"][0]["message"]["content"] for each in answers.values()
        )
        assert sorted(texts.values()) == [7, 13]


def key(name: str) -> str:
    return f'"sha256:{hashlib.sha256(name.encode()).hexdigest()}"'


def test_what_a_tenant_has_is_its_own(make_served: Callable[..., Served]) -> None:
    tenants = "\n".join(
        f'[tenants.{name}]\nkeys = [{key(name)}]\nadapters = ["{adapter}"]\n'
        for name, adapter in (("acme", "pirate"), ("globex", "poet"))
    )
    served = make_served(tenants=tenants, admin_keys=("root",))
    with live(served) as url, client_of(url, "acme") as acme, client_of(url, "globex") as globex:
        batch = begin(acme, line("mine"), line("theirs", "poet"))
        over = ended(acme, batch.id)
        assert set(results(acme, over.output_file_id)) == {"mine"}
        refused = results(acme, over.error_file_id)["theirs"]["response"]
        assert refused["status_code"] == 404
        assert served.engine.requests[0].tenant == "acme"
        assert list(globex.files.list()) == []
        assert list(globex.batches.list()) == []
        for call in (
            lambda: globex.files.retrieve(over.output_file_id),
            lambda: globex.files.content(over.output_file_id),
            lambda: globex.files.delete(over.output_file_id),
            lambda: globex.batches.retrieve(batch.id),
            lambda: globex.batches.cancel(batch.id),
            lambda: globex.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with client_of(url, "nobody") as nobody, pytest.raises(openai.AuthenticationError):
            nobody.files.list()
    tasks = {each.tenant for each in served.engine.requests}
    assert tasks == {"acme"}
    assert BatchStatus(over.status) is BatchStatus.COMPLETED
