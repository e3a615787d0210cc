"""A replica in front of a real loraplex server: the same answers as an engine in this process gives."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import tiny
from replicas import answer, request_for, run, until
from replicas import replica_of as any_replica_of
from server_process import serving
from serving_fakes import hf_tokenizer

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.continuation import continued
from loraplex.core.errors import (
    AdapterError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    PathNotAllowedError,
    RequestMovedError,
)
from loraplex.core.request import FinishReason
from loraplex.engine.async_local import LocalAsyncEngine
from loraplex.engine.build import build_core
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config
from loraplex.server.fleet.backend_adapters import adapter_name
from loraplex.server.fleet.backend_http import BackendError
from loraplex.server.fleet.backend_identity import ExpectedBase
from loraplex.server.fleet.http_replica import HttpReplica
from loraplex.server.replica import Continuation

TINY = ExpectedBase.of("tiny")
KEY, ADMIN_KEY = "plain", "chief"
HEADERS = {"authorization": f"Bearer {KEY}"}
PROMPT = [11, 42, 7, 99, 150]
EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=2048)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(root / "open" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    return root


@pytest.fixture(scope="module")
def specs(folder: Path) -> list[AdapterSpec]:
    shape = load_config(folder).shape
    return [read_adapter(folder / "open" / name, shape) for name in ("one", "two")]


class Server(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    options: list[str]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests; all but the last leave it as they found it."""
    options = ["--allow-adapter-dir", str(folder / "open"), "--api-key", KEY, "--admin-key", ADMIN_KEY]
    with serving(folder, *options, "--state-dir", str(tmp_path_factory.mktemp("state"))) as (process, url, _):
        yield Server(process, url, options)


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url


def replica_of(url: str, expected: ExpectedBase = TINY, **options: Any) -> HttpReplica:
    return any_replica_of(url, expected, **{"key": KEY, "admin": ADMIN_KEY, **options})


@asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[HttpReplica]:
    replica = replica_of(url, **options)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[LocalAsyncEngine]:
    options = EngineOptions(model=str(folder), device="cpu", kv_memory_bytes=4 << 20, num_threads=1)
    engine = LocalAsyncEngine(build_core(options))
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.3, "seed": -1, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": ((5, 50.0), (6, -100.0)), "max_tokens": 4},
        {"stop_token_ids": tuple(range(100, 200)), "min_tokens": 3, "logprobs": 1},
        {"ignore_eos": True, "logit_bias": ((EOS, 100.0),), "logprobs": 1},
        {"logit_bias": ((EOS, 100.0),), "min_tokens": 5},
    ],
    ids=str,
)
def test_answers_are_those_of_an_engine_in_this_process(
    url: str, local: LocalAsyncEngine, specs: list[AdapterSpec], params: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with started(url) as replica:
            for spec in specs:
                await local.add_adapter(spec)
                await replica.add_adapter(spec)
            for adapter in (None, *(spec.version for spec in specs)):
                request = request_for(PROMPT, adapter=adapter, eos=(EOS,), **{"max_tokens": 24, **params})
                expected, found = await answer(local, request), await answer(replica, request)
                assert found.token_ids == expected.token_ids
                assert found.logprobs == expected.logprobs
                assert found.prompt_logprobs == expected.prompt_logprobs
                assert found.finish_reason is expected.finish_reason
                assert found.stop_token_id == expected.stop_token_id

    run(scenario())


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 2},
        {"stop_token_ids": tuple(range(100, 200)), "min_tokens": 9},
    ],
    ids=["greedy", "seed and penalties", "min_tokens"],
)
def test_an_answer_that_began_elsewhere_goes_on_as_it_would_have(
    url: str, local: LocalAsyncEngine, params: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with started(url) as replica:
            request = request_for(PROMPT, eos=(EOS,), **{"max_tokens": 12, **params})
            whole = await answer(local, request)
            assert replica.continuation(request) is Continuation.SAME
            for cut in (1, 5, len(whole.token_ids) - 1):
                rest = continued(request, whole.token_ids[:cut])
                found = await answer(replica, replace(rest, request_id=f"{request.request_id}-{cut}"))
                assert found.token_ids == whole.token_ids[cut:]
                assert (found.finish_reason, found.stop_token_id) == (
                    whole.finish_reason,
                    whole.stop_token_id,
                )
                values = [entry.logprob for entry in found.logprobs]
                assert values == pytest.approx([entry.logprob for entry in whole.logprobs[cut:]], abs=1e-4)

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "text"}, "needs a prompt of token ids"),
        ({"prompt": [[5, 6]]}, "needs a prompt of token ids"),
        ({"n": 2}, "goes without n"),
        ({"stop": "x"}, "goes without stop"),
        ({"echo": True}, "goes without echo"),
        ({"max_tokens": 2}, "has 2 tokens; max_tokens, which counts them as well, is 2"),
        ({"output_token_ids": [5, 4000]}, "token id 4000 is outside the vocabulary"),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_gone_on_with_is_refused(
    url: str, fields: dict[str, Any], message: str
) -> None:
    body = {"model": "tiny", "prompt": [5, 6], "output_token_ids": [7, 8], "max_tokens": 9, **fields}
    refused = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "output_token_ids"


def test_a_cancelled_request_is_freed_there(url: str, specs: list[AdapterSpec]) -> None:
    async def scenario() -> None:
        async with started(url) as replica:
            await replica.add_adapter(specs[0])
            request = request_for(
                PROMPT, adapter=specs[0].version, ignore_eos=True, max_tokens=None, logprobs=1
            )
            async with aclosing(replica.generate(request)) as outputs:
                async for output in outputs:
                    if output.token_ids:
                        break

            async def is_free() -> bool:
                stats = await replica.stats()
                tiers = [seen.tier for seen in stats.adapters if seen.version == specs[0].version]
                return stats.num_running == stats.num_kv_blocks_used == 0 and tiers == ["host"]

            await until(is_free)
            stats = await replica.stats()
            assert stats.num_kv_blocks > 0
            assert stats.num_steps > 0
            assert stats.num_waiting == 0
            # It ends there when the connection does, and its memory is free for the next request.
            await replica.remove_adapter(specs[0].version)

    run(scenario())


def test_what_the_server_refuses(url: str, folder: Path, specs: list[AdapterSpec], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(url) as replica:
            with pytest.raises(ContextLengthError):
                await answer(replica, request_for([5] * 2048))
            with pytest.raises(InvalidRequestError, match="vocabulary"):
                await answer(replica, request_for([100_000]))
            shutil.copytree(folder / "open" / "one", tmp_path / "one")
            closed = read_adapter(tmp_path / "one", load_config(folder).shape)
            with pytest.raises(PathNotAllowedError, match="--allow-adapter-dir"):
                await replica.add_adapter(closed)
        async with started(url, seen_path=lambda _: str(folder / "open" / "two")) as replica:
            with pytest.raises(AdapterError, match=r"finds another adapter at .*give both the same files"):
                await replica.add_adapter(specs[0])
            names = {model["id"] for model in httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"]}
            assert adapter_name(specs[0].version) not in names
        with pytest.raises(BackendError, match="serves the base model 'tiny', not 'acme/other'"):
            await replica_of(url, ExpectedBase.of("acme/other")).start()

    run(scenario())


def test_the_api_key_does_not_change_adapters_where_an_admin_key_does(url: str) -> None:
    async def scenario() -> None:
        with pytest.raises(BackendError, match=r"asks for an API key \(HTTP 401\)"):
            await replica_of(url, key=None, admin=None).start()
        with pytest.raises(BackendError, match=r"does not let the fleet change adapters.*give its admin key"):
            await replica_of(url, admin=None).start()

    run(scenario())


def test_one_request_is_handed_over_and_the_others_go_on(url: str) -> None:
    async def scenario() -> None:
        async with started(url) as replica:
            moved, other = request_for(PROMPT, max_tokens=1000), request_for(PROMPT, max_tokens=200)
            going_on = asyncio.create_task(answer(replica, other))
            async with aclosing(replica.generate(moved)) as outputs:
                while not (await anext(outputs)).token_ids:
                    pass
                replica.hand_over(moved.request_id)
                replica.hand_over("nobody")
                with pytest.raises(RequestMovedError):
                    async for _ in outputs:
                        pass
            assert len((await going_on).token_ids) == 200
            assert replica.healthy

    run(scenario())


@pytest.mark.slow
def test_streams_end_and_adapters_come_back_when_the_server_does(
    server: Server, folder: Path, specs: list[AdapterSpec], tmp_path: Path
) -> None:
    """The last test: it ends the server."""
    process, url, options = server

    async def scenario() -> None:
        replica = replica_of(url, silence_s=1.0)
        await replica.start()
        for spec in specs:
            await replica.add_adapter(spec)
        request = request_for(PROMPT, adapter=specs[0].version, ignore_eos=True)
        expected = await answer(replica, request)
        long = request_for(PROMPT, adapter=specs[1].version, ignore_eos=True, max_tokens=None)
        async with aclosing(replica.generate(long)) as outputs:
            async for output in outputs:
                if output.token_ids:
                    break
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineDeadError):
                await _read(outputs)
        assert not replica.healthy
        process.send_signal(signal.SIGCONT)
        await until(lambda: replica.healthy)
        assert (await answer(replica, request)).token_ids == expected.token_ids
        process.kill()
        await until(lambda: not replica.healthy)
        # The next server has its own state folder, so it knows nothing of the previous one.
        port = str(httpx.URL(url).port)
        with serving(folder, *options, "--port", port, "--state-dir", str(tmp_path)):
            await until(lambda: replica.healthy)
            found = await answer(replica, request)
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, FinishReason.LENGTH)
            await replica.close()

    run(scenario())


async def _read(outputs: Any) -> None:
    while True:
        await anext(outputs)
        await asyncio.sleep(0)
