"""An engine of two processes against one of one process: the same tokens and the same log-probabilities."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from driving import Finished, run_to_end
from tiny import ALL_LINEARS, ATTENTION, SIZES, save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core import sampling
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.engine.adapter_loader import resident_bytes
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config
from loraplex.model.sharding import Shard

VOCAB_SIZE = SIZES["vocab_size"]
TOLERANCE = 1e-4
ADAPTERS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one": (1, ALL_LINEARS, {}),
    "odd": (13, ALL_LINEARS, {"use_rslora": True}),
    "rows": (3, ["o_proj", "down_proj"], {}),
    "query": (5, ["q_proj"], {}),
    "mixed": (8, ATTENTION, {"rank_pattern": {"o_proj": 11}, "alpha_pattern": {"v_proj": 5}}),
    "layers": (4, r".*layers\.(0|2)\..*(k|gate)_proj", {}),
}
"""Name -> rank, modules, settings."""
EXTRAS = {"large": (16, ALL_LINEARS, {}), "gone": (2, ["q_proj"], {})}


@dataclass(frozen=True, kw_only=True)
class Served:
    """The same model and adapters, in one process and in two."""

    single: Engine
    parallel: Engine
    specs: dict[str, AdapterSpec]


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mistral", "qwen2")), "qwen3"],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp(f"shards-{request.param}")
    base = save_model(root / "base", request.param)
    config = load_config(root / "base")
    specs = {}
    for seed, (name, (rank, targets, settings)) in enumerate((ADAPTERS | EXTRAS).items(), start=1):
        save_adapter(root / name, base, rank=rank, targets=targets, seed=seed, **settings)
        specs[name] = read_adapter(root / name, config.shape)
    shutil.rmtree(root / "gone")
    part = Shard(index=0, count=2).config(config).shape
    # Room for all but the large one, in each process: that one makes others leave.
    budget = sum(resident_bytes(specs[name], part, torch.float32) for name in ADAPTERS)
    engines = []
    for num_shards in (1, 2):
        options = EngineOptions(
            model=str(root / "base"),
            kv_memory_bytes=1 << 20,
            host_adapter_memory_bytes=budget * (2 if num_shards == 1 else 1),
            max_step_tokens=64,
            runs_ahead=True,  # so that the shards' own tokens count, as on a GPU
            tensor_parallel=num_shards,
        )
        engines.append(build_core(options))
    single, parallel = engines
    yield Served(single=single, parallel=parallel, specs=specs)
    single.close()
    parallel.close()


def run(engine: Engine, requests: dict[str, AdapterSpec | None], **params: Any) -> dict[str, Finished]:
    """One request for each adapter, all in one batch; prompts differ in length."""
    for index, (request_id, spec) in enumerate(requests.items()):
        if spec is not None:
            engine.add_adapter(spec)
        engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=[(7 * i + 13 * index) % VOCAB_SIZE for i in range(5 + 4 * index)],
                params=SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True, **params}),
                adapter=None if spec is None else spec.version,
            )
        )
    return run_to_end(engine)


def tokens_of(done: dict[str, Finished]) -> dict[str, list[int]]:
    return {request_id: request.token_ids for request_id, request in done.items()}


def over_vocabulary(done: Finished) -> torch.Tensor:
    """Log-probabilities of all tokens at each place, prompt and output."""
    assert done.prompt_logprobs is not None
    entries = [*(entry for entry in done.prompt_logprobs if entry is not None), *done.logprobs]
    found_TV = torch.full((len(entries), VOCAB_SIZE), torch.nan)
    for row, entry in enumerate(entries):
        ids, values = zip(*entry.top, strict=True)
        found_TV[row, list(ids)] = torch.tensor(values)
    return found_TV


def test_a_mixed_batch_of_adapters_and_base_equals_one_process(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_LOGPROBS", VOCAB_SIZE)  # clients get 20, this test wants all
    requests: dict[str, AdapterSpec | None] = {name: served.specs[name] for name in ADAPTERS}
    requests |= {"base": None, "longer base": None}
    everything = {"logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE}
    expected = run(served.single, requests, **everything)
    found = run(served.parallel, requests, **everything)
    assert tokens_of(found) == tokens_of(expected)
    assert len({tuple(tokens) for tokens in tokens_of(found).values()}) == len(requests), "adapters do little"
    for request_id, want in expected.items():
        error_TV = (over_vocabulary(found[request_id]) - over_vocabulary(want)).abs()
        assert error_TV.max() <= TOLERANCE, request_id


def test_adapters_leave_and_come_back_in_every_process(served: Served) -> None:
    for names in (list(ADAPTERS), ["large"], list(ADAPTERS)[:2]):
        requests: dict[str, AdapterSpec | None] = {name: served.specs[name] for name in names}
        # The books of both processes are checked after every step.
        assert tokens_of(run(served.parallel, requests)) == tokens_of(run(served.single, requests))
    resident = {adapter.version for adapter in served.parallel.stats().adapters if adapter.tier == "host"}
    assert served.specs["one"].version in resident
    assert len(resident) < len(ADAPTERS) + 1, "nothing had to leave"
    served.parallel.remove_adapter(served.specs["one"].version)
    assert list(served.parallel.take_removed_adapters()) == [served.specs["one"].version]
    served.parallel.check_integrity()


def test_processes_draw_the_same_tokens_without_a_seed(served: Served) -> None:
    spec = served.specs["odd"]
    drawn = run(served.parallel, {"drawn": spec}, temperature=1.5, max_tokens=24, logprobs=0)["drawn"]
    prompt = [(7 * i) % VOCAB_SIZE for i in range(5)]
    # Had a process gone on with another token, its part of the states to come would not fit the text.
    served.single.add_adapter(spec)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    served.single.add_request(
        EngineRequest(
            request_id="scored",
            prompt_token_ids=[*prompt, *drawn.token_ids],
            params=params,
            adapter=spec.version,
        )
    )
    scored = run_to_end(served.single)["scored"].prompt_logprobs
    assert scored is not None
    expected = [entry.logprob for entry in scored[len(prompt) :] if entry is not None]
    assert [entry.logprob for entry in drawn.logprobs] == pytest.approx(expected, abs=TOLERANCE)


def test_an_adapter_whose_files_are_gone_fails_its_request_alone(served: Served) -> None:
    done = run(served.parallel, {"gone": served.specs["gone"], "base": None})
    assert done["gone"].finish_reason is FinishReason.ERROR
    assert "its files cannot be read" in (done["gone"].error or "")
    assert len(done["base"].token_ids) == 10
