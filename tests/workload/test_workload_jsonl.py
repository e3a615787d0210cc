from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.core.errors import LoraplexError
from loraplex.workload import (
    Workload,
    WorkloadError,
    WorkloadFile,
    WorkloadHeader,
    WorkloadRequest,
    read_workload,
    save_workload,
    write_workload,
)

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


@pytest.mark.parametrize("tenant", ["acme", "A_1-b", "x" * 64])
def test_requests_keep_their_tenant(tmp_path: Path, tenant: str) -> None:
    requests = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=1, adapter=0, tenant=each)
        for each in (tenant, "")
    ]
    path = tmp_path / "w.jsonl"
    write_workload(path, requests)
    assert read_workload(path) == requests
    assert path.read_text().count("tenant") == 1


@pytest.mark.parametrize("tenant", [None, 3, ["a"], "x" * 65, "a.b", "Zoë", "a\n"])
def test_a_tenant_that_is_no_name_is_refused(tmp_path: Path, tenant: object) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(line(tenant=tenant))
    with pytest.raises(WorkloadError, match=r"w\.jsonl:1: tenant must be a name of 1 to 64 letters"):
        read_workload(path)


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
        (line(arrival_s=1.1e10), "arrival_s 11000000000.0 is beyond 1e+10 seconds"),
        (line(arrival_s=1e300), "arrival_s 1e+300 is beyond 1e+10 seconds"),
        ('{"arrival_s": "a', "not JSON: Unterminated string starting at column 15"),
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


HEADER = WorkloadHeader(
    ranks=(8, 64), names=("a", "b"), duration_s=60.0, recipe={"seed": 3, "popularity": "zipf"}
)


def request(arrival_s: float, adapter: int = 0) -> WorkloadRequest:
    return WorkloadRequest(arrival_s=arrival_s, prompt_tokens=3, output_tokens=2, adapter=adapter)


@pytest.mark.parametrize("name", ["w.jsonl", "w.jsonl.gz"])
@pytest.mark.parametrize("header", [None, HEADER, WorkloadHeader(ranks=(1,) * 7)])
def test_header_and_requests_come_back_as_they_were(
    tmp_path: Path, name: str, header: WorkloadHeader | None
) -> None:
    path = tmp_path / name
    requests = [request(0.0), request(1e-06), request(0.1 + 0.2, adapter=1), request(59.0)]
    assert write_workload(path, requests, header) == 4
    workload = WorkloadFile(path)
    assert isinstance(workload, Workload)
    assert workload.header == header
    assert list(workload) == requests
    assert list(workload) == requests, "it can be gone through again"
    assert read_workload(path) == requests
    again = tmp_path / f"again-{name}"
    save_workload(again, workload)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted([path, again]), "nothing else is left behind"


def test_each_line_is_json_as_json_dumps_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    write_workload(path, [request(1e-07), request(12345678.9)])
    for text in path.read_text().splitlines():
        assert json.dumps(json.loads(text)) == text


def test_requests_are_written_and_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    alive = 0
    most_alive = 0

    class Counted(WorkloadRequest):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def made() -> Iterator[WorkloadRequest]:
        nonlocal alive, most_alive
        for number in range(5_000):
            alive += 1
            most_alive = max(most_alive, alive)
            yield Counted(arrival_s=float(number), prompt_tokens=1, output_tokens=1, adapter=0)

    assert write_workload(path, made()) == 5_000
    assert most_alive <= 3
    assert next(iter(WorkloadFile(path))).arrival_s == 0.0
    with path.open("a") as file:
        file.write("broken\n")
    read = iter(WorkloadFile(path))
    assert [next(read).arrival_s for _ in range(5_000)][-1] == 4_999.0, "the end was not looked at before"
    with pytest.raises(WorkloadError, match=r"w\.jsonl:5001: not JSON"):
        next(read)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ('{"loraplex_workload": 2, "ranks": [8]}', "reads version 1"),
        ('{"loraplex_workload": 1}', "ranks must be a list"),
        ('{"loraplex_workload": 1, "ranks": []}', "at least one adapter"),
        ('{"loraplex_workload": 1, "ranks": [8, 0]}', "ranks must be a whole number of at least 1"),
        ('{"loraplex_workload": 1, "ranks": [8], "names": ["a", "b"]}', "names: there are 2 for 1"),
        ('{"loraplex_workload": 1, "ranks": [8], "names": [1]}', "names must be"),
        ('{"loraplex_workload": 1, "ranks": [8], "duration_s": 0}', "duration_s must be"),
        ('{"loraplex_workload": 1, "ranks": [8], "duration_s": NaN}', "duration_s must be"),
        ('{"loraplex_workload": 1, "ranks": [8], "recipe": {"a": []}}', "recipe must be"),
        ('{"loraplex_workload": 1, "ranks": [8], "colour": 1}', "unknown colour in the header"),
    ],
)
def test_a_bad_header_is_refused_with_its_line(tmp_path: Path, header: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{header}\n{GOOD}\n")
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line(adapter=2), "adapter 2 is unknown: the header has 2"),
        (line(adapter=0, arrival_s=60.5), "after the header's duration_s"),
        ('{"loraplex_workload": 1, "ranks": [8]}', "a header must be the first line"),
    ],
)
def test_requests_are_held_against_the_header(tmp_path: Path, bad: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    write_workload(path, [request(0.25)], HEADER)
    with path.open("a") as file:
        file.write(bad + "\n")
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)


def test_a_header_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"loraplex_workload": 1, "ranks": [8]}\n')
    with pytest.raises(WorkloadError, match="no requests"):
        read_workload(path)


def test_a_broken_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    write_workload(path, [request(float(number)) for number in range(2_000)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WorkloadError, match=r"w\.jsonl\.gz: a broken gzip file"):
        read_workload(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    write_workload(path, [request(0.0)])
    before = path.read_bytes()

    def failing() -> Iterator[WorkloadRequest]:
        yield request(1.0)
        raise WorkloadError("the trace is broken")

    with pytest.raises(WorkloadError, match="the trace is broken"):
        write_workload(path, failing())
    with pytest.raises(WorkloadError, match="not a single request"):
        write_workload(path, [])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(WorkloadError, match="not a plain file"):
        write_workload(tmp_path, [request(0.0)])
    for folder in (tmp_path / "absent", path):
        with pytest.raises(WorkloadError, match="cannot be written"):
            write_workload(folder / "w.jsonl", [request(0.0)])


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, path = tmp_path / "link.jsonl", tmp_path / "w.jsonl"
    link.symlink_to(path)
    write_workload(link, [request(0.0)])
    assert link.is_symlink()
    assert len(read_workload(path)) == 1
