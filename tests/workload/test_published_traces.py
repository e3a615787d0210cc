"""The published files themselves, if they are beside the repository, or where LORAPLEX_DATA says."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from workload_counts import count_workload

from loraplex.workload.build import make_workload
from loraplex.workload.papers import paper_workload
from loraplex.workload.recipe import ArrivalKind, LengthKind, PopularityKind, Recipe, Source
from loraplex.workload.summary import summarize

DATA = Path(os.environ.get("LORAPLEX_DATA", Path(__file__).parents[3] / "shared" / "data"))
TRACES, LENGTHS = DATA / "traces", DATA / "lengths"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not here")


@pytest.mark.parametrize(
    ("source", "name", "options", "expected"),
    [
        (Source.AZURE, "azure_llm_2023_code", {}, (8_819, 2.567)),
        (Source.AZURE, "azure_llm_2023_conv", {}, (19_366, 5.530)),
        (Source.VTC, "vtc_lmsys_arena_27clients", {}, (1_500, 2.5)),
        pytest.param(
            Source.MAF,
            "maf2019_1000fn_1day_sparse",
            {"duration_s": 60.0, "rate": 50.0},
            (3_000, 50.0),
            marks=pytest.mark.slow,
        ),
        (Source.SERVEGEN, "servegen_m-small_client_rates", {"duration_s": 600.0, "rate": 5.0}, (3_000, 5.0)),
        pytest.param(
            Source.SERVEGEN,
            "servegen_m-mid_client_rates",
            {"duration_s": 600.0, "rate": 5.0},
            (3_000, 5.0),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_traces(source: Source, name: str, options: dict[str, Any], expected: tuple[int, float]) -> None:
    workload = make_workload(Recipe(source=source, trace=TRACES / f"{name}.csv.gz", **options))
    summary = summarize(count_workload(workload))
    assert summary.num_requests == pytest.approx(expected[0], rel=0.02 if options else 0)
    assert summary.rate_per_s == pytest.approx(expected[1], rel=0.02)


def test_the_code_trace_is_bursty_and_the_other_nearly_poisson() -> None:
    def gap_cv(name: str) -> float | None:
        recipe = Recipe(arrivals=ArrivalKind.REPLAY, replay=TRACES / f"azure_llm_2023_{name}.csv.gz")
        return summarize(count_workload(make_workload(recipe))).gap_cv

    assert gap_cv("code") == pytest.approx(13, abs=1)
    assert gap_cv("conv") == pytest.approx(1.1, abs=0.2)


@pytest.mark.parametrize(
    ("name", "mean_output"),
    [
        ("sharegpt_8k_lengths", 439),
        ("arxiv_summarization_lengths", 291),
        ("lmsys_vicuna13b_output_lengths", 177),
        ("servegen_m-mid_client_length_quantiles", 270),
    ],
)
def test_lengths(name: str, mean_output: float) -> None:
    recipe = Recipe(
        num_requests=20_000, lengths=LengthKind.EMPIRICAL, lengths_file=LENGTHS / f"{name}.csv.gz"
    )
    summary = summarize(count_workload(make_workload(recipe)))
    assert summary.output.mean == pytest.approx(mean_output, rel=0.05)


@pytest.mark.parametrize("name", ["maf2019_1000fn_totals", "maf2019_1000fn_1day_sparse"])
def test_popularity_like_azure_functions(name: str) -> None:
    recipe = Recipe(
        rate=340,
        duration_s=60,
        num_adapters=1_000,
        popularity=PopularityKind.TRACE,
        popularity_file=TRACES / f"{name}.csv.gz",
    )
    adapters = [request.adapter for request in islice(make_workload(recipe), 20_000)]
    assert sum(adapter < 10 for adapter in adapters) / len(adapters) == pytest.approx(0.46, abs=0.02)


@pytest.mark.parametrize("name", ["toppings-60-servers", "loraserve-production", "dlora-bursty", "servegen"])
def test_stand_ins_are_like_the_published_files(name: str) -> None:
    duration_s = 60 if name == "toppings-60-servers" else 600
    published, stand_in = (
        summarize(count_workload(paper_workload(name, data=data, duration_s=duration_s)))
        for data in (DATA, None)
    )
    assert stand_in.num_adapters == published.num_adapters
    assert stand_in.rate_per_s == pytest.approx(published.rate_per_s, rel=0.1)
    assert stand_in.prompt.mean == pytest.approx(published.prompt.mean, rel=0.1)
    assert stand_in.output.mean == pytest.approx(published.output.mean, rel=0.1)
    assert stand_in.busiest_tenth_share == pytest.approx(published.busiest_tenth_share, abs=0.2)
