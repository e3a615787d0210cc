"""Adapters against PEFT: in one mixed batch, what each request gets alone in transformers.

At every token of an answer the same log-probabilities over the whole vocabulary, and PEFT chooses that token
after those before it: so it is PEFT's greedy answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Finished, run_to_end
from tiny import ALL_LINEARS, ATTENTION, SIZES, load_adapter, save_adapter, save_model
from transformers import PreTrainedModel

from loraplex.adapters.peft_reader import read_adapter
from loraplex.core import sampling
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.executor import Flight
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config
from loraplex.scheduling.plan import StepPlan

RANKS = [1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 40, 48, 63, 64]
TARGETS = [
    ALL_LINEARS,
    ATTENTION,
    ["q_proj", "v_proj"],
    ["down_proj"],
    ["o_proj", "gate_proj"],
    r".*layers\.(0|2)\..*(q|up)_proj",
]
NUM_TOKENS = 32
VOCAB_SIZE = SIZES["vocab_size"]
TOLERANCE = 2e-4
"""The largest error at every position, as a share of the largest logit."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request; None is the base model."""

    adapter: Path | None
    prompt: list[int]


class Reference:
    """PEFT's answers to requests that the engine has answered."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, asked: Asked, token_ids: list[int]) -> torch.Tensor:
        """Return the logits that each token of an answer is chosen by (T = NUM_TOKENS, V = VOCAB_SIZE)."""
        key = (*asked.prompt, *token_ids)  # no two requests have the same prompt
        if key not in self._known:
            if asked.adapter is None:
                self._known[key] = self._run(self._base, asked.prompt, token_ids)
            else:
                with_adapter = load_adapter(self._base, asked.adapter)
                self._known[key] = self._run(with_adapter, asked.prompt, token_ids)
                with_adapter.unload()
        return self._known[key]

    def _run(self, model: Any, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits_TV: torch.Tensor = model(input_ids=torch.tensor([prompt + token_ids])).logits[0]
        return logits_TV[len(prompt) - 1 : -1]


def worst_error(found_TV: torch.Tensor, logits_TV: torch.Tensor) -> float:
    """The largest difference of log-probabilities, in units of the largest logit at its position."""
    error_TV = (found_TV - torch.log_softmax(logits_TV, dim=-1)).abs()
    return float((error_TV.amax(dim=-1) / logits_TV.abs().amax(dim=-1)).max())


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Asked], Reference]:
    """(model folder, {request id: what it asks for}, what is expected)"""
    root = tmp_path_factory.mktemp(f"peft-{request.param}")
    base = save_model(root / "base", request.param, eos_token_id=None)
    prompts = [[(7 * i + 13 * n) % 256 for i in range(5 + 4 * n)] for n in range(len(RANKS) + 2)]
    asked: dict[str, Asked] = {}
    for index, rank in enumerate(RANKS):
        folder = root / f"adapter-{rank}"
        settings = {"use_rslora": True} if index % 3 == 1 else {}
        if index % len(TARGETS) in (1, 2):
            settings |= {"rank_pattern": {"q_proj": rank + 3}, "alpha_pattern": {"v_proj": 5}}
        save_adapter(folder, base, rank=rank, targets=TARGETS[index % len(TARGETS)], seed=rank, **settings)
        asked[f"r{rank}"] = Asked(adapter=folder, prompt=prompts[index])
    for index in (len(RANKS), len(RANKS) + 1):
        asked[f"base{index}"] = Asked(adapter=None, prompt=prompts[index])
    return root / "base", asked, Reference(base)


def add_adapters(engine: Engine, model: Path, asked: dict[str, Asked]) -> dict[str, str | None]:
    """Request id -> adapter version. All are in memory after it: no request below waits for one to load."""
    shape = load_config(model).shape
    versions: dict[str, str | None] = {}
    for request_id, want in asked.items():
        versions[request_id] = None
        if want.adapter is not None:
            spec = read_adapter(want.adapter, shape)
            engine.add_adapter(spec)
            versions[request_id] = spec.version
            once = SamplingParams(max_tokens=1)
            engine.add_request(
                EngineRequest(
                    request_id=f"load {request_id}", prompt_token_ids=[1], params=once, adapter=spec.version
                )
            )
    run_to_end(engine)
    return versions


def record_plans(engine: Engine) -> list[StepPlan]:
    plans: list[StepPlan] = []
    launch = engine._executor.launch

    def recorded(plan: StepPlan) -> Flight:
        plans.append(plan)
        return launch(plan)

    engine._executor.launch = recorded  # type: ignore[method-assign]
    return plans


def vocabulary_logprobs(done: Finished) -> torch.Tensor:
    """Return the engine's values for each token of a request, in the order of the vocabulary."""
    found_TV = torch.full((len(done.logprobs), VOCAB_SIZE), torch.nan)
    for row, logprob in enumerate(done.logprobs):
        ids, values = zip(*logprob.top, strict=True)
        found_TV[row, list(ids)] = torch.tensor(values)
    return found_TV


@pytest.mark.parametrize("max_step_tokens", [2048, 48], ids=["whole prompts", "chunked prompts"])
def test_mixed_batch_of_sixteen_adapters_and_base_equals_peft(
    served: tuple[Path, dict[str, Asked], Reference], max_step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, reference = served
    monkeypatch.setattr(sampling, "MAX_LOGPROBS", VOCAB_SIZE)  # clients get 20, this test wants all
    engine = build_core(
        EngineOptions(
            model=str(folder), dtype="float32", kv_memory_bytes=1 << 24, max_step_tokens=max_step_tokens
        )
    )
    versions = add_adapters(engine, folder, asked)
    plans = record_plans(engine)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=VOCAB_SIZE)
    for request_id, want in asked.items():
        engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=want.prompt,
                params=params,
                adapter=versions[request_id],
            )
        )
    found = run_to_end(engine)
    engine.close()

    most_requests = max(len(plan.chunks) for plan in plans)
    assert most_requests == len(asked), "the requests never shared one batch"
    has_partial_prompts = any(not chunk.samples for plan in plans for chunk in plan.chunks)
    assert has_partial_prompts == (max_step_tokens == 48)
    assert {key: len(done.token_ids) for key, done in found.items()} == dict.fromkeys(asked, NUM_TOKENS)
    expected = {key: reference.logits(want, found[key].token_ids) for key, want in asked.items()}
    assert {key: done.token_ids for key, done in found.items()} == {
        key: logits_TV.argmax(dim=-1).tolist() for key, logits_TV in expected.items()
    }
    errors = {
        key: worst_error(vocabulary_logprobs(found[key]), logits_TV) for key, logits_TV in expected.items()
    }
    # Not `error > TOLERANCE`: nan, a token the engine left out, must be wrong too.
    assert {key: error for key, error in errors.items() if not error <= TOLERANCE} == {}
