"""The workloads of the papers by name: what they promise, with published files and without."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner
from workload_counts import count_workload

from loraplex.cli.main import app
from loraplex.workload import Workload, WorkloadFile, WorkloadHeader
from loraplex.workload.papers import NAMED, find_paper, paper_workload
from loraplex.workload.recipe import MadeFrom, RecipeError
from loraplex.workload.summary import summarize

FOUR, FIVE = {8, 16, 32, 64}, {8, 16, 32, 64, 128}
# (adapters, their ranks, requests per second)
PROMISED: dict[str, tuple[int, set[int], float]] = {
    "toppings-60-servers": (40_000, FOUR, 340),
    "toppings-8-servers": (200, FOUR, 40),
    "toppings-scaled-production": (512, {64}, 7.7),
    "toppings-synthetic": (200, {64}, 9),
    "caraserve-60-servers": (40_000, FOUR, 340),
    "caraserve-8-servers": (40_000, FOUR, 60),
    "loraserve-regular-uniform": (25, FIVE, 32),
    "loraserve-regular-shifting": (25, FIVE, 32),
    "loraserve-regular-exponential": (25, FIVE, 32),
    "loraserve-poisson-uniform": (25, FIVE, 32),
    "loraserve-poisson-shifting": (25, FIVE, 32),
    "loraserve-poisson-exponential": (25, FIVE, 32),
    "loraserve-rank-skew-mild": (100, FIVE, 36),
    "loraserve-rank-skew": (100, FIVE, 36),
    "loraserve-rank-skew-strong": (100, FIVE, 36),
    "loraserve-production": (100, FIVE, 30),
    "dlora-bursty": (32, {8}, 16),
    "dlora-skewed": (32, {8}, 8),
    "adapter-twin-predictable": (96, {8, 16, 32}, 96 * 2.8 / 3),
    "adapter-twin-unpredictable": (128, {8}, 128 * 0.175 / 3),
    "maf": (1_000, FOUR, 50),
    "servegen": (108, FOUR, 50),
}
WITHOUT_FILES = {"adapter-twin-predictable", "adapter-twin-unpredictable"}


def test_every_name_has_words_and_is_tested_here() -> None:
    assert NAMED.keys() == PROMISED.keys()
    for name, each in NAMED.items():
        assert each.name == name
        assert all((each.paper, each.what, each.differs))
    page = Path(__file__).parents[2] / "docs" / "workloads.md"
    assert [name for name in NAMED if f"`{name}`" not in page.read_text()] == []


@pytest.mark.parametrize("name", PROMISED)
def test_without_data_it_has_the_adapters_ranks_and_rate_it_promises(name: str) -> None:
    num_adapters, ranks, rate = PROMISED[name]
    workload = paper_workload(name, duration_s=min(8_000 / rate, 300), seed=3)
    header = header_of(workload)
    assert header.num_adapters == num_adapters
    assert set(header.ranks) == ranks
    assert header.recipe["paper"] == name
    assert header.recipe["made_from"] == MadeFrom.STAND_INS
    summary = summarize(count_workload(workload))
    assert summary.rate_per_s == pytest.approx(rate, rel=0.12)
    assert summary.prompt.most <= 3072
    assert summary.output.most <= 1024


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the published one, with short files."""
    folder = tmp_path_factory.mktemp("data")
    functions = [f"F{number:04}" for number in range(1_000)]
    for name, columns, rows in (
        ("traces/maf2019_1000fn_totals", "function,total", [f"{each},{each[1:]}" for each in functions]),
        (
            "traces/maf2019_1000fn_1day_sparse",
            "function,minute,count",
            [f"{each},{minute},2" for minute in (720, 721) for each in functions],
        ),
        (
            "traces/servegen_m-mid_client_rates",
            "client,t_s,rate,pattern,p1",
            [f"{client},36000,1.5,Gamma,0.5" for client in range(108)],
        ),
        (
            "traces/azure_llm_2023_conv",
            "arrival_s,prompt_tokens,output_tokens",
            ["0.5,700,70", "1.5,9000,9000"],
        ),
        ("lengths/lmsys_vicuna13b_output_lengths", "output_tokens", ["77"]),
        (
            "lengths/servegen_m-mid_client_length_quantiles",
            ",".join(
                f"{side}_{level}"
                for side in ("in", "out")
                for level in ("p5", "p25", "p50", "p75", "p90", "p95", "p99", "max")
            ),
            [",".join(["33"] * 16)],
        ),
    ):
        path = folder / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join((columns, *rows, "")))
    return folder


@pytest.mark.parametrize("name", [name for name in PROMISED if name not in WITHOUT_FILES])
def test_with_data_it_is_made_from_published_files(name: str, data: Path) -> None:
    num_adapters, ranks, rate = PROMISED[name]
    workload = paper_workload(name, data=data, duration_s=min(2_000 / rate, 120))
    header = header_of(workload)
    assert header.num_adapters == num_adapters
    assert set(header.ranks) == ranks
    assert header.recipe["made_from"] == MadeFrom.PUBLISHED
    files = {str(header.recipe.get(part)) for part in ("trace", "popularity_file", "lengths_file")}
    assert any(file.endswith(".csv") for file in files)
    assert not any("/" in file for file in files), "folders are private"
    assert summarize(count_workload(workload)).rate_per_s == pytest.approx(rate, rel=0.15)


def test_lengths_are_those_of_the_files(data: Path) -> None:
    azure, lmsys, servegen = (
        summarize(count_workload(paper_workload(name, data=data, duration_s=20)))
        for name in ("loraserve-poisson-uniform", "toppings-8-servers", "servegen")
    )
    assert (azure.prompt.p50, azure.prompt.most, azure.output.p50, azure.output.most) in {
        (700, 3072, 70, 1024),
        (3072, 3072, 1024, 1024),
    }
    assert lmsys.output.mean == 77
    assert servegen.prompt.mean == servegen.output.mean == 33


def test_options_override_the_papers_and_seeds_differ() -> None:
    options: dict[str, Any] = {"rate": 64, "duration_s": 30, "num_adapters": 50}
    workload = paper_workload("loraserve-poisson-shifting", seed=1, **options)
    header = header_of(workload)
    assert (header.num_adapters, header.duration_s) == (50, 30)
    assert sorted(header.ranks) == sorted([*FIVE] * 10)
    requests = list(workload)
    assert len(requests) / 30 == pytest.approx(64, rel=0.1)
    assert requests == list(paper_workload("loraserve-poisson-shifting", seed=1, **options))
    assert requests != list(paper_workload("loraserve-poisson-shifting", seed=2, **options))


def test_the_rate_of_scaled_production_goes_with_its_adapters() -> None:
    named = find_paper("toppings-scaled-production")
    assert [named.recipe(num_adapters=number).rate for number in (128, 256, 512)] == [1.5, 3.6, 7.7]
    assert named.recipe(num_adapters=128, rate=5).rate == 5


def test_single_adapters_of_dlora_are_bursty_without_data() -> None:
    requests = paper_workload("dlora-bursty", duration_s=3_000)
    times_s = [request.arrival_s for request in requests if request.adapter == 0]
    gaps_s = [after - before for before, after in pairwise(times_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    variance = sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)
    assert variance**0.5 / mean_s > 2.5


@pytest.mark.parametrize(
    ("name", "options", "field", "words"),
    [
        ("toppings-60-server", {}, "paper", "did you mean toppings-60-servers"),
        ("nothing like it", {}, "paper", "there are toppings-60-servers, "),
        ("toppings-60-servers", {"num_adapters": 10}, "num_adapters", "is fixed .*: there are 40,000"),
        ("adapter-twin-predictable", {"rate": 3}, "rate", "every adapter has 1.6, 0.8 or 0.4"),
        ("toppings-scaled-production", {"num_adapters": 100}, "num_adapters", "has 128, 256, 512"),
        ("loraserve-production", {"num_adapters": 4}, "num_adapters", "5 ranks .*; give as many or more"),
        ("maf", {"num_adapters": 0}, "num_adapters", "at least 1"),
        ("maf", {"rate": 0}, "rate", "more than 0"),
        ("dlora-bursty", {"rate": float("nan")}, "rate", "finite"),
        ("servegen", {"duration_s": -1}, "duration_s", "more than 0"),
        ("servegen", {"seed": -1}, "seed", "not negative"),
        ("maf", {"data": Path("absent")}, "data", "absent has no traces/maf2019_1000fn_1day_sparse.csv.gz"),
        ("adapter-twin-unpredictable", {"data": Path()}, "data", "has no effect"),
    ],
)
def test_bad_input_is_refused_in_words(name: str, options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        paper_workload(name, **options)
    assert caught.value.field == field


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["workload", *map(str, args)], env={"COLUMNS": "200"})


def test_the_command_makes_one(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "w.jsonl"
    made = run(
        "make", path, "--paper", "loraserve-rank-skew", "--data", data, "--rate", 9, "--duration-s", 30
    )
    assert made.exit_code == 0, made.output
    header = header_of(WorkloadFile(path))
    assert header.num_adapters == 100
    assert header.recipe["lengths_file"] == "azure_llm_2023_conv.csv"
    described = run("describe", path)
    assert "paper loraserve-rank-skew, made_from published files" in described.output


def test_the_command_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "papers.json"
    listed = run("papers", "--json", path)
    assert listed.exit_code == 0, listed.output
    for name in NAMED:
        assert name in listed.output
    found = json.loads(path.read_text())["workloads"]
    assert [each["name"] for each in found] == list(NAMED)
    assert all(each.keys() == {"name", "paper", "what", "differs"} for each in found)


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        (("--paper", "mav"), "--paper", "did you mean maf?"),
        (("--paper", "maf", "--popularity", "zipf"), "--popularity", "is fixed in maf; beside --paper"),
        (("--paper", "maf", "--from", "maf", "x.csv"), "--from", "is fixed in maf"),
        (("--paper", "toppings-synthetic", "--num-adapters", 5), "--num-adapters", "there are 200"),
        (("--data", "absent"), "--data", "has an effect only with --paper"),
        (("--paper", "maf", "--data", "absent"), "--data", "absent has no traces/maf2019"),
    ],
)
def test_bad_usage_exits_2_and_names_the_option(
    tmp_path: Path, options: tuple[object, ...], option: str, words: str
) -> None:
    path = tmp_path / "w.jsonl"
    result = run("make", path, *options)
    assert result.exit_code == 2
    assert option in result.output
    assert words in " ".join(result.output.replace("│", " ").split())
    assert not path.exists()


def test_a_published_file_is_not_written_over(data: Path) -> None:
    path = data / "traces" / "azure_llm_2023_conv.csv"
    before = path.read_text()
    result = run("make", path, "--paper", "loraserve-poisson-uniform", "--data", data)
    assert result.exit_code == 2
    assert "is read here, and would be lost" in " ".join(result.output.replace("│", " ").split())
    assert path.read_text() == before


def header_of(workload: Workload) -> WorkloadHeader:
    assert workload.header is not None
    return workload.header
