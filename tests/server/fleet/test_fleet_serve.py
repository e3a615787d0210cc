"""`loraplex fleet serve` as a process: real engine processes, a tiny model, the real openai client."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client_streams import SAMPLED, Stream, check_disturbed, stream
from server_process import PATIENCE_S, Ended, replicas, run_command, serving, wait_until

from loraplex import LLM, SamplingParams
from loraplex.engine.machine import available_bytes

MODELS = ("tiny", "one", "two")
NUM_CHOICES = 36
"""Number of choices with which one replica is overloaded compared to one without any."""
PREDICTING = ("--max-ttft", "300", "--shadow-twin-every", "1")
"""Options that enable all predictions, and refuse nothing."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def fleet(folder: Path, state: Path) -> Iterator[str]:
    options = ("--adapters", str(folder / "adapters"), "--allow-adapter-dir", str(folder / "more"))
    options = (*options, *PREDICTING, "--state-dir", str(state))
    options = (*options, "--replicas", "2", "--period", "1", "--migrate")
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url


@pytest.fixture(scope="module")
def undisturbed(fleet: str) -> Stream:
    return stream(fleet, **SAMPLED)


@pytest.fixture(scope="module")
def single(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("single")
    options = (*PREDICTING, "--adapters", str(folder / "adapters"), "--state-dir", str(state))
    with serving(folder, *options) as (_, url, _):
        yield url


def answer(url: str, model: str, prompt: str = "w5 w6 w7", **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.completions.create(model=model, prompt=prompt, max_tokens=12, **options)


@pytest.mark.parametrize("kind", ["fleet", pytest.param("single", marks=pytest.mark.slow)])
def test_predicted_figures_stand_beside_measured_ones(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(kind)
    for model in MODELS:
        answer(url, model)
    page = ""

    def is_shown() -> bool:
        nonlocal page
        page = httpx.get(f"{url}/metrics").text
        return "loraplex:twin_relative_error{" in page

    wait_until(is_shown, "the shadow twin has replayed nothing")
    for figure in ("throughput_tokens_per_second", "ttft_seconds", "itl_seconds"):
        for source in ("measured", "predicted"):
            found = re.search(rf'^loraplex:twin_{figure}{{source="{source}"}} (\S+)$', page, re.MULTILINE)
            assert found is not None, (figure, source)
            assert float(found[1]) > 0
    assert 'loraplex:twin_profile_info{profile="guess"} 1.0' in page
    assert 'loraplex:twin_replays_total{result="failed"} 0.0' in page


@pytest.mark.slow
def test_all_replicas_batch_by_the_policy_that_the_banner_names(folder: Path, tmp_path: Path) -> None:
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(tmp_path), "--replicas", "2")
    options = (*options, "--routing", "round-robin", "--no-shadow-twin", "--batching", "merged")
    with serving(folder, *options, command="fleet serve") as (process, url, _):
        assert process.stdout is not None
        banner = itertools.takewhile(lambda line: "Try it" not in line, process.stdout)
        assert "  batching    merged\n" in banner
        for _ in range(2):
            answer(url, "one")

        def merges() -> float:
            page = httpx.get(f"{url}/metrics").text
            return float(re.findall(r"^loraplex:merges_total\S* (\S+)$", page, re.MULTILINE)[0])

        wait_until(lambda: merges() >= 2, "a replica did not merge")


def test_a_fleet_answers_as_an_engine_in_this_process_does(fleet: str, folder: Path) -> None:
    before = [row["sent"] for row in replicas(fleet)]
    with LLM(folder, adapters=folder / "adapters", kv_memory_bytes=4 << 20, num_threads=1) as llm:
        for model in MODELS:
            adapter = None if model == "tiny" else model
            for options in ({"temperature": 0.0, "logprobs": 2}, {"temperature": 1.0, "seed": 7, "n": 2}):
                params = SamplingParams(max_tokens=12, **options)
                found = answer(fleet, model, **options)
                (expected,) = llm.generate("w5 w6 w7", adapter, params)
                assert [each.text for each in found.choices] == [each.text for each in expected.choices]
                if "logprobs" in options:
                    logprobs = [each.logprob for each in expected.choices[0].logprobs]
                    assert found.choices[0].logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    sent = [row["sent"] - earlier for row, earlier in zip(replicas(fleet), before, strict=True)]
    assert sum(sent) == len(MODELS) * 3
    assert all(sent), "one replica did all of it"


def test_an_adapter_that_is_loaded_is_placed_and_moves_by_what_is_asked_for(fleet: str, folder: Path) -> None:
    body = {"lora_name": "three", "lora_path": str(folder / "more" / "three")}
    loaded = httpx.post(f"{fleet}/v1/load_lora_adapter", json=body)
    assert loaded.status_code == 200
    assert "added successfully. replica 0: " in loaded.text
    assert ": ready" in loaded.text, "as many replicas have it as the placement wants"

    def has_moved() -> bool:
        """Request this adapter only, so that it is placed on both replicas when a period is over."""
        answer(fleet, "three", temperature=0)
        return sum(row["brought"] for row in replicas(fleet)) > 0

    wait_until(has_moved, "no plan has moved the adapter")
    assert all(row["placed"] for row in replicas(fleet))
    page = httpx.get(f"{fleet}/metrics").text
    assert re.search(r"^loraplex:placements_total{.*} [1-9]", page, re.MULTILINE)
    assert re.search(r'^loraplex:replica_adapters_brought_total{replica="[01]"} [1-9]', page, re.MULTILINE)
    assert len({answer(fleet, "three", temperature=0).choices[0].text for _ in range(6)}) == 1
    assert httpx.post(f"{fleet}/v1/unload_lora_adapter", json={"lora_name": "three"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        answer(fleet, "three")


def fleet_command(url: str, *args: str) -> Ended:
    return run_command("fleet", *args, "--base-url", url)


def test_a_drained_replica_is_sent_nothing_until_it_is_undrained(fleet: str) -> None:
    shown = fleet_command(fleet, "drain", "1", "--move")
    assert shown.returncode == 0, shown.stderr
    assert "drained" in shown.stdout
    before = replicas(fleet)
    for number in range(6):
        answer(fleet, "tiny", prompt=f"w{number}", temperature=0)
    after = replicas(fleet)
    assert after[1]["sent"] == before[1]["sent"]
    assert after[0]["sent"] == before[0]["sent"] + 6
    assert "leave one of them out" in fleet_command(fleet, "drain", "1", "--undo", "--move").stderr
    refused = fleet_command(fleet, "drain", "0")
    assert refused.returncode == 1
    assert "the last one that takes requests" in refused.stderr
    unknown = fleet_command(fleet, "drain", "7")
    assert "there is no replica 7; there are 0, 1" in unknown.stderr
    rows = json.loads(fleet_command(fleet, "drain", "1", "--undo", "--json").stdout)["data"]
    assert [row["drained"] for row in rows] == [False, False]


def streamed(url: str, is_enough: Callable[[list[str]], bool]) -> list[str]:
    """Return what a client sees of many choices until it has enough of them and disconnects."""
    texts = [""] * NUM_CHOICES
    body = {"model": "one", "prompt": "w5 w6", "max_tokens": 900, "n": NUM_CHOICES, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": 5, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answered:
        for line in answered.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
                if is_enough(texts):
                    return texts
    raise AssertionError("it ended before there was enough")


def test_migrated_streams_are_the_undisturbed_ones(fleet: str) -> None:
    """All choices are on one replica when the other one is back: many migrate there, without a visible
    effect."""
    assert httpx.post(f"{fleet}/v1/fleet/drain", json={"replica": 1}).status_code == 200
    before = replicas(fleet)[1]["migrated"]
    at_move: list[str] = []
    num_seen = itertools.count()

    def has_gone_on(texts: list[str]) -> bool:
        number = next(num_seen)
        if number == 0:
            assert httpx.post(f"{fleet}/v1/fleet/undrain", json={"replica": 1}).status_code == 200
        if not at_move:
            if number % 50 == 49 and replicas(fleet)[1]["migrated"] > before:
                at_move.extend(texts)
            return False
        return all(len(after) > len(then) + 10 for after, then in zip(texts, at_move, strict=True))

    found = streamed(fleet, has_gone_on)
    undisturbed = streamed(
        fleet, lambda texts: all(len(one) >= len(two) for one, two in zip(texts, found, strict=True))
    )
    assert [text[: len(seen)] for text, seen in zip(undisturbed, found, strict=True)] == found


def test_a_request_is_explained_by_its_id(fleet: str, state: Path) -> None:
    asked = answer(fleet, "two", temperature=0)

    def explained(*options: str) -> Ended:
        return run_command("fleet", "explain", asked.id, "--state-dir", str(state), *options)

    wait_until(lambda: explained().returncode == 0, "the decision is not in the log")
    assert "for two (version " in explained().stdout
    assert "by auto+auto+migrate: " in explained().stdout
    assert "times are guessed" in explained().stdout
    assert "`loraplex profile --model MODEL` measures this machine" in explained().stdout
    unknown = run_command("fleet", "explain", "cmpl-nobody", "--state-dir", str(state))
    assert f"no decision about 'cmpl-nobody' is in {state / 'decisions'}" in unknown.stderr
    assert "--state-dir" in unknown.stderr
    (decision,) = json.loads(explained("--json").stdout)
    assert decision["adapters"] == ["two"]
    assert decision["again"] == decision["replica"]
    assert decision["replicas"][decision["replica"]]["verdict"] == "chosen"
    assert sum(row["placed"] or 0 for row in decision["replicas"]) == pytest.approx(1), "shares of a plan"
    latest = run_command("fleet", "explain", "--state-dir", str(state), "--json")
    assert json.loads(latest.stdout) == [decision]


def test_decisions_of_a_demo_are_found(fleet: str, state: Path, tmp_path: Path) -> None:
    asked = answer(fleet, "two", temperature=0)
    wait_until(
        lambda: run_command("fleet", "explain", asked.id, "--state-dir", str(state)).returncode == 0,
        "the decision is not in the log",
    )
    shutil.copytree(state, tmp_path / "demo")
    found = run_command("fleet", "explain", asked.id, LORAPLEX_STATE=str(tmp_path))
    assert "for two (version " in found.stdout, found


def adapter_reads(url: str) -> dict[str, int]:
    """Return the counters of files read and adapters copied, by name."""
    page = httpx.get(f"{url}/metrics").text
    found = re.findall(r"loraplex:adapter_(file_reads|fetches|fetch_failures)_total\{[^}]*\} (\S+)", page)
    return {name: int(float(value)) for name, value in found}


def num_loads(url: str, name: str) -> int:
    """Return how often any replica loaded an adapter."""
    listed = httpx.get(f"{url}/v1/adapters").json()["data"]
    (found,) = (each["loads"] for each in listed if each["name"] == name)
    return int(found)


def check_a_cold_adapter_is_read_once(url: str, path: Path) -> None:
    """An adapter is loaded, and 100 requests for it arrive at once: one replica reads its files, and the
    others that serve it copy it from there."""
    before = adapter_reads(url)
    load = {"lora_name": "cold", "lora_path": str(path)}
    assert httpx.post(f"{url}/v1/load_lora_adapter", json=load, timeout=PATIENCE_S).status_code == 200
    body = {"model": "cold", "prompt": "w5 w6 w7", "max_tokens": 4, "temperature": 0}
    with httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=100)) as client:

        def ask(_: int) -> str:
            text: str = client.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
            return text

        with ThreadPoolExecutor(100) as clients:
            texts = set(clients.map(ask, range(100)))
    assert len(texts) == 1

    def counted() -> dict[str, int]:
        return {name: value - before[name] for name, value in adapter_reads(url).items()}

    wait_until(lambda: counted()["file_reads"] > 0, "nobody has read it")
    found = counted()
    assert found["file_reads"] == 1
    assert found["fetch_failures"] == 0
    # Of everything copied: a replica that has joined loads other adapters meanwhile.
    assert num_loads(url, "cold") <= len(replicas(url))


def test_replicas_are_added_and_replaced_by_commands(fleet: str, folder: Path) -> None:
    scaled = json.loads(fleet_command(fleet, "scale", "3", "--json").stdout)
    assert scaled.keys() == httpx.get(f"{fleet}/v1/fleet").json().keys(), "of the same shape"
    assert [row["state"] for row in scaled["data"]] == ["ready"] * 3
    check_a_cold_adapter_is_read_once(fleet, folder / "more" / "cold")
    before = replicas(fleet)[1]["pid"]
    restarted = fleet_command(fleet, "restart", "1", "--move")
    assert restarted.returncode == 0, restarted.stderr
    assert replicas(fleet)[1]["pid"] != before
    answer(fleet, "one", temperature=0)
    read = adapter_reads(fleet)
    rows = json.loads(fleet_command(fleet, "scale", "2", "--json").stdout)["data"]
    assert [row["state"] for row in rows] == ["ready", "ready"]
    assert all(adapter_reads(fleet)[name] >= count for name, count in read.items()), "counters only grow"
    assert 'replica_up{replica="2"}' not in httpx.get(f"{fleet}/metrics").text
    refused = fleet_command(fleet, "scale", "0")
    assert refused.returncode == 1
    assert "a fleet has one replica at least" in refused.stderr


def kill(fleet: str, number: int) -> None:
    os.kill(replicas(fleet)[number]["pid"], signal.SIGKILL)


def until_all_are_back(fleet: str) -> None:
    wait_until(lambda: all(row["state"] == "ready" for row in replicas(fleet)), "the replica is back")


@pytest.mark.slow
def test_a_killed_stream_ends_at_its_stop_string(fleet: str, state: Path) -> None:
    (whole,) = stream(fleet, temperature=0).seen
    stop = next(
        part
        for start in range(len(whole.text) - 40, len(whole.text) - 3)
        if whole.text.find(part := whole.text[start : start + 3]) > len(whole.text) // 2
    )
    options = {"temperature": 0, "stop": stop}
    check_disturbed(fleet, state, lambda number: kill(fleet, number), stream(fleet, **options), **options)
    until_all_are_back(fleet)


def test_streams_and_requests_outlive_an_engine_process_that_is_killed_and_replaced(
    fleet: str, state: Path, undisturbed: Stream
) -> None:
    expected = answer(fleet, "one", temperature=0).choices[0].text
    before = replicas(fleet)
    killed: list[int] = []

    def kill_and_ask(number: int) -> None:
        kill(fleet, number)
        killed.append(number)
        for _ in range(8):
            assert answer(fleet, "one", temperature=0).choices[0].text == expected

    check_disturbed(fleet, state, kill_and_ask, undisturbed, **SAMPLED)
    until_all_are_back(fleet)
    (number,) = killed
    row = replicas(fleet)[number]
    assert row["restarts"] == before[number]["restarts"] + 1
    assert row["pid"] != before[number]["pid"]
    page = httpx.get(f"{fleet}/metrics").text
    assert f'loraplex:replica_restarts_total{{replica="{number}"}} {row["restarts"]}.0' in page
    for name in ("replays", "adapter_hits", "adapter_loads"):
        assert f'loraplex:replica_{name}_total{{replica="{1 - number}"}}' in page


def test_streams_outlive_a_replica_that_is_drained(fleet: str, state: Path, undisturbed: Stream) -> None:
    """This leaves one replica drained. test_backend_fleet does the same with a fleet of servers."""
    drained: list[int] = []

    def drain(number: int) -> None:
        answer = httpx.post(f"{fleet}/v1/fleet/drain", json={"replica": number, "move": True})
        assert answer.status_code == 200, answer.text
        drained.append(number)

    check_disturbed(fleet, state, drain, undisturbed, **SAMPLED)
    (number,) = drained
    assert replicas(fleet)[number]["in_flight"] == 0


def test_bad_options_are_refused_before_anything_starts(folder: Path) -> None:
    def refused(*options: str) -> str:
        start = ("fleet", "serve", "--model", str(folder), "--port", "0")
        found = run_command(*start, *options, CUDA_VISIBLE_DEVICES="0")
        assert found.returncode in (1, 2)
        return found.stderr

    assert "did you mean rank-aware?" in refused("--routing", "rank-awar")
    assert "serve with --placement auto" in refused("--placement", "loraserve")
    assert "there can be 1 to 64 replicas, not 0" in refused("--replicas", "0")
    assert "there can be 1 to 64 replicas, not 1,000" in refused("--replicas", "1000")
    told = refused("--replicas", "3", "--device", "cuda")
    assert "1 replica at most: each has 1 GPU, and this machine has 1; lower --replicas" in told


def test_replicas_that_do_not_fit_into_memory_together_are_refused(folder: Path, tmp_path: Path) -> None:
    each = available_bytes() * 2 // 3  # one would find it free when it starts
    options = ("--device", "cpu", "--kv-memory", str(each), "--state-dir", str(tmp_path))
    found = run_command("fleet", "serve", "--model", str(folder), "--port", "0", *options)
    assert found.returncode == 1
    assert f"there can be 1 replica at most: each takes {each:,} bytes with --kv-memory" in found.stderr
    assert found.stderr.strip().endswith("lower --replicas or --kv-memory")
