"""Web pages of other sites are kept away; everybody else gets through."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_fixtures import Api, Served, live

from loraplex.server.addresses import AddressSyntaxError, parse_allowed_host, parse_allowed_origin
from loraplex.server.banner import Announcer
from loraplex.server.web_guard import WebAccess

EVIL = "https://evil.example"
APP = "https://chat.example.com"


def served_names(api: Api) -> set[str]:
    return {adapter.name for adapter in api.served.service.served()}


def host_status(api: Api, host: str, path: str = "/v1/models") -> int:
    return api.get(path, headers={"Host": host}).status_code


def answer_to(url: str, request: str) -> tuple[int, bytes]:
    """Send bytes that no client library would, and read the whole answer."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=30) as connection:
        connection.sendall(request.encode())
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"},
        {"Origin": EVIL, "Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},
        {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Origin": "127.0.0.1"},
    ],
)
def test_a_page_of_another_site_changes_nothing(api: Api, headers: dict[str, str]) -> None:
    before = served_names(api)
    answer = api.request(
        "POST",
        "/v1/unload_lora_adapter",
        content=b'{"lora_name": "pirate"}',
        headers={"Content-Type": "text/plain", **headers},
    )
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "origin_not_allowed")
    assert "--allowed-origins" in error["message"]
    assert served_names(api) == before


def test_two_origins_are_no_origin(api: Api) -> None:
    headers = [("Origin", "http://127.0.0.1"), ("Origin", EVIL)]
    assert api.get("/v1/models", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1:80"},
        {"Origin": "https://localhost", "Host": "LOCALHOST"},
        {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"},
        {"Origin": "https://ui.example", "Sec-Fetch-Site": "same-origin"},  # behind a proxy that sets Host
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    ],
)
def test_own_pages_links_and_other_programs_get_through(api: Api, headers: dict[str, str]) -> None:
    assert api.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "localhost.", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "[::1]",
     "[::ffff:127.0.0.1]:1"],
)  # fmt: skip
def test_loopback_is_known_by_all_its_names(api: Api, host: str) -> None:
    assert host_status(api, host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.5",
     "[2001:db8::1]:8000", "127.1", "notlocalhost"],
)  # fmt: skip
def test_a_name_that_was_rebound_to_this_server_is_refused(api: Api, host: str) -> None:
    answer = api.get("/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(
    "host", ["", "a b", "user@localhost", "localhost:port", "[::1", "[localhost]", "a/b"]
)
def test_a_host_that_is_none_is_a_bad_request(api: Api, host: str) -> None:
    answer = api.get("/v1/models", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_host")


def test_health_is_answered_by_address_but_not_by_any_name(api: Api) -> None:
    assert host_status(api, "10.0.0.5:8000", "/health") == 200
    assert host_status(api, "evil.example", "/health") == 403
    assert host_status(api, "10.0.0.5:8000", "/healthy") == 403


@pytest.mark.parametrize(
    ("bound", "allowed", "yes", "no"),
    [
        ("0.0.0.0", (), ["10.0.0.5", "[2001:db8::1]:80", "localhost"], ["box.lan"]),
        ("::", (), ["10.0.0.5", "[2001:db8::1]"], ["box.lan"]),
        ("10.0.0.5", (), ["10.0.0.5:8000", "127.0.0.1"], ["10.0.0.6", "box.lan"]),
        ("2001:DB8:0::1", (), ["[2001:db8::1]:8000"], ["[2001:db8::2]"]),
        ("box.lan", (), ["BOX.lan:8000", "10.0.0.5"], ["fox.lan"]),
        ("localhost", (), ["localhost"], ["10.0.0.5"]),
        ("0.0.0.0", ("*.example.com", "box"), ["api.example.com", "box:1", "a.b.example.com."],
         ["example.com", "evilexample.com", "example.com.evil"]),
        ("127.0.0.1", ("*",), ["anything.example"], []),
    ],
)  # fmt: skip
def test_the_address_bound_to_and_configured_names_are_answered_to(
    make_api: Callable[..., Api], bound: str, allowed: tuple[str, ...], yes: list[str], no: list[str]
) -> None:
    api = make_api(web=WebAccess(bound_host=bound, allowed_hosts=allowed))
    assert {host: host_status(api, host) for host in [*yes, *no]} == dict.fromkeys(yes, 200) | dict.fromkeys(
        no, 403
    )


def test_an_allowed_page_gets_what_its_browser_asks_for(make_api: Callable[..., Api]) -> None:
    api = make_api(web=WebAccess(allowed_origins=(APP,)), api_keys=("secret",))
    preflight = api.request(
        "OPTIONS",
        "/v1/chat/completions",
        headers={
            "Origin": APP,
            "Sec-Fetch-Site": "cross-site",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == APP
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    headers = {"Origin": APP, "Sec-Fetch-Site": "cross-site"}
    answer = api.get("/v1/models", headers={**headers, "Authorization": "Bearer secret"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    # A page can show its user the error only if it may read it.
    refused = api.get("/v1/models", headers=headers)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)
    other = api.request(
        "OPTIONS", "/v1/models", headers={"Origin": EVIL, "Access-Control-Request-Method": "GET"}
    )
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def test_a_star_allows_every_page(make_api: Callable[..., Api]) -> None:
    api = make_api(web=WebAccess(allowed_origins=("*",)))
    for origin in (EVIL, APP):
        answer = api.get("/v1/models", headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_an_allowed_origin_does_not_open_other_names(make_api: Callable[..., Api]) -> None:
    api = make_api(web=WebAccess(allowed_origins=("*",)))
    assert host_status(api, "evil.example") == 403


def test_requests_without_or_with_two_hosts(make_served: Callable[..., Served]) -> None:
    with live(make_served()) as url:
        close = "Connection: close\r\n\r\n"
        assert answer_to(url, "GET /health HTTP/1.0\r\n\r\n")[0] == 200
        assert answer_to(url, f"GET /health HTTP/1.1\r\n{close}")[0] == 400
        two = "Host: localhost\r\nHost: evil.example\r\n"
        assert answer_to(url, f"GET /v1/models HTTP/1.1\r\n{two}{close}")[0] == 400
        assert answer_to(url, f"GET /v1/models HTTP/1.0\r\nHost: evil.example\r\n{close}")[0] == 403
        # The target of a proxy request does not replace Host.
        target = f"GET http://localhost/v1/models HTTP/1.1\r\nHost: evil.example\r\n{close}"
        assert answer_to(url, target)[0] == 403


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_lines_of_the_banner_work(
    make_served: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    with live(make_served()) as url:
        host, port = urlsplit(url).hostname, urlsplit(url).port
        assert host is not None
        assert port is not None
        Announcer().ready(
            host=host, port=port, base_model="base", adapters=["pirate"], num_skipped=0, needs_key=False,
            has_chat=True,
        )  # fmt: skip
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "curl " in line]
        assert len(lines) == 2
        for line in lines:
            done = subprocess.run([*shlex.split(line), "-s"], capture_output=True, timeout=60, check=True)
            answer: dict[str, Any] = json.loads(done.stdout)
            assert answer["object"] == "chat.completion"


@pytest.mark.parametrize("text", ["http://x", "x:80", "x/y", "", "a b", "*.*", "[::1]:8000"])
def test_options_that_name_no_host_are_refused(text: str) -> None:
    with pytest.raises(AddressSyntaxError, match="is not a host name"):
        parse_allowed_host(text)


@pytest.mark.parametrize(
    "text", ["chat.example.com", "null", "https://x/path", "https://", "", "https://a b"]
)
def test_options_that_name_no_origin_are_refused(text: str) -> None:
    with pytest.raises(AddressSyntaxError, match="is not an origin"):
        parse_allowed_origin(text)


def test_options_are_brought_into_the_form_of_requests() -> None:
    assert [parse_allowed_host(text) for text in ("API.Example.com.", "[::1]", "*", "*.x.y")] == [
        "api.example.com",
        "::1",
        "*",
        "*.x.y",
    ]
    assert [
        parse_allowed_origin(text)
        for text in ("HTTPS://Chat.Example.com:443/", "http://localhost:3000", "*", "http://[::1]:80")
    ] == ["https://chat.example.com", "http://localhost:3000", "*", "http://[::1]"]
