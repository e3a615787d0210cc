from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.core.errors import LoraplexError
from loraplex.workload import WorkloadError, WorkloadRequest, read_workload, write_workload

GOOD = '{"arrival_s": 0.5, "prompt_tokens": 21, "output_tokens": 137, "adapter": 3}'


def line(**changes: object) -> str:
    return json.dumps(json.loads(GOOD) | changes)


def test_reads_every_request_in_order(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(f"{GOOD}\n\n{line(arrival_s=1, adapter=0)}\n")
    assert read_workload(path) == [
        WorkloadRequest(arrival_s=0.5, prompt_tokens=21, output_tokens=137, adapter=3),
        WorkloadRequest(arrival_s=1.0, prompt_tokens=21, output_tokens=137, adapter=0),
    ]


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    requests = [
        WorkloadRequest(arrival_s=0.1 * index, prompt_tokens=1 + index, output_tokens=1, adapter=index)
        for index in range(5)
    ]
    write_workload(tmp_path / "w.jsonl", requests)
    assert read_workload(tmp_path / "w.jsonl") == requests


def test_two_arrivals_at_the_same_time_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n")
    assert len(read_workload(path)) == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not"),
        ("[1, 2]", "expected an object"),
        ("null", "expected an object"),
        ("{}", "missing arrival_s, prompt_tokens, output_tokens, adapter"),
        (line(colour="red"), "unknown colour"),
        (GOOD[:-1] + ', "adapter": 4}', "twice"),
        (line(arrival_s=0.25), "before the line above"),
        (line(arrival_s=-1), "arrival_s must be finite and not negative"),
        (line(arrival_s=float("nan")), "arrival_s must be finite"),
        (line(arrival_s=float("inf")), "arrival_s must be finite"),
        (line(arrival_s=10**400), "arrival_s must be finite"),
        (line(arrival_s="1"), "arrival_s must be a number"),
        (line(arrival_s=True), "arrival_s must be a number"),
        (line(prompt_tokens=0), "prompt_tokens must be a whole number of at least 1"),
        (line(prompt_tokens=-5), "prompt_tokens must be"),
        (line(prompt_tokens=1.5), "prompt_tokens must be"),
        (line(output_tokens=0), "output_tokens must be"),
        (line(output_tokens=None), "output_tokens must be"),
        (line(adapter=-1), "adapter must be a whole number of at least 0"),
        (line(adapter=False), "adapter must be"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, bad: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n{bad}\n")
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)
    assert isinstance(caught.value, LoraplexError)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=r"w\.jsonl"):
        read_workload(path)


def test_a_missing_file_and_a_folder_are_user_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(WorkloadError, match=path.name):
            read_workload(path)
