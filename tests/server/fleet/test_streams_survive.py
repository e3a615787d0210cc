"""`kill -9` under streams of a real fleet of engine processes: the real openai client sees the answer that it
would have had. test_backend_fleet does the same with a fleet of servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from client_streams import SAMPLED, check_disturbed, stream
from server_process import replicas, serving, wait_until


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three engine processes."""
    state = tmp_path_factory.mktemp("state")
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(state), "--replicas", "3")
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url


def test_streams_outlive_their_engine_processes(fleet: str) -> None:
    def kill(number: int) -> None:
        os.kill(replicas(fleet)[number]["pid"], signal.SIGKILL)

    def is_whole() -> bool:
        return all(row["state"] == "ready" for row in replicas(fleet))

    check_disturbed(fleet, kill, **SAMPLED)
    wait_until(is_whole, "the replica is back")
    (whole,), _ = stream(fleet, temperature=0)
    stop = next(
        part
        for start in range(len(whole.text) - 40, len(whole.text) - 3)
        if whole.text.find(part := whole.text[start : start + 3]) > len(whole.text) // 2
    )
    check_disturbed(fleet, kill, temperature=0, stop=stop)
    wait_until(is_whole, "the replica is back")
    drained: list[int] = []

    def drain(number: int) -> None:
        answer = httpx.post(f"{fleet}/v1/fleet/drain", json={"replica": number, "move": True})
        assert answer.status_code == 200, answer.text
        drained.append(number)

    check_disturbed(fleet, drain, **SAMPLED)
    (number,) = drained
    assert replicas(fleet)[number]["in_flight"] == 0
