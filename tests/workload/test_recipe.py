"""Workloads made of recipes: the same for the same seed, saved or not, and never all at once."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_counts import count_workload

from loraplex.workload import Workload, WorkloadFile, WorkloadRequest, save_workload
from loraplex.workload.build import make_workload
from loraplex.workload.recipe import ArrivalKind, LengthKind, PopularityKind, Recipe, RecipeError, Source
from loraplex.workload.summary import summarize

DRAWN = st.sampled_from(["poisson", "gamma", "log-normal", "regular"]).map(ArrivalKind)
SHARES = st.sampled_from([kind for kind in PopularityKind if kind is not PopularityKind.TRACE])


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any that needs no file."""
    popularity = draw(SHARES)
    changes = popularity not in (PopularityKind.SHIFTING, PopularityKind.IN_TURN) and draw(st.booleans())
    return Recipe(
        seed=draw(st.integers(0, 2**40)),
        duration_s=draw(st.floats(1, 60)),
        num_requests=draw(st.none() | st.integers(1, 400)),
        rate=draw(st.floats(1, 100)),
        arrivals=ArrivalKind.POISSON if changes else draw(DRAWN),
        change_every_s=draw(st.floats(0.5, 20)) if changes else None,
        num_adapters=draw(st.integers(2, 50)),
        ranks="8:2,16,64",
        popularity=popularity,
        lengths=draw(st.sampled_from([LengthKind.FIXED, LengthKind.LOG_NORMAL])),
        prompt_tokens=draw(st.integers(1, 1_000)),
        max_output_tokens=draw(st.integers(117, 2_000)),
    )


@given(recipe=recipes())
@settings(max_examples=examples(15, 30))
def test_a_recipe_makes_the_same_valid_workload_every_time(
    recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workload = make_workload(recipe)
    requests = list(workload)
    assert requests == list(workload) == list(make_workload(recipe))
    assert len(requests) <= (recipe.num_requests or len(requests))
    assert all(request.arrival_s < (recipe.duration_s or 0) for request in requests)
    if requests:  # the reader's checks are those of the format: order, lengths, adapters
        folder = tmp_path_factory.mktemp("recipe")
        save_workload(folder / "a.jsonl", workload)
        save_workload(folder / "b.jsonl", make_workload(recipe))
        assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()
        saved = WorkloadFile(folder / "a.jsonl")
        assert list(saved) == requests
        assert saved.header == workload.header


def drawn(**options: Any) -> list[WorkloadRequest]:
    return list(make_workload(Recipe(**options)))


def test_another_seed_is_another_workload_and_other_lengths_are_the_same_arrivals() -> None:
    first, other = drawn(seed=1), drawn(seed=2)
    assert first != other
    longer = drawn(seed=1, lengths=LengthKind.FIXED, prompt_tokens=900)
    assert [(each.arrival_s, each.adapter) for each in first] == [
        (each.arrival_s, each.adapter) for each in longer
    ]
    assert {each.prompt_tokens for each in longer} == {900}


def test_the_defaults_are_a_sound_workload() -> None:
    workload = make_workload(Recipe(duration_s=600))
    summary = summarize(count_workload(workload))
    assert summary.rate_per_s == pytest.approx(10, rel=0.1)
    assert summary.gap_cv == pytest.approx(1, rel=0.1)
    assert summary.prompt.mean == pytest.approx(120, rel=0.1)
    assert summary.output.mean == pytest.approx(155, rel=0.1)
    assert summary.num_adapters == summary.num_adapters_used == 32
    assert make_workload(Recipe()).header.duration_s == 60  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"popularity": PopularityKind.TRACE, "popularity_file": Path("totals.csv")},
        {"change_every_s": 20.0},
        {"rates": "1,2,3"},
    ],
)
def test_a_million_requests_are_never_held_at_once(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("totals.csv").write_text("function,total\na,100\nb,10\nc,1\n")
    rate = {} if "rates" in options else {"rate": 5_000.0}
    workload = make_workload(Recipe(num_requests=1_000_000, **rate, **options))
    tracemalloc.start()
    try:
        taken = sum(1 for _ in islice(workload, 60_000))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken == 60_000
    assert peak_bytes < 4 << 20


@pytest.mark.slow
def test_a_trace_is_not_held_at_once(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    with path.open("w") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        file.writelines(f"{number},7,3\n" for number in range(50_000))
    tracemalloc.start()
    try:
        taken = sum(1 for _ in make_workload(Recipe(source=Source.AZURE, trace=path)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken == 50_000
    assert peak_bytes < 8 << 20


def test_rates_of_single_adapters_are_shared_out_exactly() -> None:
    options = {"rates": "1.6,0.8,0.4", "num_adapters": 9, "duration_s": 2_000.0}
    counts = Counter(request.adapter for request in drawn(**options))
    found = sorted(count / 2_000 for count in counts.values())
    assert found == pytest.approx([0.4] * 3 + [0.8] * 3 + [1.6] * 3, rel=0.2)


def test_a_skew_that_shifts_is_at_its_end_when_the_workload_is() -> None:
    for end in ({"duration_s": 400.0}, {"num_requests": 20_000}):
        workload = make_workload(
            Recipe(
                rate=50, ranks="8,16,32,64,128", num_adapters=25, popularity=PopularityKind.SHIFTING, **end
            )
        )
        hot = [_rank_shares(workload, part)[128] for part in (slice(0, 2_000), slice(18_000, 20_000))]
        assert hot == pytest.approx([0.48, 0.14], abs=0.05)


def _rank_shares(workload: Workload, part: slice) -> dict[int, float]:
    assert workload.header is not None
    ranks = [workload.header.ranks[request.adapter] for request in workload][part]
    return {rank: count / len(ranks) for rank, count in Counter(ranks).items()}


def test_lengths_of_a_file(tmp_path: Path) -> None:
    pairs, outputs = tmp_path / "pairs.csv", tmp_path / "outputs.csv"
    pairs.write_text("prompt_tokens,output_tokens\n74,918\n290,905\n")
    outputs.write_text("output_tokens\n40\n")
    empirical = {"lengths": LengthKind.EMPIRICAL}
    found = {
        (each.prompt_tokens, each.output_tokens)
        for each in drawn(lengths_file=pairs, max_prompt_tokens=50, **empirical)
    }
    assert found == {(50, 918), (50, 905)}
    prompts = [each.prompt_tokens for each in drawn(lengths_file=outputs, prompt_tokens=20, **empirical)]
    assert np.median(prompts) == pytest.approx(20, abs=3)
    with pytest.raises(RecipeError, match="prompt_tokens: has no effect"):
        drawn(lengths_file=pairs, prompt_tokens=20, **empirical)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"duration_s": 0.0}, "duration_s"),
        ({"duration_s": float("inf")}, "duration_s"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"num_requests": 0}, "num_requests"),
        ({"num_adapters": 0}, "num_adapters"),
        ({"prompt_tokens": -5}, "prompt_tokens"),
        ({"prompt_tokens": 2000}, "prompt_tokens"),
        ({"output_tokens": 513}, "output_tokens"),
        ({"max_output_tokens": 32}, "max_output_tokens"),
        ({"max_prompt_tokens": 32, "prompt_tokens": 33}, "prompt_tokens"),
        ({"prompt_sigma": -1.0}, "prompt_sigma"),
        ({"ranks": "8,x"}, "ranks"),
        ({"ranks": "0"}, "ranks"),
        ({"rates": "0"}, "rates"),
        ({"skew": 2.0}, "skew"),
        ({"popularity": PopularityKind.ZIPF, "skew": -1.0}, "skew"),
        ({"popularity": PopularityKind.SHIFTING}, "ranks"),
        ({"popularity": PopularityKind.TRACE}, "popularity_file"),
        ({"popularity_file": Path("x")}, "popularity_file"),
        ({"cv": 2.0}, "cv"),
        ({"arrivals": ArrivalKind.GAMMA, "cv": 1e6}, "cv"),
        ({"arrivals": ArrivalKind.REPLAY}, "replay"),
        ({"replay": Path("x")}, "replay"),
        ({"rates": "1", "rate": 2.0}, "rate"),
        ({"rates": "1", "popularity": PopularityKind.ZIPF}, "popularity"),
        ({"change_factor": 2.0}, "change_factor"),
        ({"change_every_s": 9.0, "change_factor": 0.5}, "change_every_s"),
        ({"change_every_s": 9.0, "arrivals": ArrivalKind.GAMMA}, "change_every_s"),
        ({"change_every_s": 9.0, "popularity": PopularityKind.IN_TURN}, "change_every_s"),
        ({"lengths": LengthKind.EMPIRICAL}, "lengths_file"),
        ({"lengths_file": Path("x")}, "lengths_file"),
        ({"lengths": LengthKind.FIXED, "prompt_sigma": 1.0}, "prompt_sigma"),
        ({"start_s": 5.0}, "start_s"),
        ({"functions_per_adapter": 5}, "functions_per_adapter"),
        ({"source": Source.AZURE}, "trace"),
        ({"source": Source.AZURE, "trace": Path("x"), "prompt_tokens": 5}, "prompt_tokens"),
        ({"source": Source.MAF, "trace": Path("x"), "arrivals": ArrivalKind.GAMMA}, "arrivals"),
        ({"source": Source.VTC, "trace": Path("x"), "popularity": PopularityKind.ZIPF}, "popularity"),
        ({"source": Source.MAF, "trace": Path("x"), "functions_per_adapter": 2}, "num_adapters"),
    ],
)
def test_an_option_that_is_wrong_or_has_no_effect_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_workload(Recipe(**options))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_output_tokens": 32},
            "max_output_tokens: 32 is below the median, --output-tokens 117, its default; give that as well",
        ),
        (
            {"output_tokens": 600},
            "output_tokens: a median of 600 is above --max-output-tokens 512, its default",
        ),
        (
            {"prompt_tokens": 40, "max_prompt_tokens": 30},
            "prompt_tokens: a median of 40 is above --max-prompt-tokens 30",
        ),
    ],
)
def test_of_two_lengths_that_conflict_the_one_given_is_refused_and_the_other_named(
    options: dict[str, int], words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        make_workload(Recipe(**options))
    assert str(caught.value) == words


def test_a_start_after_the_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,7,3\n")
    with pytest.raises(RecipeError, match="start_s"):
        make_workload(Recipe(source=Source.AZURE, trace=path, start_s=2.0))
