"""`loraplex fleet serve` as a process: real engine processes, a tiny model, the real openai client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from server_process import COMMAND, serving
from serving_fakes import hf_tokenizer

PATIENCE_S = 120.0
MODELS = ("tiny", "one", "two")
PREDICTING = ("--max-ttft", "300", "--shadow-twin-every", "1")
"""All that predicts is at work, and nothing is refused."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fleet")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=1024)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    tiny.save_adapter(root / "more" / "three", base, rank=4, seed=9)
    return root


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def fleet(folder: Path, state: Path) -> Iterator[str]:
    options = ("--adapters", str(folder / "adapters"), "--allow-adapter-dir", str(folder / "more"))
    options = (*options, *PREDICTING, "--state-dir", str(state), "--replicas", "2")
    with serving(folder, *options, command="fleet serve") as (
        _,
        url,
        _,
    ):
        yield url


@pytest.fixture(scope="module")
def single(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("single")
    options = (*PREDICTING, "--adapters", str(folder / "adapters"), "--state-dir", str(state))
    with serving(folder, *options) as (_, url, _):
        yield url


def answer(url: str, model: str, prompt: str = "w5 w6 w7", **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.completions.create(model=model, prompt=prompt, max_tokens=12, **options)


def replicas(url: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{url}/v1/fleet").json()["data"]
    return rows


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["fleet", "single"])
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


def test_a_fleet_answers_as_a_single_server_does(fleet: str, single: str) -> None:
    before = [row["sent"] for row in replicas(fleet)]
    for model in MODELS:
        for options in ({"temperature": 0, "logprobs": 2}, {"temperature": 1.0, "seed": 7, "n": 2}):
            found, expected = answer(fleet, model, **options), answer(single, model, **options)
            assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
            if "logprobs" in options:
                assert found.choices[0].logprobs.tokens == expected.choices[0].logprobs.tokens
    sent = [row["sent"] - earlier for row, earlier in zip(replicas(fleet), before, strict=True)]
    assert sum(sent) == len(MODELS) * 3
    assert all(sent), "one replica did all of it"


def test_an_adapter_that_is_loaded_is_served_by_every_replica(fleet: str, folder: Path) -> None:
    body = {"lora_name": "three", "lora_path": str(folder / "more" / "three")}
    assert httpx.post(f"{fleet}/v1/load_lora_adapter", json=body).status_code == 200
    assert len({answer(fleet, "three", temperature=0).choices[0].text for _ in range(6)}) == 1
    assert httpx.post(f"{fleet}/v1/unload_lora_adapter", json={"lora_name": "three"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        answer(fleet, "three")


def test_a_killed_replica_is_replaced_and_nobody_notices(fleet: str) -> None:
    expected = answer(fleet, "one", temperature=0).choices[0].text
    victim = replicas(fleet)[0]
    os.kill(victim["pid"], signal.SIGKILL)
    for _ in range(8):
        assert answer(fleet, "one", temperature=0).choices[0].text == expected
    wait_until(lambda: replicas(fleet)[0]["state"] == "ready", "the replica did not come back")
    row = replicas(fleet)[0]
    assert row["restarts"] == victim["restarts"] + 1
    assert row["pid"] != victim["pid"]
    page = httpx.get(f"{fleet}/metrics").text
    assert 'loraplex:replica_restarts_total{replica="0"} 1.0' in page
    for name in ("replays", "adapter_hits", "adapter_loads"):
        assert f'loraplex:replica_{name}_total{{replica="1"}}' in page


def fleet_command(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "fleet", *args, "--base-url", url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


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
    assert "there is no replica 7; they have the numbers 0 to 1" in unknown.stderr
    rows = json.loads(fleet_command(fleet, "drain", "1", "--undo", "--json").stdout)
    assert [row["drained"] for row in rows] == [False, False]


def test_a_request_is_explained_by_its_id(fleet: str, state: Path) -> None:
    asked = answer(fleet, "two", temperature=0)

    def explained(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "fleet", "explain", asked.id, "--state-dir", str(state), *options],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "COLUMNS": "140"},
        )

    wait_until(lambda: explained().returncode == 0, "the decision is not in the log")
    assert "by auto" in explained().stdout
    (decision,) = json.loads(explained("--json").stdout)
    assert decision["again"] == decision["replica"]
    assert decision["replicas"][decision["replica"]]["verdict"] == "chosen"


def test_replicas_are_added_and_replaced_by_commands(fleet: str) -> None:
    assert [row["state"] for row in json.loads(fleet_command(fleet, "scale", "3", "--json").stdout)] == [
        "ready"
    ] * 3
    before = replicas(fleet)[1]["pid"]
    restarted = fleet_command(fleet, "restart", "1", "--move")
    assert restarted.returncode == 0, restarted.stderr
    assert replicas(fleet)[1]["pid"] != before
    answer(fleet, "one", temperature=0)
    rows = json.loads(fleet_command(fleet, "scale", "2", "--json").stdout)
    assert [row["state"] for row in rows] == ["ready", "ready", "closed"]
    refused = fleet_command(fleet, "scale", "0")
    assert refused.returncode == 1
    assert "a fleet has one replica at least" in refused.stderr


def test_a_single_server_says_that_it_has_no_replicas(single: str) -> None:
    found = fleet_command(single, "status")
    assert found.returncode == 1
    assert "is it a loraplex server with replicas?" in found.stderr


def test_bad_options_are_refused_before_anything_starts(folder: Path) -> None:
    def refused(*options: str) -> str:
        found = subprocess.run(
            [*COMMAND, "fleet", "serve", "--model", str(folder), "--port", "0", *options],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "0", "COLUMNS": "200"},
        )
        assert found.returncode in (1, 2)
        return found.stderr

    assert "did you mean rank-aware?" in refused("--routing", "rank-awar")
    assert "greater than or equal to 1" in refused("--replicas", "0")
    told = refused("--replicas", "3", "--device", "cuda")
    assert "1 replica at most: each has 1 GPU, and this machine has 1; lower --replicas" in told
