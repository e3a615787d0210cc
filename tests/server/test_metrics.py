from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fixtures import USER, Api, stored
from serving_fakes import Script, make_spec, says, tiny_tokenizer

from loraplex.core.batching import Batching
from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.server.adapter_metrics import MAX_NAMED
from loraplex.server.adapter_service import ServedAdapter
from loraplex.server.engine_status import EngineState, EngineStatus, ReplicaStatus
from loraplex.server.fleet.backend_metrics import parse_stats
from loraplex.server.metrics import Histogram, ServerMetrics
from loraplex.server.metrics_export import MetricsSnapshot, render_metrics
from loraplex.server.shadow_messages import Figures, Replayed
from loraplex.server.shadow_twin import TwinFigures
from loraplex.server.tenants.objective import Reached, Target
from loraplex.server.tenants.tenant_metrics import render_tenants

ROOT = Path(__file__).parents[2]


def samples(api: Api) -> dict[str, float]:
    """Return every sample of the page, keyed by its name and label values."""
    found = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            found[f"{sample.name}[{labels}]" if labels else sample.name] = sample.value
    return found


def chat(api: Api, model: str = "base") -> None:
    assert api.post("/v1/chat/completions", {"model": model, "messages": USER}).status_code == 200


def test_a_histogram_counts_into_the_right_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 6), ("+Inf", 7)]
    assert histogram.total == 12.0


def test_requests_and_tokens_are_counted(api: Api) -> None:
    chat(api)
    chat(api, "pirate")
    page = samples(api)
    num_tokens = len(tiny_tokenizer().encode("Hello world! How are you?")) + 1  # with the end token
    assert page["vllm:generation_tokens_total"] == 2 * num_tokens
    assert page["vllm:prompt_tokens_total"] == 2 * len(api.served.engine.requests[0].prompt_token_ids)
    assert page["vllm:request_success_total[stop]"] == 2
    assert page["vllm:request_success_total[length]"] == 0
    assert page["vllm:time_to_first_token_seconds_count"] == 2
    assert page["vllm:e2e_request_latency_seconds_count"] == 2
    assert page["vllm:inter_token_latency_seconds_count"] == 2 * (num_tokens - 1)
    assert page["loraplex:adapter_generation_tokens_total[pirate]"] == num_tokens
    assert page["loraplex:adapter_requests_total[pirate]"] == 1
    assert page["loraplex:adapter_ttft_seconds_count[pirate]"] == 1


def test_the_page_shows_keys_and_values_on_the_host(api: Api) -> None:
    page = samples(api)
    for name in (
        "host_kv_bytes", "host_kv_budget_bytes",
        "kv_blocks_swapped_out_total", "kv_blocks_swapped_in_total", "host_kv_hits_total",
    ):  # fmt: skip
        assert page[f"loraplex:{name}"] == 0


def test_the_page_shows_what_the_batching_policy_decided() -> None:
    stats = EngineStats(
        is_merged=1, num_merged_steps=9, num_merges=2, num_switches=3, num_pauses=7, num_step_adapters=40,
        owed_credit_s=1.5,
    )  # fmt: skip
    snapshot = MetricsSnapshot(
        base_model="base",
        metrics=ServerMetrics(ManualClock()),
        stats=stats,
        num_restarts=0,
        num_refused={},
        num_continued={},
        adapters=(),
        batching=Batching.DYNAMIC,
    )
    page = render_metrics(snapshot).decode()
    for line in (
        'loraplex:batching_info{model_name="base",policy="dynamic"} 1.0',
        'loraplex:merged{model_name="base"} 1.0',
        'loraplex:merged_steps_total{model_name="base"} 9.0',
        'loraplex:merges_total{model_name="base"} 2.0',
        'loraplex:batching_switches_total{model_name="base"} 3.0',
        'loraplex:pauses_total{model_name="base"} 7.0',
        'loraplex:step_adapters_total{model_name="base"} 40.0',
        'loraplex:owed_credit_seconds{model_name="base"} 1.5',
    ):
        assert line in page.splitlines()
    again = parse_stats(page, {})  # as a front reads it from a server behind it
    assert again == stats


def test_the_page_shows_the_engine(api: Api) -> None:
    page = samples(api)
    assert page["vllm:kv_cache_usage_perc"] == 0.25
    assert page["vllm:cache_config_info[100]"] == 1
    assert page["loraplex:host_adapter_budget_bytes"] == 1 << 20
    assert page["loraplex:step_time_predicted_over_measured"] == pytest.approx(0.75)
    assert "loraplex:copy_time_predicted_over_measured" not in page  # there was none
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "loraplex:host_adapter_bytes",
        "loraplex:device_adapter_bytes", "loraplex:device_arena_bytes",
    ):  # fmt: skip
        assert page[name] == 0


def test_the_error_of_predicted_copies_is_a_gauge(api: Api) -> None:
    deps = api.served.deps
    stats = replace(api.run(api.served.engine.stats()), predicted_copy_s=0.3, measured_copy_s=0.2)
    snapshot = MetricsSnapshot(
        base_model="base",
        metrics=deps.metrics,
        stats=stats,
        num_restarts=0,
        num_refused={},
        num_continued={},
        adapters=deps.adapters.served(),
        replicas=[],
        twin=None,
    )
    page = render_metrics(snapshot).decode()
    gauge = re.search(r"^loraplex:copy_time_predicted_over_measured\{[^}]*\} (\S+)$", page, re.MULTILINE)
    assert gauge is not None
    assert float(gauge[1]) == pytest.approx(1.5)


def test_adapters_in_memory_are_visible_and_unloaded_ones_are_not(api: Api) -> None:
    page = samples(api)
    assert page["loraplex:adapter_resident[poet,host,version-of-poet]"] == 1
    assert page["loraplex:adapter_loads_total[version-of-poet]"] == 1
    assert sum(name.startswith("loraplex:adapter_resident[poet") for name in page) == 1
    assert "loraplex:adapter_requests_total[poet]" not in page  # it was never requested
    chat(api, "poet")
    page = samples(api)
    assert page["loraplex:adapter_requests_total[poet]"] == 1
    assert page["loraplex:adapter_hits_total[poet]"] == 0
    assert page["loraplex:adapter_in_flight[poet]"] == 0
    assert api.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
    assert not any("poet" in name for name in samples(api))


def test_an_adapter_on_disk_costs_a_page_nothing_until_somebody_asks_for_it(api: Api) -> None:
    def lines() -> list[str]:
        return api.get("/metrics").text.splitlines()

    before = len(lines())
    for number in range(100):
        spec = make_spec(f"v{number}")
        api.served.service._served[f"a{number}"] = ServedAdapter(name=f"a{number}", spec=spec)
    assert len(lines()) == before
    assert samples(api)["loraplex:adapters"] == 102
    assert "a7" not in api.served.deps.metrics._traffic  # rendering does not create counters
    api.served.engine.adapters["v7"] = make_spec("v7")
    chat(api, "a7")
    assert {line.split('"')[1] for line in lines() if 'adapter="a' in line} == {"a7"}


def test_a_page_is_rendered_outside_of_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def spy(snapshot: MetricsSnapshot) -> bytes:
        threads.append(threading.get_ident())
        api.served.deps.metrics.traffic("pirate").num_tokens += 5
        found = snapshot.metrics.find_traffic("pirate")
        assert found is not None
        assert found.num_tokens == 1, "a snapshot does not change any more"
        return b""

    monkeypatch.setattr("loraplex.server.utility_routes.render_metrics", spy)
    api.served.deps.metrics.traffic("pirate").num_tokens = 1
    assert api.get("/metrics").status_code == 200
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_after", [0, 2])
def test_failed_sequences_are_counted(make_api: Callable[..., Api], stream: bool, fail_after: int) -> None:
    api = make_api(says("Hello world! How are you?", fail_after=fail_after))
    api.post("/v1/completions", {"model": "base", "prompt": "x", "n": 2, "stream": stream})
    page = samples(api)
    assert page["vllm:request_success_total[error]"] == 2
    assert page["vllm:request_success_total[abort]"] == 0


def test_sequences_of_a_client_that_left_are_counted(make_api: Callable[..., Api]) -> None:
    api = make_api(says("Hello world! How are you?", pause_after=2))

    async def leave() -> None:
        body = {"model": "base", "prompt": "x"}
        call = asyncio.create_task(api.send("POST", "/v1/completions", json=body))
        while not api.served.engine.was_paused.is_set():
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    api.run(leave())
    page = samples(api)
    assert page["vllm:request_success_total[abort]"] == 1
    assert page["vllm:request_success_total[error]"] == 0


def test_latencies_are_those_of_the_clock(make_api: Callable[..., Api]) -> None:
    clock = ManualClock()

    def script(request: EngineRequest) -> Script:
        clock.advance(0.5)  # between arrival and first token
        return Script(token_ids=[10, 11, 12])

    api = make_api(script, clock=clock)
    chat(api, "pirate")
    page = samples(api)
    assert page["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert page["loraplex:adapter_ttft_seconds_bucket[pirate,0.25]"] == 0
    assert page["loraplex:adapter_ttft_seconds_bucket[pirate,0.5]"] == 1


def test_adapters_in_use_are_named_for_load_balancers(make_api: Callable[..., Api]) -> None:
    async def scenario() -> str:
        resume = asyncio.Event()

        def script(request: EngineRequest) -> Script:
            # The pirate pauses after a token and is running; the poet before the first, and waits.
            pause_after = 1 if request.adapter == "version-of-pirate" else 0
            return Script(token_ids=[10, 11, 12], pause_after=pause_after, resume=resume)

        api.served.engine.script = script
        tasks = []
        for num_requests, model in enumerate(("pirate", "poet"), start=1):
            body = {"model": model, "messages": USER}
            tasks.append(asyncio.create_task(api.send("POST", "/v1/chat/completions", json=body)))
            traffic = api.served.deps.metrics.traffic("pirate")
            while len(api.served.engine.requests) < num_requests or not traffic.num_running:
                await asyncio.sleep(0)
        page = await api.send("GET", "/metrics")
        resume.set()
        await asyncio.gather(*tasks)
        return next(line for line in page.text.splitlines() if line.startswith("vllm:lora_requests_info"))

    api = make_api()
    line = api.run(scenario())
    assert 'running_lora_adapters="pirate"' in line
    assert 'waiting_lora_adapters="poet"' in line


def test_a_request_that_fails_leaves_no_gauge_behind(api: Api, tmp_path: Path) -> None:
    api.served.engine.dead = True
    assert api.post("/v1/completions", {"model": "pirate", "prompt": "x"}).status_code == 503
    traffic = api.served.deps.metrics.traffic("pirate")
    assert (traffic.num_waiting, traffic.num_running) == (0, 0)
    api.served.engine.dead = False
    assert samples(api)["vllm:e2e_request_latency_seconds_count"] == 0


@pytest.mark.parametrize("model", ["base", "pirate"])
def test_two_servers_do_not_share_counters(make_api: Callable[..., Api], model: str) -> None:
    first, second = make_api(), make_api()
    chat(first, model)
    assert samples(second)["vllm:generation_tokens_total"] == 0


def ask_for(api: Api, number: int) -> None:
    """Serve this many more adapters, each of which was requested once, answered with two tokens, and
    loaded."""
    metrics = api.served.deps.metrics
    for index in range(number):
        spec = make_spec(f"v{index}")
        api.served.service._served[f"a{index}"] = ServedAdapter(name=f"a{index}", spec=spec)
        api.served.engine.adapters[spec.version] = spec
        traffic = metrics.traffic(f"a{index}")
        traffic.num_requests += 1
        traffic.num_tokens += 2
        traffic.ttft.observe(0.1)
        traffic.reached()[Reached(Target.TTFT, True)] += 1


def test_ten_thousand_adapters_make_no_more_series_than_some(make_api: Callable[..., Api]) -> None:
    few, many = make_api(), make_api(base_model="other")
    ask_for(few, 2 * MAX_NAMED)
    ask_for(many, 10_000)
    page, expected = samples(many), samples(few)
    assert len(page) == len(expected)
    assert len(page) < 25 * MAX_NAMED
    by_name = {
        name: value for name, value in page.items() if name.startswith("loraplex:adapter_requests_total")
    }
    assert len(by_name) == MAX_NAMED + 1
    assert sum(by_name.values()) == 10_000
    assert by_name["loraplex:adapter_requests_total[(others)]"] == 10_000 - MAX_NAMED
    assert page["loraplex:adapter_generation_tokens_total[(others)]"] == 2 * (10_000 - MAX_NAMED)
    assert page["loraplex:adapter_ttft_seconds_count[(others)]"] == 10_000 - MAX_NAMED
    assert page["loraplex:adapter_slo_requests_total[(others),attained,ttft]"] == 10_000 - MAX_NAMED
    assert page["loraplex:adapter_versions[host]"] == 10_002
    loads = [value for name, value in page.items() if name.startswith("loraplex:adapter_loads_total")]
    assert sum(loads) == 10_002


def test_load_balancers_are_told_of_a_bounded_number_of_adapters(api: Api) -> None:
    ask_for(api, 2 * MAX_NAMED)
    for name in list(api.served.deps.metrics.names):
        api.served.deps.metrics.traffic(name).num_running = 1
    page = api.get("/metrics").text
    line = next(line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert line.count(",") < MAX_NAMED + 5


def test_the_dashboard_asks_for_series_that_there_are(make_api: Callable[..., Api]) -> None:
    """With a fleet, a twin and tenants, whose series are there only with them."""
    key = "key-of-acme"
    text = f"[tenants.acme]\nkeys = [{stored(key)}]\nadapters = ['*']\nslo_ttft = 60\n"
    api = make_api(tenants=text)
    status = EngineStatus(state=EngineState.READY, message="", num_restarts=0, pid=1)
    replica = ReplicaStatus(number=0, status=status, num_in_flight=0, num_sent=0, drained=False)
    measured = Figures(tokens_per_s=1.0, ttft_s=1.0, itl_s=1.0)
    replayed = Replayed(num_requests=1, measured=measured, predicted=measured, seconds=1.0)
    body = {"model": "pirate", "messages": USER}
    headers = {"Authorization": f"Bearer {key}"}
    assert api.post("/v1/chat/completions", body, headers=headers).status_code == 200
    deps = api.served.deps
    snapshot = MetricsSnapshot(
        base_model="base",
        metrics=deps.metrics,
        stats=api.run(api.served.engine.stats()),
        num_restarts=0,
        num_refused={"queue_full": 1},
        num_continued={"died": 1},
        adapters=deps.adapters.served(),
        replicas=[replica],
        twin=TwinFigures(is_measured=True, num_replays={}, latest=replayed),
    )
    page = render_metrics(snapshot) + render_tenants(deps.tenants, deps.waiting)
    there = set(re.findall(r"^([a-z]+:\w+)", page.decode(), re.MULTILINE))
    dashboard = json.loads((ROOT / "grafana" / "loraplex.json").read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b(?:vllm|loraplex):\w+", target["expr"])
    }
    assert {"loraplex:tenant_slo_requests_total", "loraplex:adapter_slo_requests_total"} <= asked
    assert asked <= there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [panel["gridPos"] for panel in panels]
    covered = [(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in [at["y"]]]
    assert len(set(covered)) == len(covered), "panels overlap"


def test_an_adapter_that_has_a_series_keeps_it(make_api: Callable[..., Api]) -> None:
    api = make_api()
    ask_for(api, MAX_NAMED)
    before = samples(api)
    chat(api, "pirate")
    after = samples(api)
    assert after.keys() >= before.keys()
    counter = "loraplex:adapter_requests_total"
    changed = {name for name in after if name.startswith(counter) and after[name] != before.get(name)}
    assert changed == {f"{counter}[(others)]"}
