"""Datasets: what a row says, and files that are continued, or refused."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import LENGTHS, points, simulated, slot_profile

from loraplex.planner.dataset import DatasetError, make_dataset, read_dataset
from loraplex.twin.run_workload import draw_requests

KILLED = """
import os, signal, sys
from pathlib import Path
from small import points, simulated
from loraplex.planner.dataset import make_dataset

def progress(phase, share):
    if share >= 0.5:
        os.kill(os.getpid(), signal.SIGKILL)

make_dataset(Path(sys.argv[1]), simulated(), points=points(), progress=progress)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dataset") / "whole.jsonl"
    assert make_dataset(path, simulated(), points=points()) == len(points())
    return path


def test_rows_say_what_is_served_and_what_starves(whole: Path) -> None:
    rows = read_dataset(whole)
    assert rows.trained_on == simulated().trained_on
    offered_tok_s = rows.features[:, 1] * sum(LENGTHS)
    assert (rows.throughput_tok_s <= 1.5 * offered_tok_s).all()
    assert set(rows.features[:, 6]) == {4, 8, 16}
    assert 0 < rows.is_starved.sum() < len(rows)
    assert offered_tok_s[rows.is_starved].min() > offered_tok_s.min()


def test_requests_have_the_mean_lengths() -> None:
    rng = np.random.default_rng(0)
    requests = draw_requests(rng, np.ones(4), LENGTHS, num_requests=50, duration_s=10.0, mean_lengths=True)
    assert set(requests.prompt_tokens) == {200}
    assert set(requests.output_tokens) == {30}


def test_a_killed_process_loses_no_row_and_what_follows_is_the_same(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    command = [sys.executable, "-c", KILLED, str(path)]
    done = subprocess.run(command, check=False, env=environment())
    assert done.returncode == -9
    assert 1 < len(path.read_bytes().splitlines()) < len(points())
    with path.open("ab") as file:
        file.write(b"[3, 16.0, 1.2")  # the kill came within a row
    assert make_dataset(path, simulated(), points=points()) == len(points())
    assert path.read_bytes() == whole.read_bytes()


def test_fewer_rows_are_the_first_ones_of_more(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    assert make_dataset(path, simulated(), num_rows=3, points=points()) == 3
    few = path.read_bytes()
    assert whole.read_bytes().startswith(few)
    assert make_dataset(path, simulated(), num_rows=2, points=points()) == 3, "they stay"
    assert path.read_bytes() == few
    assert make_dataset(path, simulated(), num_rows=len(points()), points=points()) == len(points())
    assert path.read_bytes() == whole.read_bytes()


def test_scaled_rates_are_shares_of_what_the_gpu_serves_of_them(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    asked = [replace(point, share=share) for point in points() for share in (0.5, 0.7, 1.5)]
    make_dataset(path, replace(simulated(), duration_s=300.0), points=asked)
    rows = read_dataset(path)
    order = [json.loads(line)[0] for line in path.read_text().splitlines()[1:]]
    shares = np.array([asked[number].share for number in order])
    keeps_up = rows.throughput_tok_s / rows.offered_tok_s
    assert keeps_up[shares < 1].min() > 0.9 > keeps_up[shares > 1].max()


def test_points_without_memory_for_a_request_are_left_out(tmp_path: Path) -> None:
    path, asked = tmp_path / "some.jsonl", points(most_slots=10_000)
    assert make_dataset(path, simulated(), points=asked) == len(asked) * 2 // 3
    assert set(read_dataset(path).features[:, 6]) == {4, 8}
    assert make_dataset(path, simulated(), points=asked) == len(asked) * 2 // 3


def test_progress_is_reported(tmp_path: Path) -> None:
    shares: list[float | None] = []
    make_dataset(
        tmp_path / "rows.jsonl",
        simulated(),
        num_rows=4,
        points=points(),
        progress=lambda phase, share: shares.append(share),
    )
    assert shares == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (simulated(seed=1), "another seed"),
        (replace(simulated(), duration_s=30.0), "duration_s 20.0, now 30.0"),
        (replace(simulated(), profile=slot_profile("vllm-h100-qwen-2.5-7b")), "profile_sha256"),
    ],
)
def test_a_file_of_other_runs_is_not_continued(other: object, word: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(whole.read_bytes())
    with pytest.raises(DatasetError, match=f"begun with .*{word}.*; delete it, or name another"):
        make_dataset(path, other, points=points())  # type: ignore[arg-type]
    assert path.read_bytes() == whole.read_bytes()


def test_a_file_of_another_grid_is_not_continued(whole: Path) -> None:
    with pytest.raises(DatasetError, match="begun with another grid; delete it, or name another"):
        make_dataset(whole, simulated(), points=points()[:-1])


def changed_header(lines: list[bytes], key: str, value: object) -> list[bytes]:
    return [json.dumps(json.loads(lines[0]) | {key: value}).encode(), *lines[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: changed_header(lines, "version", 99), "that of another loraplex; delete it"),
        (lambda lines: changed_header(lines, "columns", ["point"]), "that of another loraplex; delete it"),
        (lambda lines: [b"some text", *lines], "it is no dataset; delete it"),
        (
            lambda lines: [lines[0], lines[1].replace(b", ", b", NaN, ", 1)],
            "line 2 is not a row of 11 numbers",
        ),
        (lambda lines: [lines[0], lines[1][:20], *lines[2:]], "line 2 is not a row of 11 numbers; delete it"),
        (lambda lines: lines[:1], "it has no rows yet"),
    ],
)
def test_a_broken_file_is_refused(
    change: Callable[[list[bytes]], list[bytes]], message: str, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\n".join(change(whole.read_bytes().splitlines())) + b"\n")
    with pytest.raises(DatasetError, match=message):
        read_dataset(path)


def test_a_file_that_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("to do: sleep")
    with pytest.raises(DatasetError, match="it is no dataset"):
        make_dataset(path, simulated(), points=points())
    assert path.read_text() == "to do: sleep"


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DatasetError, match="another process is making this dataset; wait"):
            make_dataset(path, simulated(), points=points())


def environment() -> dict[str, str]:
    here = Path(__file__)
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(here.parents[2]), str(here.parent)))}
