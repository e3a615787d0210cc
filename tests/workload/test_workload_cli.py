"""`loraplex workload make`, `describe` and `plot`."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import StorageError
from loraplex.workload import WorkloadError, WorkloadFile

MAF = "function,minute,count\nF0000,0,40\nF0001,0,7\nF0001,1,5\n"
REQUEST = '{"arrival_s": 0.5, "prompt_tokens": 21, "output_tokens": 137, "adapter": 3}\n'


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["workload", *map(str, args)], env={"COLUMNS": "200"})


def flat(output: str) -> str:
    """Without the frame and the ends of lines, wherever a long path made them."""
    return " ".join(output.replace("│", " ").split())


def test_make_describe_and_plot(tmp_path: Path) -> None:
    path, figures, picture = tmp_path / "w.jsonl.gz", tmp_path / "w.json", tmp_path / "w.png"
    options = (
        "--rate",
        20,
        "--duration-s",
        30,
        "--popularity",
        "zipf",
        "--num-adapters",
        8,
        "--ranks",
        "8:3,64",
    )
    made = run("make", path, *options)
    assert made.exit_code == 0, made.output
    workload = WorkloadFile(path)
    num_requests = sum(1 for _ in workload)
    assert f"{num_requests:,} requests for 8 adapters" in made.output
    assert workload.header is not None
    assert sorted(workload.header.ranks) == [8] * 6 + [64] * 2
    assert workload.header.recipe["popularity"] == "zipf"

    described = run("describe", path, "--json", figures)
    assert described.exit_code == 0, described.output
    for word in (
        "requests",
        "CV of gaps",
        "8 of 8 used",
        "busiest tenth",
        "p99",
        "prompt",
        "popularity zipf",
    ):
        assert word in described.output
    found = json.loads(figures.read_text())
    assert found["num_requests"] == num_requests
    assert found["rank_shares"].keys() == {"8", "64"}

    drawn = run("plot", path, picture)
    assert drawn.exit_code == 0, drawn.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, seed in zip(files, (5, 5, 6), strict=True):
        assert run("make", path, "--seed", seed, "--arrivals", "gamma", "--cv", 4).exit_code == 0
    a, b, c = (path.read_bytes() for path in files)
    assert a == b != c


def test_a_trace_becomes_a_workload(tmp_path: Path) -> None:
    trace, path = tmp_path / "maf.csv.gz", tmp_path / "w.jsonl"
    trace.write_bytes(gzip.compress(MAF.encode()))
    made = run("make", path, "--from", "maf", trace, "--lengths", "fixed", "--prompt-tokens", 9)
    assert made.exit_code == 0, made.output
    workload = WorkloadFile(path)
    assert [request.prompt_tokens for request in workload] == [9] * 52
    assert workload.header is not None
    assert workload.header.names == ("F0000", "F0001")


def test_a_file_without_a_header_is_described(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(REQUEST)
    described = run("describe", path)
    assert described.exit_code == 0, described.output
    assert "1 used" in described.output
    assert run("plot", path, tmp_path / "old.png").exit_code == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--cv", 3), "--cv"),
        (("--lengths", "empirical"), "--lengths-file"),
        (("--num-adapters", 0), "--num-adapters"),
        (("--ranks", "8;16"), "--ranks"),
        (("--from", "azur", "x"), "--from"),
        (("--popularity", "zipfian"), "--popularity"),
        (("--rates", "1", "--rate", 3), "--rate"),
        (("--rates", "fast"), "--rates"),
        (("--rate", "1e12"), "1e+12 requests/s for 60 s are more than 100,000,000 requests"),
        (("--rates", "1e12", "--duration-s", 5), "3.2e+13 requests/s for 5 s are more than"),
        (("--num-requests", 10**12), "must be at most 100,000,000"),
    ],
)
def test_bad_usage_exits_2_and_names_the_option(
    tmp_path: Path, options: tuple[object, ...], reason: str
) -> None:
    path = tmp_path / "w.jsonl"
    result = run("make", path, *options)
    assert result.exit_code == 2
    assert reason in result.output
    assert not path.exists()


def test_many_requests_a_second_are_no_matter_if_there_are_few(tmp_path: Path) -> None:
    assert run("make", tmp_path / "w.jsonl", "--rate", "1e12", "--num-requests", 10).exit_code == 0


def test_sigterm_leaves_nothing_unfinished_behind(tmp_path: Path) -> None:
    made = (sys.executable, "-m", "loraplex.cli.main", "workload", "make", tmp_path / "w.jsonl.gz")
    with subprocess.Popen((*made, "--num-requests", "100000000"), stderr=subprocess.PIPE) as making:
        while not list(tmp_path.glob(".*.new")):
            assert making.poll() is None
        making.terminate()
        _, said = making.communicate(timeout=60)
    assert (making.returncode, said) == (128 + signal.SIGTERM, b"")
    assert not list(tmp_path.iterdir())


def test_bad_files_are_named_with_their_line(tmp_path: Path) -> None:
    trace, path = tmp_path / "maf.csv", tmp_path / "w.jsonl"
    trace.write_text(MAF + "F0002,1,-5\n")
    result = run("make", path, "--from", "maf", trace)
    assert isinstance(result.exception, WorkloadError)
    assert str(result.exception).startswith(f"{trace}:5: count must be")
    assert list(tmp_path.iterdir()) == [trace]
    path.write_text('{"arrival_s": 0.5, "prompt_tokens": -1, "output_tokens": 137, "adapter": 3}\n')
    for command in (("describe", path), ("plot", path, tmp_path / "w.png")):
        result = run(*command)
        assert str(result.exception).startswith(f"{path}:1: prompt_tokens must be")
    assert not (tmp_path / "w.png").exists()


def test_a_place_that_cannot_be_written_is_found_out_first(tmp_path: Path) -> None:
    for command in (
        ("make", tmp_path / "absent" / "w.jsonl"),
        ("plot", "x.jsonl", tmp_path / "absent" / "w.png"),
    ):
        result = run(*command)
        assert result.exit_code == 2
        assert "cannot be written" in result.output


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (MAF, ("--from", "maf")),
        ("arrival_s\n0.5\n1.5\n", ("--arrivals", "replay", "--replay")),
        (MAF, ("--popularity", "trace", "--popularity-file")),
        ("prompt_tokens,output_tokens\n9,7\n", ("--lengths", "empirical", "--lengths-file")),
    ],
    ids=["from", "replay", "popularity-file", "lengths-file"],
)
def test_what_a_workload_is_made_of_is_not_written_over(
    tmp_path: Path, content: str, options: tuple[str, ...]
) -> None:
    path, link, other = tmp_path / "table.csv", tmp_path / "link.csv", tmp_path / "w.jsonl"
    path.write_text(content)
    link.symlink_to(path)
    for out in (path, link):
        result = run("make", out, *options, path)
        assert result.exit_code == 2
        assert f"{out.name} is read here, and would be lost; name another" in flat(result.output)
        assert path.read_text() == content
    assert run("make", other, *options, path).exit_code == 0, "with another name it is made"


def test_a_workload_that_is_looked_at_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "w.png"  # read by its contents; only a .png is drawn to
    path.write_text(REQUEST)
    for command in (("describe", path, "--json", path), ("plot", path, path)):
        result = run(*command)
        assert result.exit_code == 2
        assert "w.png is read here, and would be lost; name another" in flat(result.output)
        assert path.read_text() == REQUEST


def test_a_disk_that_is_full_leaves_the_last_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, figures = tmp_path / "w.jsonl", tmp_path / "w.json"
    path.write_text(REQUEST)
    figures.write_text("the last ones")

    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = run("describe", path, "--json", figures)
    assert isinstance(result.exception, StorageError)
    assert "cannot be written (No space left on device); make room" in str(result.exception)
    assert figures.read_text() == "the last ones"
    assert not list(tmp_path.glob(".*")), "half of a file is left"


def test_figures_go_through_links_and_pipes(tmp_path: Path) -> None:
    path, figures, link, pipe = (tmp_path / name for name in ("w.jsonl", "w.json", "link", "pipe"))
    path.write_text(REQUEST)
    link.symlink_to(figures)
    assert run("describe", path, "--json", link).exit_code == 0
    assert link.is_symlink()
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # for both: nobody waits for another end
    try:
        assert run("describe", path, "--json", pipe).exit_code == 0
        assert os.read(end, 1 << 16) == figures.read_bytes()
    finally:
        os.close(end)


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    result = run("plot", "x.jsonl", tmp_path / "w.txt")
    assert result.exit_code == 2
    assert "w.txt is no .png" in result.output


def test_a_workload_without_a_request_is_not_written(tmp_path: Path) -> None:
    result = run("make", tmp_path / "w.jsonl", "--rate", 0.0001, "--duration-s", 0.001)
    assert isinstance(result.exception, WorkloadError)
    assert "not a single request" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
