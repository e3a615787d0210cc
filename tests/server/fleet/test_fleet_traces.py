"""Traces and batches of a real fleet: its front reports what all replicas do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import replicas, serving, wait_until
from trace_collector import SOON, Collector, collecting, values

from loraplex.server.batches.objects import ENDED

pytestmark = pytest.mark.slow  # it starts a fleet
NUM_LINES = 24


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Collector]]:
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(tmp_path_factory.mktemp("state")))
    options = (*options, "--replicas", "2", "--routing", "round-robin")
    with (
        collecting() as collector,
        serving(
            folder, *options, "--otlp-endpoint", collector.url, command="fleet serve", environment=SOON
        ) as (_, url, _),
    ):
        yield url, collector


def test_requests_of_all_replicas_have_their_phases(fleet: tuple[str, Collector]) -> None:
    url, collector = fleet
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for number in range(4):
            headers = {"X-Request-Id": f"completion-{number}"}
            client.completions.create(model="one", prompt="the dog", max_tokens=4, extra_headers=headers)
        client.responses.create(
            model="two", input="hi", max_output_tokens=4, extra_headers={"X-Request-Id": "response"}
        )
    assert all(row["sent"] for row in replicas(url))
    for number in range(4):
        root, phases = collector.trace_of(f"completion-{number}")
        assert (root.name, values(root)["gen_ai.request.model"]) == ("POST /v1/completions", "one")
        assert {"queue", "prefill", "decode"} <= set(phases)
    root, phases = collector.trace_of("response")
    assert (root.name, values(root)["gen_ai.request.model"]) == ("POST /v1/responses", "two")
    assert {"queue", "prefill", "decode"} <= set(phases)


def test_lines_of_a_batch_run_on_all_replicas(fleet: tuple[str, Collector]) -> None:
    url, _ = fleet
    before = [row["sent"] for row in replicas(url)]
    lines = [
        {
            "custom_id": f"q{number}", "method": "POST", "url": "/v1/completions",
            "body": {"model": ("one", "two")[number % 2], "prompt": f"w{number}", "max_tokens": 4},
        }
        for number in range(NUM_LINES)
    ]  # fmt: skip
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status in set(ENDED), "the batch has ended")
        done = client.batches.retrieve(batch.id)
        assert (done.status, done.request_counts and done.request_counts.completed) == (
            "completed",
            NUM_LINES,
        )
        answers = client.files.content(done.output_file_id or "").text.splitlines()
    assert {json.loads(each)["custom_id"] for each in answers} == {f"q{i}" for i in range(NUM_LINES)}
    sent = [row["sent"] - earlier for row, earlier in zip(replicas(url), before, strict=True)]
    assert (sum(sent), all(sent)) == (NUM_LINES, True)
