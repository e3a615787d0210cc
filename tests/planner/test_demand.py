"""Demands read from tables and workload files, and the requests drawn for them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from loraplex.planner.adapter_table import read_table, read_workload_demand
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.traffic import LengthsOf, draw_requests
from loraplex.workload.jsonl import write_workload
from loraplex.workload.request import WorkloadHeader, WorkloadRequest

TABLE = "name,rank,rate_rps\nchat,16,0.5\nlaw,64,0.25\n"
ADAPTERS = tuple(AdapterDemand(name=name, rank=8, rate_rps=rate) for name, rate in (("a", 2.0), ("b", 0.5)))
DEMAND = Demand(adapters=ADAPTERS, prompt_tokens=100, output_tokens=50)


def table(folder: Path, text: str) -> Path:
    path = folder / "adapters.csv"
    path.write_text(text)
    return path


def test_a_table_says_ranks_and_rates(tmp_path: Path) -> None:
    found = read_table(table(tmp_path, TABLE), prompt_tokens=200, output_tokens=100)
    assert found.adapters == (
        AdapterDemand(name="chat", rank=16, rate_rps=0.5),
        AdapterDemand(name="law", rank=64, rate_rps=0.25),
    )
    assert found.offered_tok_s(found.adapters) == pytest.approx(0.75 * 300)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,rank\nchat,16\n", "no column 'rate_rps'"),
        ("", "no column 'name'"),
        ("name,rank,rate_rps\n", "no adapter in it"),
        ("name,rank,rate_rps\n,16,1\n", "line 2: the adapter has no name"),
        ("name,rank,rate_rps\nchat,,1\n", "line 2, adapter 'chat': there is no rank"),
        ("name,rank,rate_rps\nchat,16\n", "there is no rate_rps"),
        (
            "name,rank,rate_rps\nchat,1.5,1\n",
            "is not a whole number above 0; give the .r. of its adapter_config",
        ),
        (
            "name,rank,rate_rps\nchat,0,1\n",
            "is not a whole number above 0; give the .r. of its adapter_config",
        ),
        ("name,rank,rate_rps\nchat,16,fast\n", "rate_rps 'fast' is not a number"),
        ("name,rank,rate_rps\nchat,16,nan\n", "is not finite"),
        ("name,rank,rate_rps\nchat,16,-1\n", "below 0"),
        ("name,rank,rate_rps\nchat,16,1e300\n", "'chat' has 1e.300 requests per second, more than any GPU"),
        (TABLE + "chat,8,1\n", "line 4: adapter 'chat' is there twice"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("'", ".")):
        read_table(table(tmp_path, text), prompt_tokens=1, output_tokens=1)


def test_a_workload_shows_rates_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    requests = [
        WorkloadRequest(arrival_s=at_s, prompt_tokens=prompt, output_tokens=20, adapter=adapter)
        for at_s, prompt, adapter in ((0.0, 10, 0), (2.0, 30, 0), (5.0, 20, 1))
    ]
    write_workload(path, requests, WorkloadHeader(ranks=(8, 32, 16), duration_s=10.0))
    found = read_workload_demand(path)
    assert [(each.rank, each.rate_rps) for each in found.adapters] == [(8, 0.2), (32, 0.1), (16, 0.0)]
    assert (found.prompt_tokens, found.output_tokens) == (20, 20)


def test_a_workload_without_ranks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"arrival_s": 0.5, "prompt_tokens": 1, "output_tokens": 1, "adapter": 0}\n')
    with pytest.raises(PlanError, match="has no header"):
        read_workload_demand(path)


def test_requests_come_at_the_rates_with_the_mean_lengths() -> None:
    found = draw_requests(DEMAND, ADAPTERS, duration_s=4000, seed=3, lengths=LengthsOf.DRAWN)
    counts = np.bincount([each.adapter for each in found])
    assert counts / 4000 == pytest.approx([2.0, 0.5], rel=0.1)
    assert np.mean([each.prompt_tokens for each in found]) == pytest.approx(100, rel=0.05)
    assert np.mean([each.output_tokens for each in found]) == pytest.approx(50, rel=0.05)
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(found))
    mean = draw_requests(DEMAND, ADAPTERS, duration_s=100, seed=3, lengths=LengthsOf.MEAN)
    assert {(each.prompt_tokens, each.output_tokens) for each in mean} == {(100, 50)}


def test_an_adapter_has_the_same_requests_wherever_it_is() -> None:
    def of_b(adapters: tuple[AdapterDemand, ...]) -> list[float]:
        number = [each.name for each in adapters].index("b")
        found = draw_requests(DEMAND, adapters, duration_s=100, seed=1, lengths=LengthsOf.DRAWN)
        return [each.arrival_s for each in found if each.adapter == number]

    assert of_b(ADAPTERS) == of_b(ADAPTERS[1:])
    assert of_b(ADAPTERS)
