"""Replicas on a real Ray, which is started on this machine.

Its start takes seconds, and tests of a module may run in several processes: each test here starts its own
Ray, and checks several claims in sequence.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
import tiny
from engine_client_harness import pid_of, run, tokens, until
from fake_core import CHILD_ENV, FACTORY, FakeOptions, request_of, tokens_of
from server_process import PATIENCE_S, replicas, run_command, serving, wait_until
from serving_fakes import hf_tokenizer

from loraplex.engine.machine import max_threads
from loraplex.server.engine_client import EngineClient
from loraplex.server.fleet.ray_child import RayChild
from loraplex.server.fleet.ray_cluster import RayCluster, RayPlace
from loraplex.server.protocol_ipc import Event

NUM_CORES = max_threads()
CORES_EACH = max(NUM_CORES // 2, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ray")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=1024)
    hf_tokenizer().save_pretrained(root)
    tiny.save_adapter(root / "adapters" / "one", base, rank=4, seed=1)
    return root


def answer(url: str, model: str = "one") -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    found = client.completions.create(model=model, prompt="w5 w6 w7", max_tokens=12, temperature=0)
    return found.choices[0].text


def adapter_reads(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics").text
    found = re.findall(r"loraplex:adapter_(file_reads|fetches)_total\{[^}]*\} (\S+)", page)
    return {name: float(value) for name, value in found}


def session_of(front: int) -> dict[int, str]:
    """Return the processes of the front's Ray, which are all in its driver's session, and their command
    lines."""
    lines: dict[int, str] = {}
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            words = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat[0] != "Z":
            lines[int(name)], parents[int(name)] = words, int(stat[1])
    (driver,) = [pid for pid, words in lines.items() if "ray_driver" in words and parents[pid] == front]
    return {pid: words for pid, words in lines.items() if _session(pid) == driver}


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def is_running(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def end(front: subprocess.Popen[str], started: dict[int, str]) -> None:
    """End the server with a signal, and check that nothing it had started is left."""
    front.send_signal(signal.SIGTERM)
    assert front.wait(PATIENCE_S) == 0
    wait_until(lambda: not any(map(is_running, started)), "Ray has ended")


def test_ray_places_replicas_that_are_replaced_scaled_and_ended(folder: Path, tmp_path: Path) -> None:
    """`loraplex fleet serve --ray` as a process, with a tiny model."""
    options = (
        "--adapters",
        str(folder / "adapters"),
        "--state-dir",
        str(tmp_path),
        "--threads",
        str(CORES_EACH),
    )
    ray = ("--ray", "--replicas", "2", "--routing", "round-robin", "--shutdown-grace", "0")
    with serving(folder, *options, *ray, command="fleet serve") as (front, url, _):
        text = answer(url)
        assert answer(url) == text
        rows = replicas(url)
        assert [(row["sent"], row["node"]) for row in rows] == [(1, "127.0.0.1")] * 2
        assert answer(url, "tiny") != text
        # The second one has copied the adapter from the first.
        wait_until(lambda: adapter_reads(url) == {"file_reads": 1, "fetches": 1}, "it was not copied")

        # A replica whose actor dies dies with it, and gets another.
        pid = rows[0]["pid"]
        os.kill(parent_of(pid), signal.SIGKILL)
        assert [answer(url) for _ in range(3)] == [text] * 3
        wait_until(lambda: replicas(url)[0]["restarts"] == 1, "somebody noticed")
        wait_until(lambda: replicas(url)[0]["state"] == "ready", "the replica is back")
        assert not is_running(pid), "the engine process outlived its actor"

        # A replica that Ray has no cores for is reported, and the others keep serving; then some leave.
        refused = run_command("fleet", "scale", str(NUM_CORES // CORES_EACH + 1), "--base-url", url)
        assert refused.returncode == 1
        assert f"Ray has no node with {CORES_EACH} CPU free; other replicas or programs" in refused.stderr
        rows = json.loads(run_command("fleet", "scale", "1", "--json", "--base-url", url).stdout)["data"]
        assert [row["state"] for row in rows] == ["ready"]
        assert answer(url) == text
        end(front, session_of(front.pid))


@pytest.mark.slow
def test_without_rays_head_a_replica_serves_on_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CHILD_ENV.items():
        monkeypatch.setenv(name, value)

    async def scenario() -> None:
        cluster = await RayCluster.connect(RayPlace())

        def start_child(on_event: Callable[[Event], None]) -> RayChild:
            resources = {"CPU": 1.0}
            options = FakeOptions()
            return RayChild(
                cluster,
                0,
                factory=FACTORY,
                config=options,
                resources=resources,
                wait_s=60.0,
                on_event=on_event,
            )

        client = EngineClient(FakeOptions(), factory=FACTORY, start_child=start_child)
        await client.start()
        started = session_of(os.getpid())
        (head,) = [pid for pid, words in started.items() if "gcs_server " in words]
        os.kill(head, signal.SIGKILL)
        engine = pid_of(client)
        actor = parent_of(engine)
        assert await tokens(client, request_of("1")) == tokens_of(request_of("1"))
        os.kill(engine, signal.SIGKILL)

        async def is_back() -> bool:
            return client.healthy and client.status.num_restarts == 1

        await until(is_back)
        assert parent_of(pid_of(client)) == actor
        assert await tokens(client, request_of("2")) == tokens_of(request_of("2"))
        started |= session_of(os.getpid())
        await client.close()
        await cluster.close()

        async def is_gone() -> bool:
            return not any(map(is_running, started))

        await until(is_gone)

    run(scenario())
