"""Traces of a real server, received by an OTLP collector in this process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest
import tiny
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from server_process import run_command, serving
from serving_fakes import hf_tokenizer
from trace_collector import SOON, Collector, collecting, values

from loraplex.core.clock import MonotonicClock
from loraplex.core.errors import OptionError, UserError
from loraplex.server import trace_setup
from loraplex.server.trace_setup import parse_endpoint, traces_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def running(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    folder = tmp_path_factory.mktemp("model")
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    tiny.save_adapter(folder / "adapters" / "one", base, rank=4)
    options = ("--adapters", str(folder / "adapters"), "--otlp-endpoint", collector.url)
    state = ("--state-dir", str(tmp_path_factory.mktemp("state")))
    with serving(folder, *options, *state, environment=SOON) as (process, url, _):
        yield process, url


def test_a_streamed_request_is_a_part_of_its_clients_trace(
    running: tuple[subprocess.Popen[str], str], collector: Collector
) -> None:
    client = openai.OpenAI(base_url=f"{running[1]}/v1", api_key="none", max_retries=0)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "other=1", "X-Request-Id": "streamed"}
    answer = client.completions.create(
        model="one", prompt="the dog", max_tokens=8, stream=True, extra_headers=headers,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    completion_id = [chunk.id for chunk in answer][-1]

    root, phases = collector.trace_of("streamed")
    assert (root.name, root.kind) == ("POST /v1/completions", Span.SPAN_KIND_SERVER)
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "other=1")
    assert set(phases) == {"queue", "adapter load", "prefill", "decode"}
    assert {each.trace_id.hex() for each in phases.values()} == {TRACE}
    begins_ends = {
        name: (each.start_time_unix_nano, each.end_time_unix_nano) for name, each in phases.items()
    }
    begin, end = root.start_time_unix_nano, root.end_time_unix_nano
    assert all(begin <= first <= last <= end for first, last in begins_ends.values())
    assert begins_ends["queue"][1] == begins_ends["prefill"][0]
    assert begins_ends["prefill"][1] == begins_ends["decode"][0]
    assert begins_ends["adapter load"][0] >= begins_ends["queue"][0]
    found = values(root)
    assert found["gen_ai.request.model"] == "one"
    assert found["gen_ai.response.id"] == completion_id
    assert (found["gen_ai.usage.output_tokens"], found["http.response.status_code"]) == (8, 200)
    assert len(found["loraplex.version"]) == 12
    assert "127.0.0.1" not in map(str, found.values())
    assert (collector.service["service.name"], root.status.code) == ("loraplex", 0)


def test_a_request_for_the_base_model_begins_a_trace_without_a_load(
    running: tuple[subprocess.Popen[str], str], collector: Collector
) -> None:
    for number, traceparent in enumerate(({}, {"traceparent": "00-zz-yy-01"}, {"traceparent": "x" * 5000})):
        body = {"model": "tiny", "prompt": ["the dog", "a cat"], "n": 2, "max_tokens": 3, "ignore_eos": True}
        headers = {"X-Request-Id": f"whole-{number}", **traceparent}
        assert httpx.post(f"{running[1]}/v1/completions", json=body, headers=headers, timeout=60).is_success
        root, phases = collector.trace_of(f"whole-{number}")
        assert not root.parent_span_id
        assert set(phases) == {"queue", "prefill", "decode"}
        assert values(root)["gen_ai.usage.output_tokens"] == 12


def test_refusals_are_traced_and_unsampled_requests_are_not(
    running: tuple[subprocess.Popen[str], str], collector: Collector
) -> None:
    def ask(name: str, **headers: str) -> int:
        body = {"model": name, "prompt": "the dog", "max_tokens": 1}
        return httpx.post(f"{running[1]}/v1/completions", json=body, headers=headers, timeout=60).status_code

    assert ask("tiny", **{"traceparent": f"00-{TRACE}-{PARENT}-00", "X-Request-Id": "unsampled"}) == 200
    assert ask("nobody", **{"X-Request-Id": "refused"}) == 404
    root, phases = collector.trace_of("refused")
    assert (values(root)["http.response.status_code"], phases) == (404, {})
    assert not [each for each in collector.spans if values(each).get("loraplex.request_id") == "unsampled"]


def test_requests_are_served_and_the_server_ends_while_the_collector_is_away(
    running: tuple[subprocess.Popen[str], str], collector: Collector
) -> None:
    """The last test of this module: the collector stays away."""
    process, url = running
    collector.server.shutdown()
    collector.server.server_close()
    body = {"model": "one", "prompt": "the dog", "max_tokens": 2}
    for _ in range(20):
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_nothing_is_imported_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in trace_setup._ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert traces_of(None, MonotonicClock()) is None
    program = (
        "import sys, loraplex.server.run, loraplex.server.app; "
        "print([each for each in sys.modules if each.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_variables_of_opentelemetry_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    traces = traces_of(None, MonotonicClock())
    assert traces is not None
    traces.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traces_of(None, MonotonicClock()) is None


def test_without_the_extra_the_option_is_refused_and_a_variable_is_only_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "loraplex.server.traces", None)
    with pytest.raises(UserError, match=r"--otlp-endpoint: .*pip install 'loraplex\[otel\]'"):
        traces_of("http://127.0.0.1:1", MonotonicClock())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert traces_of(None, MonotonicClock()) is None
    assert "pip install 'loraplex[otel]'" in caplog.text


@pytest.mark.parametrize(
    "url", ["collector:4318", "ftp://x", "http://", "http://[x", "http://x:4317", "http://x?y"]
)
def test_a_wrong_endpoint_is_refused(url: str) -> None:
    with pytest.raises(OptionError):
        parse_endpoint(url)


def test_the_option_says_what_to_write() -> None:
    done = run_command("serve", "m", "--otlp-endpoint", "collector:4318")
    assert done.returncode == 2
    assert (
        "--otlp-endpoint: 'collector:4318' is no URL of a collector; write http://collector:4318"
        in done.stderr
    )


def test_an_endpoint_may_have_a_path() -> None:
    assert parse_endpoint("https://x.example.com/otlp") == "https://x.example.com/otlp"


def test_a_collector_ends_with_the_test_that_fails() -> None:
    with pytest.raises(RuntimeError, match="the test"), collecting() as found:
        raise RuntimeError("the test")
    assert found.server.socket.fileno() == -1
