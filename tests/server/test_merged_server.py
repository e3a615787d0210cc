"""A server that merges adapters, while it dies, while they are reloaded, and while clients leave: real server
and engine processes, real HTTP, a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from server_process import PATIENCE_S, complete, everything_is_free, metric, serving, wait_until
from serving_fakes import hf_tokenizer

LONG = 8000
"""Tokens of an answer that nobody waits for to its end."""
NAMES = ("one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("merged")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=LONG + 192)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate((*NAMES, "old", "new")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    (root / "live").mkdir()
    return root


def options(folder: Path, state: Path, *more: str) -> list[str]:
    """Return the options of a server that merges. Adapters are loaded through its API."""
    found = ["--batching", "merged", "--kv-memory", "64MiB", "--state-dir", str(state), *more]
    for each in ("adapters", "live"):
        found += ["--allow-adapter-dir", str(folder / each)]
    return found


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for all tests that leave it as they found it."""
    with serving(folder, *options(folder, tmp_path_factory.mktemp("state"))) as (_, found, _):
        for name in NAMES:
            load(found, name, folder / "adapters" / name)
        yield found


def load(url: str, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path)}
    answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def unload(url: str, name: str) -> None:
    answer = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def served(url: str) -> set[str]:
    return {each["name"] for each in httpx.get(f"{url}/v1/adapters").json()["data"]}


class Stream:
    """A greedy answer that arrives piece by piece. Its client can leave."""

    def __init__(self, url: str, model: str, max_tokens: int = LONG) -> None:
        self._client = httpx.Client(timeout=PATIENCE_S)
        body = {"model": model, "prompt": "the dog", "temperature": 0, "ignore_eos": True, "stream": True}
        request = self._client.build_request(
            "POST", f"{url}/v1/completions", json=body | {"max_tokens": max_tokens}
        )
        self._response = self._client.send(request, stream=True)
        assert self._response.status_code == 200
        self._lines = self._response.iter_lines()
        self.text = ""

    def read(self) -> bool:
        """Wait for the next piece; return False at the end."""
        for line in self._lines:
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                self.text += "".join(each["text"] for each in choices)
                return True
        return False

    def read_all(self) -> str:
        while self.read():
            pass
        return self.text

    def leave(self) -> None:
        """Close the connection, whatever has not been read yet."""
        self._client.close()


@contextlib.contextmanager
def streams(url: str) -> Iterator[Any]:
    """Yield a function that sends a request and returns its stream before the first piece is there."""
    opened: list[Any] = []
    with ThreadPoolExecutor() as threads:

        def send(model: str, max_tokens: int = LONG) -> Any:
            opened.append(threads.submit(Stream, url, model, max_tokens))
            return opened[-1]

        try:
            yield send
        finally:
            for each in opened:
                each.result(PATIENCE_S).leave()


def wait_for(url: str, name: str, value: float) -> None:
    wait_until(lambda: metric(url, name) == value, f"{name} is {value:g}")


def wait_for_more(url: str, name: str) -> None:
    """Wait until a counter has grown."""
    before = metric(url, name)
    wait_until(lambda: metric(url, name) > before, f"{name} grows")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children_of(child)]
    return found


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits only for a parent that asks how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def shared_files(pids: list[int]) -> set[str]:
    """Return the files of shared memory that processes have open or mapped."""
    found = set()
    for pid in pids:
        found |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found.add(os.readlink(each))
    return {each for each in found if each.startswith("/dev/shm/")}


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--tensor-parallel", "2")], ids=["", "two-processes"])
def test_a_server_killed_while_it_merges_serves_the_same_after_a_start(
    folder: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    given = options(folder, tmp_path / "state", *more)
    with serving(folder, *given, environment=environment) as (process, url, _):
        for name in NAMES:
            load(url, name, folder / "adapters" / name)
        before = {name: complete(url, name) for name in NAMES}
        first = Stream(url, "one")
        assert first.read()
        with ThreadPoolExecutor() as threads:
            second = threads.submit(Stream, url, "two")
            wait_for(url, "vllm:num_requests_waiting", 1)
            wait_for_more(url, "loraplex:merged_steps_total")
            assert metric(url, "loraplex:merged") == 1
            children = children_of(process.pid)
            shared = shared_files([process.pid, *children])
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
            with pytest.raises(httpx.TransportError):
                first.read_all()
            with pytest.raises(httpx.TransportError):
                second.result(PATIENCE_S).read_all()
    assert children
    wait_until(lambda: all(map(has_ended, children)), "its processes end")
    assert not [each for each in shared if Path(each).exists()]
    assert not list(scratch.iterdir())

    with serving(folder, *given, environment=environment) as (process, url, said):
        assert "registered 2 adapters" in said
        assert "another server" not in said
        assert {name: complete(url, name) for name in NAMES} == before
        assert metric(url, "loraplex:merges_total") == len(NAMES)
        wait_until(lambda: everything_is_free(url), "nothing runs")
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    wait_until(lambda: all(map(has_ended, children)), "its processes end")
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_a_request_on_merged_weights_ends_with_them_while_its_adapter_is_replaced(
    url: str, folder: Path
) -> None:
    def has_weights_of(name: str) -> None:
        for file in (folder / "adapters" / name).iterdir():
            shutil.copy(file, folder / "live" / f".{file.name}")
            os.replace(folder / "live" / f".{file.name}", folder / "live" / file.name)

    has_weights_of("new")
    load(url, "live", folder / "live")
    expected_new = complete(url, "live")
    unload(url, "live")
    has_weights_of("old")
    load(url, "live", folder / "live")
    expected_old = complete(url, "live", max_tokens=2000)
    assert not expected_old.startswith(expected_new)

    num_merges = metric(url, "loraplex:merges_total")
    with ThreadPoolExecutor() as threads, streams(url) as send:
        running = send("live", 2000).result(PATIENCE_S)
        assert running.read()
        wait_for_more(url, "loraplex:merged_steps_total")
        unloading = threads.submit(unload, url, "live")  # it is answered when the running request has ended
        wait_until(lambda: "live" not in served(url), "the name is free")
        has_weights_of("new")
        load(url, "live", folder / "live")
        later = send("live", 12)
        wait_for(url, "vllm:num_requests_waiting", 1)  # for the running one, which is on other weights
        assert metric(url, "vllm:num_requests_running") == 1
        assert running.read_all() == expected_old
        assert later.result(PATIENCE_S).read_all() == expected_new
        unloading.result(PATIENCE_S)
    assert metric(url, "loraplex:merges_total") == num_merges + 1, "the old weights were merged already"
    assert complete(url, "live") == expected_new
    unload(url, "live")
    wait_until(lambda: everything_is_free(url), "both versions are free")


@pytest.mark.slow
def test_a_client_that_leaves_while_its_request_is_paused_takes_nothing_with_it(url: str) -> None:
    expected = {name: complete(url, name, max_tokens=2000 if name == "two" else 12) for name in NAMES}
    with streams(url) as send:
        oldest = send("one").result(PATIENCE_S)
        assert oldest.read()
        other = send("two", 2000)
        wait_for(url, "vllm:num_requests_waiting", 1)
        paused = send("one").result(PATIENCE_S)
        assert paused.read(), "it runs with the oldest one, on the same adapter"
        oldest.leave()
        going_on = other.result(PATIENCE_S)
        assert going_on.read(), "it is the oldest one now"
        wait_for_more(url, "loraplex:pauses_total")
        assert metric(url, "vllm:num_requests_running") == 2
        paused.leave()
        wait_for(url, "vllm:num_requests_running", 1)
        later = send("one", 12)
        assert going_on.read_all() == expected["two"]
        assert later.result(PATIENCE_S).read_all() == expected["one"]
    wait_until(lambda: everything_is_free(url), "nothing runs, waits or is paused")
    num_pauses = metric(url, "loraplex:pauses_total")
    assert complete(url, "one") == expected["one"]
    assert metric(url, "loraplex:pauses_total") == num_pauses
