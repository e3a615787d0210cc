"""A batch on a real server that is killed: real processes, a tiny model, the real openai client."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from server_process import serving, wait_until
from serving_fakes import hf_tokenizer

from loraplex.server.batches.objects import ENDED

NUM_LINES = 1000
pytestmark = pytest.mark.slow  # it starts two servers; `test_batches` stops one of a fake engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tiny.save_model(tmp_path, vocab_size=400, max_position_embeddings=1024)
    hf_tokenizer().save_pretrained(tmp_path)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(tmp_path / "adapters" / name, base, rank=4, seed=seed + 1)
    return tmp_path


def line(number: int) -> str:
    body = {"model": ("one", "two")[number % 2], "prompt": f"w{number} w5", "max_tokens": 100}
    body |= {"temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions", "body": body})


def test_a_batch_outlives_a_killed_server(folder: Path) -> None:
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(folder / "state"))

    def found(client: openai.OpenAI, batch_id: str) -> Any:
        return client.batches.retrieve(batch_id)

    with serving(folder, *options) as (process, url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        content = "\n".join(map(line, range(NUM_LINES))).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: found(client, batch.id).request_counts.completed > 0, "lines are answered")
        process.send_signal(signal.SIGKILL)
        process.wait()
        client.close()
    results = (folder / "state").glob("batches/*/file-*.jsonl")
    torn = [path for path in results if path.stem != file.id and path.stat().st_size]
    assert len(torn) == 1
    before = torn[0].read_bytes()
    assert 0 < before.count(b"\n") < NUM_LINES
    torn[0].write_bytes(before + b'{"id":"batch_req_1","custom_id":"q')  # as if killed while it wrote

    with serving(folder, *options) as (_, url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        wait_until(lambda: found(client, batch.id).status in set(ENDED), "the batch has ended")
        done = found(client, batch.id)
        text = client.files.content(done.output_file_id).content
        client.close()
    assert (done.status, done.request_counts.completed, done.error_file_id) == ("completed", NUM_LINES, None)
    assert text.startswith(before)
    ids = [json.loads(each)["custom_id"] for each in text.splitlines()]
    assert sorted(ids) == sorted(f"q{number}" for number in range(NUM_LINES))
