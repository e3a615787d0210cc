"""The request log, and the headers that identify a request and the version that answered."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from log_lines import Lines, listening
from server_fixtures import USER, Api, Served, live
from server_process import COMMAND, run_command
from serving_fakes import hf_tokenizer, says
from test_live_server import client_of, connect, request_bytes

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineClosedError, EngineDeadError
from loraplex.server.body import BodyLimits
from loraplex.server.fleet.members import Members

TEXT = "Hello world! How are you?"
CHAT = {"model": "pirate", "messages": USER}


@pytest.fixture
def lines() -> Iterator[Lines]:
    yield from listening("loraplex.request")


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_names_the_replicas_that_a_request_was_sent_to(
    make_api: Callable[..., Api], lines: Lines, stream: bool
) -> None:
    members = Members([])

    def script(request: Any) -> Any:
        for number in (2, 0, 2):
            members.sent(number)
        return says(TEXT)(request)

    api = make_api(script)
    assert api.post("/v1/chat/completions", CHAT | {"stream": stream}).status_code == 200
    assert lines.take()["replica"] == "2,0"
    assert members.num_sent == {2: 2, 0: 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_tokens_and_times(
    make_api: Callable[..., Api], lines: Lines, stream: bool
) -> None:
    clock = ManualClock()
    first = says(TEXT, num_cached_tokens=2)

    def script(request: Any) -> Any:
        clock.advance(0.25)
        return first(request)

    api = make_api(script, clock=clock)
    response = api.post("/v1/chat/completions", CHAT | {"stream": stream, "n": 2, "max_tokens": 3})
    assert response.status_code == 200
    line = lines.take()
    completion_id = line.pop("id")
    assert completion_id in response.text
    assert line == {
        "level": "INFO",
        "message": "answered",
        "request_id": response.headers["x-request-id"],
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "model": "pirate",
        "version": "version-of-p",
        "prompt_tokens": line["prompt_tokens"],
        "cached_tokens": 2,
        "completion_tokens": 6,
        "choices": 2,
        "finish": "length:2",
        "ttft_ms": line["ttft_ms"],
        "total_ms": 500.0,
        "client": "127.0.0.1",
    }
    assert line["prompt_tokens"] > 2
    assert line["ttft_ms"] in (250.0, 500.0)  # the first of two choices, or both at once
    lines.assert_none()


def test_nothing_of_prompts_answers_or_keys_is_logged(make_api: Callable[..., Api], lines: Lines) -> None:
    api = make_api(api_keys=("sesame",))
    headers = {"Authorization": "Bearer sesame"}
    secret = "the treasure is under the oak"
    for body in (
        {"model": "pirate", "messages": [{"role": "user", "content": secret}]},
        {"model": "pirate", "messages": [{"role": secret, "content": "x"}]},
        {"model": "pirate", "messages": USER, "stop": 5, "user": secret},
    ):
        api.post(f"/v1/chat/completions?api_key={secret}", body, headers=headers)
    api.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer open"})
    assert len(lines.text.splitlines()) == 4
    for word in ("treasure", "Hello", "sesame", "open"):
        assert word not in lines.text


def test_time_to_first_token_begins_when_the_request_arrives(
    make_api: Callable[..., Api], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not begin after the body was received and the prompt encoded, since a client waits for that
    too."""
    clock = ManualClock()
    api = make_api(clock=clock)
    tokenizer = api.served.deps.text.tokenizer
    encode_many = tokenizer.encode_many

    async def slow_body() -> AsyncIterator[bytes]:
        clock.advance(2.0)
        yield json.dumps({"model": "base", "prompt": "hi", "max_tokens": 2}).encode()

    def slow_encode(*args: Any, **options: Any) -> list[list[int]]:
        clock.advance(1.0)
        return encode_many(*args, **options)

    monkeypatch.setattr(tokenizer, "encode_many", slow_encode)
    assert api.post("/v1/completions", content=slow_body()).status_code == 200
    line = lines.take()
    assert (line["ttft_ms"], line["total_ms"]) == (3000.0, 3000.0)
    assert api.served.deps.metrics.ttft.total == 3.0
    assert api.served.deps.metrics.e2e.total == 3.0


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/chat/completions", {"content": b"{"}, 400, "InvalidRequestError"),
        ("/v1/chat/completions", {"json": CHAT | {"model": "nobody"}}, 404, "UnknownModelError"),
        ("/v1/completions", {"content": b"x" * 2000}, 413, "BodyTooLargeError"),
        ("/v1/load_lora_adapter", {"content": b"{"}, 400, "InvalidRequestError"),
    ],
)
def test_refused_requests_have_a_line(
    make_api: Callable[..., Api], lines: Lines, path: str, body: dict[str, Any], status: int, error: str
) -> None:
    api = make_api(limits=BodyLimits(max_body_bytes=1000))
    response = api.request("POST", path, **body)
    assert response.status_code == status
    line = lines.take()
    assert (line["level"], line["message"], line["status"]) == ("INFO", "refused", status)
    assert (line["route"], line["error"]) == (path, error)
    assert line["request_id"] == response.headers["x-request-id"]


def test_a_request_without_a_key_has_a_line_and_one_with_it_names_its_kind(
    make_api: Callable[..., Api], lines: Lines
) -> None:
    api = make_api(api_keys=("key",))
    assert api.get("/v1/models").headers["x-request-id"]
    line = lines.take()
    assert (line["message"], line["status"], "key" in line) == ("refused", 401, False)
    assert line["error"] == "UnauthorizedError"
    api.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer key"})
    assert lines.take()["key"] == "api"


def test_routes_that_are_asked_all_the_time_are_logged_when_debugging(api: Api, lines: Lines) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
        api.get(path)
    lines.assert_none()
    logging.getLogger("loraplex.request").setLevel(logging.DEBUG)
    api.get("/health")
    line = lines.take()
    assert (line["level"], line["route"], line["status"]) == ("DEBUG", "/health", 200)


def test_a_bug_has_a_line_and_its_answer_an_id(
    api: Api, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(api.served.deps.adapters, "lease", broken)

    response = api.post("/v1/chat/completions", CHAT)
    line = lines.take()
    assert (line["level"], line["message"], line["status"]) == ("WARNING", "failed", 500)
    assert line["error"] == "ZeroDivisionError"
    assert line["request_id"] == response.headers["x-request-id"]
    assert "secret" not in lines.text


def test_an_engine_that_is_down_fails_the_request(api: Api, lines: Lines) -> None:
    api.served.engine.dead = True
    assert api.post("/v1/chat/completions", CHAT).status_code == 503
    line = lines.take()
    assert (line["level"], line["message"], line["status"]) == ("WARNING", "failed", 503)
    assert (line["error"], line["finish"]) == ("EngineDeadError", "error")


def test_a_stream_that_fails_after_its_status_was_sent_is_logged_as_failed(
    make_api: Callable[..., Api], lines: Lines
) -> None:
    api = make_api(says(TEXT, fail_after=2, failure=EngineDeadError("the engine died")))
    assert api.post("/v1/chat/completions", CHAT | {"stream": True}).status_code == 200
    line = lines.take()
    assert (line["level"], line["message"], line["status"]) == ("WARNING", "failed", 200)
    assert (line["error"], line["finish"], line["completion_tokens"]) == ("EngineDeadError", "error", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_shutdown_ends_is_logged_as_cancelled(
    make_api: Callable[..., Api], lines: Lines, stream: bool
) -> None:
    api = make_api(says(TEXT, fail_after=2, failure=EngineClosedError("the server is shutting down")))
    response = api.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == (200 if stream else 503)
    body = response.text.rpartition("data: ")[2]
    assert json.loads(body)["error"] == {
        "message": "the server is shutting down",
        "type": "server_error",
        "param": None,
        "code": "shutting_down",
    }
    line = lines.take()
    assert (line["level"], line["message"]) == ("INFO", "cancelled")
    assert (line["error"], line["finish"], line["completion_tokens"]) == ("EngineClosedError", "cancelled", 2)


@pytest.mark.parametrize("pause_after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_logged_as_499(
    make_served: Callable[..., Served], lines: Lines, stream: bool, pause_after: int
) -> None:
    served = make_served(says(TEXT, pause_after=pause_after))
    with live(served) as url:
        connection = connect(url)
        connection.sendall(request_bytes("/v1/chat/completions", CHAT | {"stream": stream}))
        assert served.engine.was_paused.wait(30)
        connection.close()
        line = lines.take()
    assert (line["level"], line["message"], line["status"]) == ("INFO", "cancelled", 499)
    assert (line["finish"], line["completion_tokens"]) == ("cancelled", pause_after)
    assert ("ttft_ms" in line) == (pause_after > 0)


def test_a_client_that_hangs_up_in_the_middle_of_the_body_is_logged(
    make_served: Callable[..., Served], lines: Lines
) -> None:
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(request_bytes("/v1/chat/completions", CHAT)[:-5])
        connection.shutdown(socket.SHUT_WR)
        line = lines.take()
    assert (line["status"], line["route"]) == (499, "/v1/chat/completions")


@pytest.mark.parametrize(("stream", "status"), [(False, 503), (True, 200)])
def test_a_request_that_a_shutdown_cancels_has_a_line(
    make_served: Callable[..., Served], lines: Lines, stream: bool, status: int
) -> None:
    served = make_served(says(TEXT, pause_after=2))
    with live(served) as url:
        connection = connect(url)
        connection.sendall(request_bytes("/v1/chat/completions", CHAT | {"stream": stream}))
        assert served.engine.was_paused.wait(30)
    line = lines.take()
    connection.close()
    assert (line["message"], line["status"], line["finish"]) == ("cancelled", status, "cancelled")


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "00-4bf92f3577b34da6a3ce929d0e0e4736-01", "a/b:c@d"])
def test_a_sane_request_id_is_taken_over(api: Api, lines: Lines, given: str) -> None:
    response = api.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": given})
    assert response.headers.get_list("x-request-id") == [given]
    assert lines.take()["request_id"] == given
    assert response.json()["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", b"\xff", "a\tb", 'a"b', "<script>"])
def test_any_other_request_id_is_replaced(api: Api, lines: Lines, given: Any) -> None:
    response = api.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": given})
    found = response.headers["x-request-id"]
    assert found.startswith("req-")
    assert lines.take()["request_id"] == found


def test_every_response_has_an_id_and_no_two_share_one(api: Api) -> None:
    responses = [
        api.get("/health"),
        api.get("/metrics"),
        api.get("/nowhere"),
        api.request("PUT", "/v1/models"),
        api.post("/v1/chat/completions", CHAT | {"stream": True}),
        api.post("/v1/chat/completions", {}),
    ]
    ids = {response.headers["x-request-id"] for response in responses}
    assert len(ids) == len(responses)


def test_the_openai_client_finds_the_request_id(make_served: Callable[..., Served]) -> None:
    headers = {"X-Request-Id": "mine"}
    with live(make_served()) as url, client_of(url) as client:
        answer = client.chat.completions.create(model="base", messages=USER, extra_headers=headers)
        assert answer._request_id == "mine"
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nobody", messages=USER, extra_headers=headers)
        assert caught.value.request_id == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_the_version_that_answered_is_a_header(api: Api, stream: bool) -> None:
    path, name = "/v1/chat/completions", "x-loraplex-adapter-version"
    assert api.post(path, CHAT | {"stream": stream}).headers[name] == "version-of-pirate"
    assert name not in api.post(path, CHAT | {"model": "base", "stream": stream}).headers
    assert name not in api.post(path, CHAT | {"model": "nobody", "stream": stream}).headers


def test_names_cannot_forge_lines(api: Api, lines: Lines) -> None:
    forged = "x\n2026-11-16 12:31:02 INFO request: answered\x1b[2K"
    api.post("/v1/chat/completions", CHAT | {"model": forged})
    assert len(lines.text.splitlines()) == 1
    assert "\x1b" not in lines.text
    api.post("/v1/chat/completions", CHAT | {"model": "x" * 5000})
    assert len(lines.text) < 1500


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    tiny.save_adapter(folder / "adapters" / "one", base, rank=4)
    (folder / "adapters" / "broken").mkdir()
    (folder / "adapters" / "broken" / "adapter_config.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_a_server_writes_json_lines_of_all_its_processes_to_stderr(
    model_folder: Path, tmp_path: Path
) -> None:
    command = [*COMMAND, "serve", "--model", f"{model_folder}/", "--port", "0"]
    options = ["--adapters", str(model_folder / "adapters"), "--kv-memory", "4MiB", "--log-format", "json"]
    with (
        open(tmp_path / "log", "w+") as log,
        subprocess.Popen(
            [*command, *options, "--state-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if "ready at " in line)
            url = ready.split("ready at ")[1].strip().removesuffix("/v1")
            # The engine reads weights at their first use, and warns when they are gone.
            (model_folder / "adapters" / "one" / "adapter_model.safetensors").unlink()
            models = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
            assert models == [model_folder.name, "one"]
            # The path that the server was started with is not shown, but accepted.
            for name in (model_folder.name, str(model_folder)):
                body = {"model": name, "prompt": "the dog", "max_tokens": 2, "ignore_eos": True}
                assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            body |= {"model": f"{model_folder}:one"}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).is_error
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
        log.seek(0)
        found = [json.loads(line) for line in log]
    requests = [line for line in found if line["logger"] == "loraplex.request"]
    assert [(line["model"], line["status"]) for line in requests] == [
        (model_folder.name, 200),
        (str(model_folder), 200),
        (f"{model_folder}:one", 400),
    ]
    assert [line["completion_tokens"] for line in requests] == [2, 2, 0]
    [left_out] = [line for line in found if "'broken' is not served" in line["message"]]
    assert (left_out["level"], left_out["process"]) == ("WARNING", "server")
    assert any(line["process"] == "engine" and line["level"] == "WARNING" for line in found)
    assert "the dog" not in json.dumps(found)


@pytest.mark.parametrize("options", [["--log-level", "loud"], ["--log-format", "xml"]])
def test_unknown_levels_and_formats_are_refused(options: list[str]) -> None:
    done = run_command("demo", *options)
    assert done.returncode == 2
    assert options[0] in done.stderr
