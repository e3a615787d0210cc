"""Tenants of a server: what each may use and change, and that none learns of the others."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import json
import logging
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from log_lines import Lines
from server_fixtures import USER, Api, Served, events, live, write_adapter
from serving_fakes import Script, says
from tenant_reader import (
    MODELS,
    NAMES,
    Reader,
    as_tenant,
    begin_batch,
    chat,
    check_answers,
    run_batch,
    serve_tools,
    tenants_file,
)

import loraplex
from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError, InvalidRequestError
from loraplex.core.request import EngineRequest
from loraplex.core.tenants import BATCH_PRIORITY, Caller
from loraplex.server.errors import QueueFullError
from loraplex.server.waiting import WaitingLimits


@pytest.fixture
def api(make_api: Callable[..., Api], tmp_path: Path) -> Api:
    for folder in ("acme/new", "globex/new"):
        write_adapter(tmp_path / folder)
    return make_api(tenants=tenants_file(tmp_path), names=NAMES, allowed=[tmp_path], admin_keys=("root",))


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer ", "Bearer  ", "Basic acme-key", "acme-key", "Bearer ACME-KEY",
        "Bearer acme-key2", "Bearer acme", "Bearer acme-key acme-key", f"Bearer {'x' * 60_000}",
        "Bearer " + hashlib.sha256(b"acme-key").hexdigest(),
    ],
)  # fmt: skip
def test_nobody_without_a_valid_key_gets_in_from_this_machine_either(api: Api, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/load_lora_adapter")):
        answer = api.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert api.get("/health", headers=headers).status_code == 200


def test_a_tenant_uses_its_adapters_and_sees_no_others(api: Api) -> None:
    shown = {
        name: [model["id"] for model in api.get("/v1/models", headers=as_tenant(name)).json()["data"]]
        for name in ("acme", "globex", "ops", "prometheus")
    }
    assert shown == {
        "acme": ["base", "acme-chat", "acme-code", "shared-poet"],
        "globex": ["globex-chat", "globex-secret", "shared-poet"],
        "ops": ["base", *NAMES],
        "prometheus": [],
    }
    for name, models in shown.items():
        for model in ("base", *NAMES, *(f"base:{each}" for each in NAMES)):
            is_there = model.removeprefix("base:") in models
            assert (chat(api, name, model, max_tokens=2).status_code == 200) == is_there
            found = api.get(f"/v1/models/{model}", headers=as_tenant(name)).status_code
            assert found == (200 if is_there else 404)
            body = {"model": model, "prompt": "hi"}
            answer = api.post("/tokenize", body, headers=as_tenant(name))
            assert (answer.status_code == 200) == is_there


def test_a_hidden_adapter_is_answered_as_one_that_is_not_there(api: Api) -> None:
    hidden, absent = "globex-secret", "globex-absent"
    for call in (
        lambda name: chat(api, "acme", name),
        lambda name: chat(api, "acme", f"base:{name}"),
        lambda name: api.get(f"/v1/models/{name}", headers=as_tenant("acme")),
        lambda name: api.post("/detokenize", {"model": name, "tokens": []}, headers=as_tenant("acme")),
        *(
            lambda name, path=path: api.post(
                f"/v1/{path}_lora_adapter", {"lora_name": name, "lora_path": "x"}, headers=as_tenant("acme")
            )
            for path in ("load", "unload", "promote", "abort", "rollback")
        ),
    ):
        there, not_there = call(hidden), call(absent)
        assert there.status_code == not_there.status_code
        assert there.text == not_there.text.replace(absent, hidden)


def test_no_answer_names_anything_of_another_tenant(api: Api, tmp_path: Path) -> None:
    for model in NAMES:
        assert chat(api, "ops", model, max_tokens=2).status_code == 200
    chat(api, "globex", "globex-secret")
    serve_tools(api)
    theirs = run_batch(api, "globex", ["globex-secret", "globex-lost"])
    mine = run_batch(api, "acme", MODELS)
    assert (len(theirs.files), len(mine.files)) == (3, 3), "input, output and errors"
    mine.batches.append(begin_batch(api, "acme", mine.files[0]))
    reader = Reader(api, "acme", tmp_path, own=mine, others=theirs)
    answers = reader.ask_all()
    statuses = {answer.status_code for _, answer in answers}
    assert {200, 400, 403, 404, 405} <= statuses
    assert max(statuses) < 500
    accepted = {path for path, status in reader.statuses if status == 200}
    only_canaries = {f"post /v1/{change}_lora_adapter" for change in ("promote", "abort", "rollback")}
    assert reader.documented - accepted == {*only_canaries, "get /v1/demand"}, "nothing else stays unread"
    served = {adapter.name for adapter in api.served.service.served()}
    assert "acme-new" in served, "its own load works"
    check_answers(answers, theirs)
    shown = {each["name"]: each for each in api.get("/v1/adapters", headers=as_tenant("acme")).json()["data"]}
    assert (shown["shared-poet"]["requests"], shown["acme-code"]["requests"] > 1) == (None, True)
    assert {each["path"] for each in shown.values()} == {None}


def test_no_live_request_of_a_tenant_passes_for_a_line_of_a_batch(api: Api) -> None:
    for priority, status in ((BATCH_PRIORITY - 1, 200), (BATCH_PRIORITY, 400), (2**31 - 1, 400)):
        body = {"model": "acme-chat", "prompt": "a", "max_tokens": 1, "priority": priority}
        answer = api.post("/v1/completions", body, headers=as_tenant("acme"))
        assert answer.status_code == status, answer.text
        if status == 400:
            assert answer.json()["error"]["param"] == "priority"
            assert "lower one than 1,073,741,824" in answer.json()["error"]["message"]


def test_suggestions_name_what_the_tenant_may_use(api: Api) -> None:
    message = chat(api, "acme", "globex-chatt").json()["error"]["message"]
    assert "globex-chatt" in message
    assert "globex-chat'" not in message
    assert "did you mean 'globex-chat'" in chat(api, "globex", "globex-chatt").json()["error"]["message"]
    assert "did you mean 'base'" not in chat(api, "globex", "bas").json()["error"]["message"]
    near = api.post("/v1/unload_lora_adapter", {"lora_name": "acme-cod"}, headers=as_tenant("acme"))
    assert "did you mean 'acme-code'" in near.json()["error"]["message"]


def test_the_right_to_change_adapters_is_apart_from_the_right_to_use_them(api: Api, tmp_path: Path) -> None:
    def load(tenant: str, name: str, folder: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(tmp_path / folder)}
        return api.post("/v1/load_lora_adapter", body, headers=as_tenant(tenant))

    for tenant, name, folder, status, told in (
        ("globex", "globex-new", "globex/new", 403, "may not change adapters"),
        ("prometheus", "x", "globex/new", 403, "may not change adapters"),
        ("acme", "globex-new", "acme/new", 403, "named 'acme-*' only"),
        ("acme", "shared-poet", "acme/new", 403, "named 'acme-*' only"),
        ("acme", "acme-new", "globex/new", 403, "`load_from`"),
        ("acme", "acme-new", "acme/new", 200, "acme-new"),
        ("ops", "globex-new", "globex/new", 200, "globex-new"),
        ("root", "root-new", "globex/new", 200, "root-new"),
    ):
        if tenant == "root":
            body = {"lora_name": name, "lora_path": str(tmp_path / folder)}
            answer = api.post("/v1/load_lora_adapter", body, headers={"Authorization": "Bearer root"})
        else:
            answer = load(tenant, name, folder)
        assert (answer.status_code, told in answer.text) == (status, True), answer.text
    (tmp_path / "acme" / "link").symlink_to(tmp_path / "globex" / "new")
    assert load("acme", "acme-link", "acme/link").status_code == 403
    unload = {"lora_name": "acme-new"}
    for tenant, status in (("globex", 403), ("prometheus", 403), ("acme", 200)):
        answer = api.post("/v1/unload_lora_adapter", unload, headers=as_tenant(tenant))
        assert answer.status_code == status


def test_only_operators_see_what_is_about_everybody(api: Api) -> None:
    chat(api, "globex", "globex-secret", max_tokens=2)
    for path in ("/v1/demand",):
        assert api.get(path, headers=as_tenant("acme")).json()["error"]["code"] == "operator_only"
        assert api.get(path, headers=as_tenant("ops")).status_code == 200
    pages = {
        name: api.get("/metrics", headers=as_tenant(name)).text for name in ("acme", "ops", "prometheus")
    }
    assert 'loraplex:tenant_requests_total{tenant="acme"} 0' in pages["acme"]
    assert "globex" not in pages["acme"]
    assert "vllm:" not in pages["acme"]
    for name in ("ops", "prometheus"):
        assert 'loraplex:tenant_requests_total{tenant="globex"} 1' in pages[name]
        assert 'adapter="globex-secret"' in pages[name]
        assert "loraplex:tenants_file_in_force 1" in pages[name]
    own = api.get("/v1/tenants", headers=as_tenant("acme")).json()
    assert [tenant["name"] for tenant in own["data"]] == ["acme"]
    everyone = api.get("/v1/tenants", headers=as_tenant("ops")).json()
    assert len(everyone["data"]) == 4
    assert next(tenant["requests"] for tenant in everyone["data"] if tenant["name"] == "globex") == 1


def test_the_cache_is_apart_and_requests_carry_their_tenant(make_api: Callable[..., Api]) -> None:
    text = tenants_file() + "\n[adapters.acme-chat]\nslo_ttft = 0.25\n"
    mine = "m" * 256
    own = f"/{hashlib.sha256(mine.encode()).hexdigest()}"
    for shares, salts in ((False, ["acme", f"acme{own}", "ops", ""]), (True, ["", own, "", ""])):
        start = f"share_prefix_cache = {str(shares).lower()}\n"
        api = make_api(tenants=start + text, admin_keys=("root",), names=NAMES)
        chat(api, "acme", "base", max_tokens=1)
        chat(api, "acme", "acme-chat", max_tokens=1, cache_salt=mine, priority=3)
        chat(api, "ops", "base", max_tokens=1)
        body = {"model": "base", "prompt": "x", "max_tokens": 1}
        api.post("/v1/completions", body, headers={"Authorization": "Bearer root"})
        asked = api.served.engine.requests
        assert [request.cache_salt for request in asked] == salts
        assert [(request.tenant, request.priority) for request in asked[1:]] == [
            ("acme", 3), ("ops", 0), ("", 0)
        ]  # fmt: skip
        assert [request.slo_ttft_s for request in asked] == [None, 0.25, None, None]
        api.served.service.registry.close()


def test_objectives_are_counted_by_tenant_and_by_adapter(make_api: Callable[..., Api]) -> None:
    slos = "\n[adapters.acme-chat]\nslo_ttft = 0.25\n[adapters.acme-code]\nslo_ttft = 1e-9\n"
    clock = ManualClock()

    def script(request: EngineRequest) -> Script:
        clock.advance(0.1)
        return Script(token_ids=[10, 11, 12])

    text = tenants_file(acme="slo_tpt = 0.05\n", globex="slo_ttft = 0.2\n") + slos
    api = make_api(script, tenants=text, names=NAMES, clock=clock)
    for name, model in (
        ("acme", "acme-chat"), ("acme", "acme-chat"), ("acme", "acme-code"), ("globex", "globex-chat")
    ):  # fmt: skip
        assert chat(api, name, model, max_tokens=3).status_code == 200
    page = api.get("/metrics", headers=as_tenant("prometheus")).text
    of_adapters = "loraplex:adapter_slo_requests_total"
    for adapter, result, target, count in (
        ("acme-chat", "attained", "ttft", 2), ("acme-chat", "missed", "ttft", 0),
        ("acme-code", "missed", "ttft", 1), ("acme-code", "attained", "tpt", 1),
        ("globex-chat", "attained", "ttft", 1), ("globex-chat", "attained", "tpt", 0),
    ):  # fmt: skip
        assert f'{of_adapters}{{adapter="{adapter}",result="{result}",target="{target}"}} {count}\n' in page
    own = api.get("/metrics", headers=as_tenant("acme")).text
    assert 'loraplex:tenant_slo_requests_total{result="missed",target="ttft",tenant="acme"} 1\n' in own
    assert of_adapters not in own
    (acme,) = api.get("/v1/tenants", headers=as_tenant("acme")).json()["data"]
    assert (acme["slo_ttft"], acme["slo_tpt"]) == (None, 0.05)
    assert acme["slo_requests"] == {
        "ttft": {"attained": 2, "missed": 1},
        "tpt": {"attained": 3, "missed": 0},
    }


def limits_of(answer: httpx.Response) -> dict[str, str]:
    start = "x-ratelimit-"
    return {name[len(start) :]: value for name, value in answer.headers.items() if name.startswith(start)}


def test_every_answer_has_the_limits_and_what_is_left(make_api: Callable[..., Api]) -> None:
    clock = ManualClock()
    text = tenants_file(acme="requests_per_minute = 3\ntokens_per_minute = 1000\n")
    api = make_api(says("a b c"), tenants=text, clock=clock, names=NAMES)
    first = chat(api, "acme", "acme-chat", max_tokens=10)
    used = first.json()["usage"]["total_tokens"]
    after = api.get("/v1/models", headers=as_tenant("acme"))
    assert limits_of(after) == {
        "limit-requests": "3", "remaining-requests": "2", "reset-requests": "1m1s",
        "limit-tokens": "1000", "remaining-tokens": str(1000 - used), "reset-tokens": "1m1s",
    }  # fmt: skip
    clock.advance(10.0)
    streamed = chat(api, "acme", "acme-chat", stream=True, max_tokens=10)
    assert limits_of(streamed)["remaining-requests"] == "1"
    events(streamed)
    missing = chat(api, "acme", "nothing")
    assert missing.status_code == 404
    assert limits_of(missing)["remaining-requests"] == "1", "it was never begun"
    assert limits_of(missing)["remaining-tokens"] == str(1000 - 2 * used)
    assert chat(api, "acme", "base", max_tokens=1).status_code == 200
    refused = chat(api, "acme", "base")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
    assert refused.headers["retry-after"] == "51"
    assert "3 requests per minute" in error["message"]
    assert limits_of(refused)["remaining-requests"] == "0"
    assert limits_of(chat(api, "globex", "globex-chat")) == {}, "it has no limits"
    clock.advance(51.0)
    assert chat(api, "acme", "base", max_tokens=1).status_code == 200


def test_without_tenants_the_headers_are_about_the_queue(make_api: Callable[..., Api]) -> None:
    api = make_api(waiting=WaitingLimits(max_requests=3, max_tokens=500))
    answer = api.post("/v1/completions", {"model": "base", "prompt": [1, 2], "n": 2, "max_tokens": 1})
    assert limits_of(answer) == {
        "limit-requests": "3", "remaining-requests": "3", "reset-requests": "0s",
        "limit-tokens": "500", "remaining-tokens": "500", "reset-tokens": "0s",
    }  # fmt: skip
    ticket = api.served.deps.waiting.admit(3)
    refused = api.post("/v1/completions", {"model": "base", "prompt": [1, 2], "max_tokens": 1})
    assert refused.status_code == 429
    assert limits_of(refused)["remaining-requests"] == "0"
    assert limits_of(refused)["reset-requests"] != "0s"
    ticket.close()


def test_what_the_server_could_not_take_is_not_counted(make_api: Callable[..., Api]) -> None:
    api = make_api(tenants=tenants_file(acme="requests_per_minute = 1\n"), names=NAMES)
    api.served.engine.dead = True
    assert chat(api, "acme", "base").status_code == 503
    api.served.engine.dead = False
    assert chat(api, "acme", "base", temperature=-1).status_code == 400
    assert chat(api, "acme", "base", max_tokens=1).status_code == 200
    assert chat(api, "acme", "base", max_tokens=1).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "left"),
    [(None, 1), (EngineDeadError("died"), 1), (InvalidRequestError("no", param="seed"), 0)],
)
def test_a_request_that_the_engine_fails_counts_if_it_was_wrong(
    make_api: Callable[..., Api], failure: Exception | None, left: int, stream: bool
) -> None:
    text = tenants_file(acme="requests_per_minute = 1\n")
    api = make_api(says("a b", fail_after=0, failure=failure), tenants=text, names=NAMES)
    chat(api, "acme", "base", stream=stream)
    found = api.get("/v1/models", headers=as_tenant("acme"))
    assert limits_of(found)["remaining-requests"] == str(left)


def test_a_client_that_leaves_is_counted(
    make_served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tenants_file(acme="requests_per_minute = 5\n")
    served = make_served(tenants=text, names=NAMES)
    encoding, left = threading.Event(), threading.Event()

    async def never(*given: Any, **options: Any) -> list[int]:
        encoding.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return []

    monkeypatch.setattr(served.deps.text.prompts, "encode_chat", never)
    with live(served) as url, httpx.Client(base_url=url, headers=as_tenant("acme")) as client:
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
            body = json.dumps({"model": "base", "messages": USER}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Authorization: Bearer acme-key\r\n\r\n".encode() + body)
            assert encoding.wait(30)
        assert left.wait(30)
        found = client.get("/v1/tenants").json()["data"][0]
        assert (found["requests"], limits_of(client.get("/v1/models"))["remaining-requests"]) == (1, "4")


def test_an_answer_begun_elsewhere_passes_no_limit_of_a_tenant(make_api: Callable[..., Api]) -> None:
    text = tenants_file(acme="tokens_per_minute = 1000\n")
    api = make_api(says("a b c"), tenants=text, names=NAMES, waiting=WaitingLimits(max_requests=1))
    body = {"model": "base", "prompt": [1, 2], "output_token_ids": [5] * 90, "max_tokens": 100}

    def send(name: str) -> httpx.Response:
        return api.post("/v1/completions", body, headers=as_tenant(name))

    held = api.served.deps.waiting.admit(1)
    assert [send(name).status_code for name in ("acme", "ops")] == [429, 200]
    held.close()
    generated = send("acme").json()["usage"]["completion_tokens"]
    after = api.get("/v1/models", headers=as_tenant("acme"))
    assert limits_of(after)["remaining-tokens"] == str(1000 - 2 - 90 - generated)


def test_the_official_client_reads_the_limits_and_a_stream_that_is_left_costs_what_came(
    make_served: Callable[..., Served],
) -> None:
    text = tenants_file(acme="tokens_per_minute = 10000\nmax_in_flight = 1\n")
    served = make_served(says("word " * 40, pause_after=5), tenants=text, names=NAMES)
    with (
        live(served) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="acme-key", max_retries=0) as client,
    ):
        stream = client.completions.create(model="acme-chat", prompt=[5, 6], max_tokens=200, stream=True)
        next(iter(stream))
        assert served.engine.was_paused.wait(30)
        with pytest.raises(openai.RateLimitError, match="1 choices in flight") as refused:
            client.completions.create(model="acme-chat", prompt="x")
        assert refused.value.response.headers["retry-after"] == "1"
        assert int(refused.value.response.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 2 - 200
        stream.close()
        assert served.engine.was_cancelled.wait(30)
        answer = client.models.with_raw_response.list()
        assert 10_000 - 2 - 40 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 10_000 - 2
        found = httpx.get(f"{url}/v1/tenants", headers=as_tenant("acme")).json()["data"][0]
        assert (found["in_flight"], found["prompt_tokens"], found["refused"]) == (0, 2, {"in_flight": 1})


def test_a_bad_file_shows_in_health_without_names(api: Api) -> None:
    assert api.served.deps.tenants is not None
    assert "message" not in api.get("/health").json()
    api.served.deps.tenants.trouble = "tenants.toml: [tenants.globex]: there is no option 'sahre'"
    health = api.get("/health")
    assert health.status_code == 200
    assert "before is in force" in health.json()["message"]
    assert "globex" not in health.text
    assert api.get("/v1/tenants", headers=as_tenant("acme")).json()["trouble"] is None
    assert "sahre" in api.get("/v1/tenants", headers=as_tenant("ops")).json()["trouble"]
    assert "loraplex:tenants_file_in_force 0" in api.get("/metrics", headers=as_tenant("ops")).text


def test_the_log_says_whose_request_it_was(api: Api) -> None:
    lines = Lines()
    logger = logging.getLogger("loraplex.request")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        chat(api, "acme", "acme-chat", max_tokens=1)
        line = lines.take()
        assert (line["tenant"], line["key"]) == ("acme", "tenant")
        assert "acme-key" not in lines.text
    finally:
        logger.removeHandler(lines)
        logger.setLevel(logging.NOTSET)


def test_no_route_looks_models_up_for_everybody() -> None:
    lookups = []
    for path in sorted((Path(loraplex.__file__).parent / "server").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.search(r"adapters\.(find|lease)$", ast.unparse(node.func)):
                lookups.append(path.name)
                assert "access" in ast.unparse(node), f"{path}:{node.lineno} must pass the sender's access"
    assert {"generation_routes.py", "model_routes.py", "utility_routes.py"} <= set(lookups)


def test_a_queue_full_of_one_tenant_has_places_for_others(make_api: Callable[..., Api]) -> None:
    api = make_api(tenants=tenants_file(), names=NAMES, waiting=WaitingLimits(max_requests=8))
    assert api.served.deps.tenants is not None
    api.served.deps.waiting.set_tenants(api.served.deps.tenants.policies())
    with contextlib.suppress(QueueFullError):
        while True:
            api.served.deps.waiting.admit(1, caller=Caller(tenant="globex"))
    refused = chat(api, "globex", "globex-chat", max_tokens=1)
    assert (refused.status_code, "kept for other tenants" in refused.text) == (429, True)
    assert "acme" not in refused.text
    page = api.get("/metrics", headers=as_tenant("globex")).text
    assert 'loraplex:tenant_refused_total{reason="queue_full",tenant="globex"} 2' in page
    assert 'loraplex:tenant_refused_total{reason="slo",tenant="globex"} 0' in page
    assert chat(api, "acme", "acme-chat", max_tokens=1).status_code == 200
