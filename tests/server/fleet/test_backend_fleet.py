"""`loraplex fleet serve --backend`: real servers behind one front, and behind two on one registry.

A tiny model, HTTP and the openai client. One module, so that its servers are started once.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from client_streams import SAMPLED, check_disturbed, stream
from server_process import PATIENCE_S, replicas, run_command, serving, wait_until

MODELS = ("tiny", "one", "two")
HEADER = "x-loraplex-adapter-version"


class Backend(NamedTuple):
    """A server that a front sends requests to, and its address."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def run_backends(folder: Path, states: Path, num_servers: int = 2) -> Iterator[list[Backend]]:
    """Run servers that may load adapters."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(number: int) -> Backend:
            state = states / str(number)
            options = ("--allow-adapter-dir", str(folder / "adapters"), "--state-dir", str(state))
            process, url, _ = stack.enter_context(serving(folder, *options))
            return Backend(process, url)

        yield list(threads.map(start, range(num_servers)))


def addresses_of(backends: list[Backend]) -> list[str]:
    """Return the options that give a front these servers."""
    return [option for backend in backends for option in ("--backend", backend.url)]


@contextmanager
def front_of(folder: Path, backends: list[Backend], state: Path) -> Iterator[str]:
    """Run a front of these servers; yields its address."""
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(state), *addresses_of(backends))
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url


@pytest.fixture(scope="module")
def backends(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Backend]]:
    """Two servers; the first has both adapters under their names."""
    with run_backends(folder, tmp_path_factory.mktemp("backends")) as found:
        for name in ("one", "two"):
            body = {"lora_name": name, "lora_path": str(folder / "adapters" / name)}
            assert httpx.post(f"{found[0].url}/v1/load_lora_adapter", json=body).status_code == 200
        yield found


@pytest.fixture(scope="module")
def single(backends: list[Backend]) -> str:
    """The address of a server that serves both adapters alone."""
    return backends[0].url


@pytest.fixture(scope="module")
def front(folder: Path, backends: list[Backend], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with front_of(folder, backends, tmp_path_factory.mktemp("front")) as url:
        yield url


def answer(url: str, model: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.completions.create(model=model, prompt="w5 w6 w7", max_tokens=12, **options)


def test_servers_behind_a_front_answer_as_they_do_alone(front: str, single: str) -> None:
    for model in MODELS:
        for options in ({"temperature": 0, "logprobs": 2}, {"temperature": 1.0, "seed": 7, "n": 2}):
            found, expected = answer(front, model, **options), answer(single, model, **options)
            assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
            assert found.usage == expected.usage
    assert sum(row["sent"] > 0 for row in replicas(front)) > 1, "one server did all of it"


def test_a_batch_on_a_front_is_answered_by_the_servers_behind_it(front: str, single: str) -> None:
    def line(number: int) -> str:
        body = {"model": MODELS[number % 3], "prompt": "w5 w6 w7", "max_tokens": 12, "temperature": 0}
        asked = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(asked)

    client = openai.OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)
    sent_before = [row["sent"] for row in replicas(front)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(line, range(12))).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch has ended")
    output_id = client.batches.retrieve(batch.id).output_file_id
    assert output_id is not None
    found = {}
    for text in client.files.content(output_id).text.strip("\n").split("\n"):
        answered = json.loads(text)
        found[answered["custom_id"]] = answered["response"]["body"]["choices"][0]["text"]
    expected = [answer(single, model, temperature=0).choices[0].text for model in MODELS]
    assert found == {f"q{number}": expected[number % 3] for number in range(12)}
    sent = [row["sent"] - before for row, before in zip(replicas(front), sent_before, strict=True)]
    assert sum(sent) == 12


def test_a_single_server_says_that_it_has_no_replicas(single: str) -> None:
    found = run_command("fleet", "status", "--base-url", single)
    assert found.returncode == 1
    assert "is it a loraplex server with replicas?" in found.stderr


def test_bad_backends_are_refused_in_words(folder: Path, single: str, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")

    def refused(*options: str) -> str:
        start = ("fleet", "serve", "--model", str(other), "--port", "0")
        found = run_command(*start, *options, LORAPLEX_STATE=str(tmp_path / "state"))
        assert found.returncode in (1, 2)
        return found.stderr

    assert "is no address of a server" in refused("--backend", "somewhere")
    assert "nothing answers at http://127.0.0.1:9" in refused("--backend", "http://127.0.0.1:9")
    assert "serves the base model 'tiny'" in refused("--backend", single)
    assert "is given twice with --backend" in refused("--backend", single, "--backend", f"{single}/")
    assert "give one of both" in refused("--backend", single, "--replicas", "2")
    told = " ".join(refused("--replicas", "1", "--backend-max-adapters", "4").split())
    assert "name them with --backend, or leave it out" in told


@pytest.mark.parametrize(
    "given",
    [
        ("--batching", "merged"),
        ("--max-delay-by-grouping", "10%"),
        ("--kv-swap-memory", "1GiB"),
        ("--kv-memory", "1GiB"),
        ("--host-adapter-memory", "1GiB"),
        ("--device", "cpu"),
        ("--cold-start", "cached"),
        ("--cpu-workers", "0"),
        ("--load-popular",),
        ("--threads", "2"),
        ("--shadow-twin-every", "5"),
    ],
)
def test_options_of_engines_are_refused_where_servers_run_already(given: tuple[str, ...]) -> None:
    start = ("fleet", "serve", "--model", "m", "--port", "0", "--backend", "http://127.0.0.1:9")
    found = run_command(*start, *given)
    assert found.returncode == 2
    told = " ".join(found.stderr.replace("│", " ").split())
    assert f"Invalid value for {given[0]}: " in told
    assert "leave it out here, and give it to loraplex servers when they are started" in told


@pytest.mark.parametrize(
    ("given", "in_vllm"),
    [
        (("--dtype", "bfloat16"), "--dtype"),
        (("--memory-fraction", "0.5"), "--gpu-memory-utilization"),
        (("--max-model-len", "512"), "--max-model-len"),
        (("--tensor-parallel", "2"), "--tensor-parallel-size"),
    ],
)
def test_a_refused_option_that_vllm_has_too_is_named_as_there(given: tuple[str, ...], in_vllm: str) -> None:
    start = ("fleet", "serve", "--model", "m", "--port", "0", "--backend", "http://127.0.0.1:9")
    told = " ".join(run_command(*start, *given).stderr.replace("│", " ").split())
    assert f"when they are started (to vLLM as {in_vllm})" in told


@pytest.mark.slow
def test_a_stream_outlives_the_server_behind_the_front(folder: Path, tmp_path: Path) -> None:
    short: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    with (
        run_backends(folder, tmp_path / "backends", 3) as backends,
        front_of(folder, backends, tmp_path / "front") as front,
    ):
        expected = stream(front, **short)
        killed: list[int] = []

        def kill(number: int) -> None:
            backends[number].process.kill()
            backends[number].process.wait()
            killed.append(number)

        check_disturbed(front, tmp_path / "front", kill, stream(front, **SAMPLED), **SAMPLED)
        for _ in range(8):
            assert stream(front, **short) == expected
        states = [row["state"] for row in replicas(front)]
        (number,) = killed
        assert states.pop(number) == "unreachable"
        assert states == ["ready", "ready"]


class Front:
    """A front, and the calls that tests make to it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def change(self, verb: str, name: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, **fields}
        return httpx.post(f"{self.url}/v1/{verb}_lora_adapter", json=body, timeout=PATIENCE_S)

    def load(self, name: str, path: Path, **fields: Any) -> str:
        """Load an adapter, which must succeed; return its version."""
        answer = self.change("load", name, lora_path=str(path), **fields)
        assert answer.status_code == 200, answer.text
        return answer.headers[HEADER]

    def served(self) -> dict[str, tuple[str, str | None]]:
        """Return the version and the canary of each adapter."""
        rows = httpx.get(f"{self.url}/v1/adapters", timeout=PATIENCE_S).json()["data"]
        return {row["name"]: (row["version"], row["canary"] and row["canary"]["version"]) for row in rows}

    def waits_for(self, name: str, version: str | None, canary: str | None = None) -> None:
        expected = None if version is None else (version, canary)
        wait_until(lambda: self.served().get(name) == expected, f"{name} is {expected}")

    def version_of_answer(self, name: str) -> str:
        body = {"model": name, "prompt": "w5 w6", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["adapter_version"] == answer.headers[HEADER]
        return answer.headers[HEADER]


def versions_at(url: str) -> set[str]:
    """Return the versions that a server behind fronts has."""
    models = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
    return {model["id"].removeprefix("lpx-") for model in models if model["id"].startswith("lpx-")}


@pytest.fixture(scope="module")
def urls(backends: list[Backend]) -> list[str]:
    return [backend.url for backend in backends]


@pytest.fixture(scope="module")
def options(
    folder: Path, backends: list[Backend], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """Return the common options of both fronts: two servers and one state folder."""
    state = tmp_path_factory.mktemp("fronts")
    allowed = ("--allow-adapter-dir", str(folder / "adapters"))
    return (*allowed, "--state-dir", str(state), *addresses_of(backends))


@pytest.fixture(scope="module")
def fronts(folder: Path, options: tuple[str, ...]) -> Iterator[tuple[Front, Front]]:
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(_: int) -> Front:
            process, url, _said = stack.enter_context(serving(folder, *options, command="fleet serve"))
            return Front(process, url)

        one, two = threads.map(start, range(2))
        yield one, two


def test_two_fronts_serve_the_same_versions_and_unload_nothing_that_the_other_serves(
    fronts: tuple[Front, Front], folder: Path, urls: list[str]
) -> None:
    one, two = fronts
    first = one.load("bot", folder / "adapters" / "one")
    two.waits_for("bot", first)
    assert two.version_of_answer("bot") == first

    second = two.load("bot", folder / "adapters" / "two", load_inplace=True)
    one.waits_for("bot", second)
    assert one.version_of_answer("bot") == second
    for url in urls:
        wait_until(
            lambda url=url: second in versions_at(url) and first not in versions_at(url), "it is switched"
        )

    assert one.load("bot", folder / "adapters" / "one", canary_share=0.5) == first
    two.waits_for("bot", second, first)
    assert two.change("promote", "bot").status_code == 200
    one.waits_for("bot", first)
    assert one.change("rollback", "bot").status_code == 200
    two.waits_for("bot", second)

    # One front gives up a version, and the other has just given it another name.
    assert one.load("twin", folder / "adapters" / "two") == second
    assert two.change("unload", "bot").status_code == 200
    for url in urls:
        assert second in versions_at(url)
    for front in fronts:
        front.waits_for("twin", second)
        front.waits_for("bot", None)
        assert front.version_of_answer("twin") == second
    assert two.change("unload", "twin").status_code == 200
    one.waits_for("twin", None)
    for url in urls:
        wait_until(lambda url=url: second not in versions_at(url), "nobody needs the version")


def test_no_request_fails_while_the_other_front_switches(fronts: tuple[Front, Front], folder: Path) -> None:
    one, two = fronts
    versions = [one.load("busy", folder / "adapters" / "one")]
    two.waits_for("busy", versions[0])
    answered: list[str] = []
    is_over = threading.Event()

    def ask_on() -> None:
        while not is_over.is_set():
            answered.append(two.version_of_answer("busy"))

    with ThreadPoolExecutor() as threads:
        asking = threads.submit(ask_on)
        for name in ("two", "one", "two"):
            versions.append(one.load("busy", folder / "adapters" / name, load_inplace=True))
            wait_until(lambda: asking.done() or answered[-1:] == versions[-1:], "the other front switches")
        is_over.set()
        asking.result()
    in_turn = [version for version, _ in itertools.groupby(answered)]
    assert in_turn == versions


def test_loads_of_one_name_through_both_at_once_end_in_one_version(
    fronts: tuple[Front, Front], folder: Path
) -> None:
    with ThreadPoolExecutor() as threads:
        for _ in range(3):
            answers = list(
                threads.map(
                    lambda each: each[0].change(
                        "load", "both", lora_path=str(folder / "adapters" / each[1]), load_inplace=True
                    ),
                    zip(fronts, ("one", "two"), strict=True),
                )
            )
            assert {200} <= {answer.status_code for answer in answers} <= {200, 409}
            wait_until(lambda: fronts[0].served() == fronts[1].served(), "both fronts serve the same")
            version = fronts[0].served()["both"][0]
            assert version in {answer.headers.get(HEADER) for answer in answers}
            assert {front.version_of_answer("both") for front in fronts} == {version}


@pytest.mark.slow
def test_a_front_outlives_the_other_which_comes_back_with_what_was_changed_meanwhile(
    fronts: tuple[Front, Front], folder: Path, options: tuple[str, ...]
) -> None:
    one, two = fronts
    one.load("stays", folder / "adapters" / "one")
    one.process.kill()
    one.process.wait()
    wait_until(lambda: "stays" in two.served(), "the other front follows a front that is dead")
    version = two.load("stays", folder / "adapters" / "two", load_inplace=True)
    assert two.version_of_answer("stays") == version
    with serving(folder, *options, command="fleet serve") as (process, url, said):
        (line,) = [
            line for line in said.splitlines() if f"another server (process {two.process.pid})" in line
        ]
        assert "uses the state folder" in line
        assert "WARNING" not in line, "it is meant so"
        again = Front(process, url)
        assert again.served() == two.served()
        assert again.version_of_answer("stays") == version
