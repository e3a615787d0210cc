"""Tables and picture of the HTTP comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import draw_http, http_tables, make_tables


def run(adapters: int, load: str, tokens_per_s: float, ttft_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "adapters": adapters,
        "load": load,
        "failed": 0,
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms_mean": ttft_ms,
        "ttft_ms_p95": 2 * ttft_ms,
        "tpot_ms_mean": 6.0,
        "itl_ms_p99": 9.0,
        "e2e_ms_mean": 1000.0,
        **more,
    }


def section(runs: list[dict[str, Any]], start_s: list[float]) -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05",
        "git_commit": "abc",
        "machine": {"gpu": "NVIDIA H200", "cores": 16, "cpu": "CPU"},
        "versions": {"loraplex": "0.1.0", "vllm": "0.26.0"},
        "parameters": {
            "shape": "llama-2-7b",
            "dtype": "bfloat16",
            "rank": 64,
            "adapters_served": 100,
            "lengths": {"prompt_tokens": 128, "output_tokens": 160, "spread": 0.6},
            "loads": {
                "steady": {"requests_per_s": 20.0, "concurrency": None, "num_requests": 300},
                "saturated": {"requests_per_s": None, "concurrency": 256, "num_requests": 1000},
            },
        },
        "start_s": start_s,
        "runs": runs,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    base = [run(0, "steady", 3000.0, 20.0), run(0, "saturated", 9000.0, 400.0)]
    # Measured twice: the table has the median.
    ours = [*base, run(100, "steady", 2900.0, 22.0), run(100, "steady", 2900.0, 24.0)]
    starts = [
        run(100, "steady", 2900.0, ttft, caches=caches, place=place)
        for caches, ttfts in (("empty", (33.0, 31.0, 30.0)), ("used", (30.0, 30.0, 30.0)))
        for place, ttft in enumerate(ttfts, start=1)
    ]
    return {
        "starts": section(starts, [31.0, 12.0]),
        "vllm": section(base, [100.0]),
        "loraplex": section([*ours, run(100, "saturated", 8000.0, 500.0, failed=3)], [12.0, 14.0]),
    }


def test_servers_are_rows_and_cells_not_measured_are_empty(result: dict[str, Any]) -> None:
    lines = http_tables.compare_table(result).splitlines()
    base = "20.0 (40.0), 6.0 | 9.0 | 1,000 | 9,000 tok/s | 400 | 6.0"
    assert lines[2:] == [
        f"| loraplex 0.1.0 | base model | {base} | 0 |",
        "| loraplex 0.1.0 | 100 | 23.0 (46.0), 6.0 | 9.0 | 1,000 | 8,000 tok/s | 500 | 6.0 | 3 |",
        f"| vLLM, LoRA off 0.26.0 | base model | {base} | 0 |",
    ]
    assert "Commits: starts at abc, vllm at abc, loraplex at abc." in http_tables.machine_note(result)


def test_the_summary_has_the_servers_measured_with_most_adapters(result: dict[str, Any]) -> None:
    text = http_tables.summary(result)
    assert "- loraplex 0.1.0: 8,000 tok/s with 256 at a time, first token within 46.0 ms (p95)" in text
    assert "LoRA off" not in text
    assert f"({http_tables.PICTURE})" in text


LOADS_ADDED_LATER = {
    "high-rate": {"requests_per_s": 60.0, "concurrency": None, "num_requests": 900},
    "prompt-2048": {"requests_per_s": None, "concurrency": 1, "num_requests": 16},
    "prompt-8000": {"requests_per_s": None, "concurrency": 1, "num_requests": 16},
}


def test_loads_that_older_sections_lack_have_tables_once_they_are_measured(result: dict[str, Any]) -> None:
    assert http_tables.high_rate_table(result) == http_tables.prompts_table(result) == "Not measured yet.\n"
    newer = result["vllm"]
    newer["parameters"]["loads"] |= LOADS_ADDED_LATER
    newer["runs"] += [
        run(0, "high-rate", 9000.0, 30.0),
        *(run(0, f"prompt-{tokens}", 100.0, 50.0, ttft_ms_p50=64.0) for tokens in (8000, 2048)),
    ]
    assert http_tables.high_rate_table(result).splitlines()[2:] == [
        "| vLLM, LoRA off 0.26.0 | base model | 30.0 (60.0), 6.0 | 9.0 | 1,000 | 9,000 tok/s | 0 |"
    ]
    prompts = http_tables.prompts_table(result).splitlines()
    assert prompts[0].startswith("| server | shape | adapters asked for | 2,048 tokens | 8,000 tokens |")
    figures = "64.0 ms, 31.2 µs/token | 64.0 ms, 8.0 µs/token | 0"
    assert prompts[2:] == [f"| vLLM, LoRA off 0.26.0 | llama-2-7b | base model | {figures} |"]
    assert len(http_tables.compare_table(result).splitlines()) == 5


def test_other_shapes_have_tables_of_their_own(result: dict[str, Any]) -> None:
    assert http_tables.shapes_table(result) == "Not measured yet.\n"
    before = http_tables.compare_table(result)
    result["loraplex llama-3-8b"] = section([run(100, "saturated", 9500.0, 300.0)], [20.0])
    assert http_tables.shapes_table(result).splitlines()[2:] == [
        "| loraplex 0.1.0 | llama-3-8b | 100 | 9,500 tok/s | 300 | 6.0 | 0 |"
    ]
    assert http_tables.compare_table(result) == before


def test_the_first_run_after_a_start_is_held_against_the_last(result: dict[str, Any]) -> None:
    table = http_tables.starts_table(result)
    assert "| loraplex, empty caches | 31.0 s | 33.0 (66.0), 31.0 (62.0), 30.0 (60.0) | 1.10x |" in table
    assert "| loraplex, used caches | 12.0 s | 30.0 (60.0), 30.0 (60.0), 30.0 (60.0) | 1.00x |" in table


def test_documents_take_the_tables_once_there_is_a_result(tmp_path: Path, result: dict[str, Any]) -> None:
    names = [name for name in make_tables.TABLES if name.startswith("http-")]
    text = "".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n" for name in names)
    without = make_tables.fill(text, tmp_path / "nothing")
    assert without.count("Not measured yet.") == 5
    assert "|" not in without
    (tmp_path / make_tables.HTTP).write_text(json.dumps(result))
    filled = make_tables.fill(without, tmp_path)
    assert filled.count("Not measured yet.") == 3  # 60 requests/s, prompts alone, and other shapes
    assert http_tables.PICTURE in filled
    assert make_tables.fill(filled, tmp_path) == filled


def test_the_picture_is_the_same_for_the_same_figures(tmp_path: Path, result: dict[str, Any]) -> None:
    for name in ("one.svg", "two.svg"):
        draw_http.draw(result, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    assert "vLLM, LoRA off" in drawn
    assert "vLLM, LoRA on" not in drawn


def test_points_are_joined_only_if_nothing_between_them_was_left_out(result: dict[str, Any]) -> None:
    numbers = (0, 8, 100)
    runs = [run(number, load, 2000.0, 50.0) for number in numbers for load in ("steady", "saturated")]
    drawing = draw_http._panels(result | {"vllm-lora": section(runs, [])})
    for axis in drawing.axes:
        lines = {line.get_label(): np.asarray(line.get_ydata()) for line in axis.get_lines()}
        assert np.isnan(lines["loraplex"]).tolist() == [False, True, False]
        assert not np.isnan(lines["vLLM, LoRA on"]).any()
        assert axis.get_ylim()[1] > np.nanmax(lines["loraplex"])


def test_the_committed_picture_shows_the_committed_figures() -> None:
    root = Path(__file__).parent.parent.parent
    committed = json.loads((make_tables.RESULTS / make_tables.HTTP).read_text())
    assert draw_http.is_drawn_from(committed, root / http_tables.PICTURE), (
        "run python -m benchmarks.draw_http"
    )
    committed["vllm"]["runs"].clear()
    assert not draw_http.is_drawn_from(committed, root / http_tables.PICTURE)


@pytest.mark.parametrize(("most", "scale"), [(34.0, "linear"), (3400.0, "log")])
def test_panels_start_at_0_unless_values_are_far_apart_and_have_room_above(most: float, scale: str) -> None:
    axis = Figure().subplots()
    draw_http._scale(axis, [23.0, most])
    low, high = axis.get_ylim()
    assert axis.get_yscale() == scale
    assert low == 0 if scale == "linear" else 0 < low < 23
    assert high > 1.1 * most


def test_prompts_alone_are_shown_by_token_with_those_that_failed(result: dict[str, Any]) -> None:
    result["loraplex"]["runs"].append(run(0, "prompt-2000", 90.0, 50.0, ttft_ms_p50=50.0))
    result["vllm"]["runs"].append(run(0, "prompt-2000", 90.0, 50.0, ttft_ms_p50=50.0, failed=15))
    assert http_tables.prompts_table(result).splitlines()[2:] == [
        "| loraplex 0.1.0 | llama-2-7b | base model | 50.0 ms, 25.0 µs/token | 0 |",
        "| vLLM, LoRA off 0.26.0 | llama-2-7b | base model | 50.0 ms, 25.0 µs/token (15 failed) | 15 |",
    ]
