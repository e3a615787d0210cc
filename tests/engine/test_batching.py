"""An engine with a batching policy: the same texts, and words where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import run_to_end
from serving_fakes import hf_tokenizer
from tiny import ALL_LINEARS, save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.batching import Batching, DelayBound
from loraplex.core.errors import ModelError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.llm import LLM
from loraplex.engine.options import EngineOptions
from loraplex.kernels.cpu.numba_kernels import NumbaKernels
from loraplex.model.config import load_config

Served = tuple[Path, list[AdapterSpec]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("batching")
    base = save_model(root / "base", num_hidden_layers=2, eos_token_id=None)
    shape = load_config(root / "base").shape
    specs = []
    for name, targets in (("all", ALL_LINEARS), ("query", ["q_proj"])):
        save_adapter(root / name, base, rank=8, targets=targets, seed=len(name))
        specs.append(read_adapter(root / name, shape))
    return root / "base", specs


def texts(served: Served, batching: Batching, **options: object) -> tuple[dict[str, list[int]], int, int]:
    """Return the tokens of each request, and how many merges and merged steps there were."""
    folder, specs = served
    made = EngineOptions(model=str(folder), batching=batching, max_running=3, **options)  # type: ignore[arg-type]
    engine = build_core(made)
    for spec in specs:
        engine.add_adapter(spec)
    for number in range(9):
        engine.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[(number + 7 * index) % 256 for index in range(5 + number)],
                params=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
                adapter=[None, specs[0].version, specs[1].version][number % 3],
            )
        )
    found = {request_id: done.token_ids for request_id, done in run_to_end(engine).items()}
    stats = engine.stats()
    engine.check_integrity()
    engine.close()
    return found, stats.num_merges, stats.num_merged_steps


@pytest.mark.parametrize("batching", [each for each in Batching if each is not Batching.FCFS])
def test_every_policy_gives_the_same_texts(served: Served, batching: Batching) -> None:
    expected, _, _ = texts(served, Batching.FCFS)
    found, _, _ = texts(served, batching)
    assert found == expected


def test_merged_runs_each_adapter_on_weights_of_its_own(served: Served) -> None:
    _, num_merges, num_merged_steps = texts(served, Batching.MERGED)
    assert num_merges == 2, "all requests on an adapter run together"
    assert num_merged_steps >= 2 * 6


def test_merged_without_any_adapter_in_use_is_the_base_model(served: Served) -> None:
    engine = build_core(EngineOptions(model=str(served[0]), batching=Batching.MERGED))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
    assert len(run_to_end(engine)["a"].token_ids) == 4
    assert engine.stats().num_merged_steps == 0
    engine.close()


@pytest.mark.slow
def test_two_shards_merge_their_parts(served: Served) -> None:
    expected, _, _ = texts(served, Batching.FCFS)
    found, num_merges, _ = texts(served, Batching.MERGED, tensor_parallel=2)
    assert found == expected
    assert num_merges > 0


@pytest.mark.parametrize("batching", [Batching.MERGED, Batching.DYNAMIC])
def test_an_engine_that_cannot_merge_refuses_policies_that_need_it(
    served: Served, batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumbaKernels, "why_not_merged", "its weights cannot be unpacked")
    with pytest.raises(ModelError, match="cannot be unpacked; choose fcfs, grouped or auto"):
        texts(served, batching)


def test_auto_goes_on_unmerged_where_merging_is_not_possible(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, _ = texts(served, Batching.FCFS)
    monkeypatch.setattr(NumbaKernels, "why_not_merged", "its weights cannot be unpacked")
    found, num_merges, _ = texts(served, Batching.AUTO)
    assert found == expected
    assert num_merges == 0


def test_adapters_whose_merged_weights_do_not_fit_run_unmerged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _, _ = texts(served, Batching.FCFS)
    budget = 2 * sum(spec.num_params * 4 for spec in served[1])
    found, num_merges, _ = texts(served, Batching.MERGED, host_adapter_memory_bytes=budget)
    assert found == expected
    assert num_merges == 1, "those of the other adapter are smaller"
    assert f"adapter all (version {served[1][0].version[:12]}) runs unmerged: its merged" in caplog.text
    assert "raise --host-adapter-memory, or choose --batching fcfs" in caplog.text


def test_an_llm_batches_by_the_policy_that_it_is_given(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", vocab_size=400, eos_token_id=None)
    hf_tokenizer().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "one", base, rank=8)
    prompts, params = ["w5 w6 w7"] * 4, SamplingParams(max_tokens=8, temperature=0.0)
    found = {}
    for batching, bound in (("fcfs", None), ("auto", "10%,1s"), ("merged", None)):
        with LLM(
            tmp_path / "base", adapters=[tmp_path / "one"], batching=batching, max_delay_by_grouping=bound
        ) as llm:
            found[batching] = [each.text for each in llm.generate(prompts, adapter="one", params=params)]
            engine = llm._engine._core
            assert isinstance(engine, Engine)
            if batching == "merged":
                assert engine.stats().num_merged_steps > 0
            if batching == "fcfs":
                assert engine.stats().num_merged_steps == 0
            expected = DelayBound() if bound is None else DelayBound(share=0.1, seconds=1.0)
            assert engine._scheduler._config.max_delay == expected
    assert found["auto"] == found["merged"] == found["fcfs"]
