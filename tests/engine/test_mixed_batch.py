"""Adapters against PEFT: one mixed batch, the same greedy tokens as each request alone in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driving import run_to_end
from tiny import ALL_LINEARS, ATTENTION, load_adapter, save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import EngineOptions, build_core
from loraplex.engine.executor import StepResult
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
NUM_TOKENS = 64


def greedy(model, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        tokens = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(model folder, adapter folders, {name or None: (prompt, expected tokens)})"""
    root = tmp_path_factory.mktemp(f"peft-{request.param}")
    # eos_token_id None: transformers' min_new_tokens would otherwise suppress a token that we do not.
    base = save_model(root / "base", request.param, eos_token_id=None)
    prompts = [[(7 * i + 13 * n) % 256 for i in range(5 + 4 * n)] for n in range(len(RANKS) + 2)]
    expected: dict[str, tuple[Path | None, list[int], list[int]]] = {}
    for index, rank in enumerate(RANKS):
        folder = root / f"adapter-{rank}"
        settings = {"use_rslora": True} if index % 3 == 1 else {}
        if index % len(TARGETS) in (1, 2):
            settings |= {"rank_pattern": {"q_proj": rank + 3}, "alpha_pattern": {"v_proj": 5}}
        save_adapter(folder, base, rank=rank, targets=TARGETS[index % len(TARGETS)], seed=rank, **settings)
        with_adapter = load_adapter(base, folder)
        expected[f"r{rank}"] = (folder, prompts[index], greedy(with_adapter, prompts[index]))
        with_adapter.unload()
    for index in (len(RANKS), len(RANKS) + 1):
        expected[f"base{index}"] = (None, prompts[index], greedy(base, prompts[index]))
    return root / "base", expected


@pytest.mark.parametrize("max_step_tokens", [2048, 24], ids=["whole prompts", "chunked prompts"])
def test_mixed_batch_of_sixteen_adapters_and_base_equals_peft(served, max_step_tokens: int) -> None:
    folder, expected = served
    engine = build_core(
        EngineOptions(model=str(folder), kv_memory_bytes=1 << 24, max_step_tokens=max_step_tokens)
    )
    shape = load_config(folder).shape
    for request_id, (adapter, prompt, _) in expected.items():
        version = None
        if adapter is not None:
            spec = read_adapter(adapter, shape)
            engine.add_adapter(spec)
            version = spec.version
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, adapter=version)
        )
    requests_per_step: list[int] = []
    execute = engine._executor.execute

    def recorded(plan: StepPlan) -> StepResult:
        requests_per_step.append(len(plan.chunks))
        return execute(plan)

    engine._executor.execute = recorded  # type: ignore[method-assign]
    found = run_to_end(engine)
    engine.close()
    assert max(requests_per_step) == len(expected), "the requests never shared one batch"
    assert {key: done.token_ids for key, done in found.items()} == {
        key: tokens for key, (_, _, tokens) in expected.items()
    }
