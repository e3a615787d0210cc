"""Merged steps of an engine of two processes: each merges its part of the adapter into its part of the
model."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import run_to_end
from merging import Merging
from tiny import ALL_LINEARS, save_adapter, save_model

from loraplex.adapters.merged_layout import touched_bytes
from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config


def test_a_merged_step_of_two_shards_gives_the_unmerged_answer(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    save_adapter(tmp_path / "a", base, rank=8, targets=ALL_LINEARS)
    shape = load_config(tmp_path / "base").shape
    spec = read_adapter(tmp_path / "a", shape)
    engine = build_core(
        EngineOptions(
            model=str(tmp_path / "base"), kv_memory_bytes=1 << 20, tensor_parallel=2, runs_ahead=True
        )
    )
    engine.add_adapter(spec)
    assert engine._executor.merge_bytes(spec) == touched_bytes(spec, shape, 4) // 2
    merging, found = Merging(engine, [spec]), []
    for wanted in (None, spec.version, None):
        merging.wanted = wanted
        engine.add_request(
            EngineRequest(
                request_id="a",
                prompt_token_ids=list(range(20)),
                params=SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True),
                adapter=spec.version,
            )
        )
        found.append(run_to_end(engine)["a"])
        assert (merging.num_merged_steps > 0) == (wanted is not None)
        merging.num_merged_steps = 0
    engine.close()
    before, merged, after = found
    assert before.token_ids == merged.token_ids == after.token_ids
    values = [[entry.logprob for entry in done.logprobs] for done in found]
    assert values[0] != values[1]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert values[0] == pytest.approx(values[2], abs=1e-4)
