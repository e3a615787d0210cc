"""Traces in the formats they are published in, read strictly and turned into workloads."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loraplex.workload import WorkloadError, WorkloadFile, save_workload
from loraplex.workload.build import make_workload
from loraplex.workload.counted import CountedTrace, CountedTraffic
from loraplex.workload.counted_files import read_maf, read_servegen
from loraplex.workload.popularity_files import read_totals
from loraplex.workload.recipe import ArrivalKind, Recipe, RecipeError, Source
from loraplex.workload.replay import read_azure, read_times_s, read_vtc

AZURE = "arrival_s,prompt_tokens,output_tokens\n0.0,4808,10\n0.052,3180,8\n2.0,110,27\n"
AZURE_AS_PUBLISHED = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,4808,10\n"
    "2023-11-16 18:15:46.7325900,3180,8\n"
    "2023-11-16 18:15:48.6805900,110,27\n"
)
VTC = "arrival_s,adapter,prompt_tokens,output_tokens\n0.0,2,13,199\n0.2,0,36,137\n0.4,2,456,156\n"
MAF = "function,minute,count\nF0000,0,40\nF0000,2,3\nF0001,0,7\nF0002,1,1\nF0003,2,0\n"
SERVEGEN = (
    "client,t_s,rate,cv,pattern,p1,p2\n"
    "0,0,0.5,1.2,Gamma,0.74802,0.044354\n"
    "0,600,0.25,7.3958,Weibull,0.42517,0.0090461\n"
    "10,600,1.0,0.2,Gamma,16.397,0.73362\n"
)


def file(tmp_path: Path, text: str, name: str = "trace.csv.gz") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "trace"])
@pytest.mark.parametrize("text", [AZURE, AZURE_AS_PUBLISHED])
def test_azure(tmp_path: Path, text: str, name: str) -> None:
    rows = list(read_azure(file(tmp_path, text, name)))
    assert [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0.0, 4808, 10),
        (0.052, 3180, 8),
        (2.0, 110, 27),
    ]
    assert list(read_times_s(tmp_path / name)) == [0.0, 0.052, 2.0]


def test_vtc(tmp_path: Path) -> None:
    rows = list(read_vtc(file(tmp_path, VTC)))
    assert [(row.arrival_s, row.adapter, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0.0, 2, 13, 199),
        (0.2, 0, 36, 137),
        (0.4, 2, 456, 156),
    ]


def test_maf(tmp_path: Path) -> None:
    trace = read_maf(file(tmp_path, MAF))
    assert trace.names == ("F0000", "F0001", "F0002", "F0003")
    assert trace.totals().tolist() == [43, 7, 1, 0]
    assert trace.end_s == 180
    assert trace.mean_rate(0, 180) == pytest.approx(51 / 180)
    assert trace.mean_rate(30, 90) == pytest.approx((47 / 2 + 1 / 2) / 60)


def test_servegen(tmp_path: Path) -> None:
    trace = read_servegen(file(tmp_path, SERVEGEN))
    assert trace.names == ("0", "10")
    assert trace.totals().tolist() == [450, 600]
    assert trace.end_s == 1200


@pytest.mark.parametrize(
    ("source", "text", "reason"),
    [
        (Source.AZURE, "arrival_s,prompt_tokens\n0,1\n", ":1: missing column output_tokens"),
        (Source.AZURE, AZURE + "1.5,1,1\n", ":5: arrival_s 1.5 is before the line above it"),
        (
            Source.AZURE,
            AZURE + "3,-1,1\n",
            ":5: prompt_tokens must be a whole number of at least 1, not '-1'",
        ),
        (Source.AZURE, AZURE + "3,1,x\n", ":5: output_tokens must be"),
        (Source.AZURE, AZURE + "nan,1,1\n", ":5: arrival_s must be a number of at least 0"),
        (Source.AZURE, "arrival_s,prompt_tokens,output_tokens\n", ": no requests in it"),
        (Source.AZURE, AZURE_AS_PUBLISHED + "yesterday,1,1\n", ":5: TIMESTAMP must be a time"),
        (Source.AZURE, AZURE_AS_PUBLISHED + "2023-11-16 18:15:49+00:00,1,1\n", ":5: TIMESTAMP is of another"),
        (Source.AZURE, AZURE_AS_PUBLISHED + "2023-11-16 18:15:47,1,1\n", ":5: arrival_s"),
        (Source.VTC, AZURE, ":1: missing column adapter"),
        (Source.VTC, VTC + "0.5,-1,1,1\n", ":5: adapter must be a whole number of at least 0"),
        (Source.MAF, "function,minute\nF,0\n", ":1: missing column count"),
        (Source.MAF, MAF + "F0000,0,1\n", ":7: F0000 has a row for this minute already"),
        (Source.MAF, MAF + ",0,1\n", ":7: function must not be empty"),
        (Source.MAF, MAF + "F0000,5,-1\n", ":7: count must be"),
        (Source.MAF, "function,minute,count\nF,0,0\n", ": no requests in it"),
        (Source.SERVEGEN, MAF, ":1: missing column client, t_s, rate, pattern, p1"),
        (Source.SERVEGEN, SERVEGEN + "1,601,1,1,Gamma,1,1\n", ":5: t_s must be a multiple of 600"),
        (Source.SERVEGEN, SERVEGEN + "1,600,-1,1,Gamma,1,1\n", ":5: rate must be"),
        (Source.SERVEGEN, SERVEGEN + "1,600,1,1,Pareto,1,1\n", ":5: pattern must be one of"),
        (Source.SERVEGEN, SERVEGEN + "1,600,1,1,Gamma,0,1\n", ":5: p1 must be a number above 0"),
        (Source.SERVEGEN, SERVEGEN + "1,600,1,1,Weibull,0.01,1\n", ":5: p1: the shape"),
    ],
)
def test_a_bad_trace_is_refused_with_line_and_column(
    tmp_path: Path, source: Source, text: str, reason: str
) -> None:
    path = file(tmp_path, text)
    with pytest.raises(WorkloadError) as caught:
        list(make_workload(Recipe(source=source, trace=path)))
    assert str(caught.value).startswith(f"{path}{reason}")


@pytest.mark.parametrize(
    ("source", "text"),
    [(Source.AZURE, AZURE), (Source.VTC, VTC), (Source.MAF, MAF), (Source.SERVEGEN, SERVEGEN)],
)
def test_every_trace_becomes_the_one_format(tmp_path: Path, source: Source, text: str) -> None:
    workload = make_workload(Recipe(source=source, trace=file(tmp_path, text), ranks="8,64", seed=4))
    save_workload(tmp_path / "w.jsonl", workload)
    saved = WorkloadFile(tmp_path / "w.jsonl")
    assert saved.header == workload.header
    assert list(saved) == list(workload)
    assert saved.header is not None
    assert saved.header.recipe["trace"] == "trace.csv.gz", "a name, no folder"


def test_azure_keeps_times_and_lengths_and_gets_adapters(tmp_path: Path) -> None:
    path = file(tmp_path, AZURE)
    requests = list(make_workload(Recipe(source=Source.AZURE, trace=path, num_adapters=3)))
    assert [request.prompt_tokens for request in requests] == [4808, 3180, 110]
    assert {request.adapter for request in requests} <= {0, 1, 2}
    faster = Recipe(source=Source.AZURE, trace=path, rate=15, max_prompt_tokens=100, start_s=0.01)
    requests = list(make_workload(faster))
    assert [request.prompt_tokens for request in requests] == [100, 100]
    assert requests[-1].arrival_s == pytest.approx(2 / 15, abs=1e-6), "two requests at 15 a second"
    assert requests[0].arrival_s / requests[1].arrival_s == pytest.approx(0.042 / 1.99, rel=1e-3)


def test_vtc_keeps_its_clients(tmp_path: Path) -> None:
    path = file(tmp_path, VTC)
    workload = make_workload(Recipe(source=Source.VTC, trace=path))
    assert workload.header is not None
    assert workload.header.num_adapters == 3
    assert [request.adapter for request in workload] == [2, 0, 2]
    with pytest.raises(WorkloadError, match=r"trace\.csv\.gz:2: adapter 2 is unknown: there are 2"):
        list(make_workload(Recipe(source=Source.VTC, trace=path, num_adapters=2)))


def test_maf_keeps_the_counts_of_every_minute(tmp_path: Path) -> None:
    workload = make_workload(Recipe(source=Source.MAF, trace=file(tmp_path, MAF)))
    found = Counter((request.adapter, int(request.arrival_s // 60)) for request in workload)
    assert found == {(0, 0): 40, (0, 2): 3, (1, 0): 7, (2, 1): 1}
    assert workload.header is not None
    assert workload.header.names == ("F0000", "F0001", "F0002", "F0003")
    assert workload.header.duration_s == 180


def test_a_part_of_maf_at_another_rate(tmp_path: Path) -> None:
    text = "function,minute,count\n" + "".join(
        f"F{function:02},{minute},{100 // (function + 1)}\n" for function in range(20) for minute in range(30)
    )
    path = file(tmp_path, text)
    options = {"source": Source.MAF, "trace": path, "start_s": 90.0, "duration_s": 600.0, "rate": 2.0}
    workload = make_workload(Recipe(num_adapters=5, **options))
    requests = list(workload)
    assert len(requests) == pytest.approx(1200, abs=60)
    assert max(request.arrival_s for request in requests) < 600
    assert workload.header is not None
    assert len(set(workload.header.names or ())) == 5
    other = make_workload(Recipe(num_adapters=5, seed=1, **options))
    assert other.header is not None
    assert other.header.names != workload.header.names, "which functions, the seed says"
    grouped = make_workload(Recipe(num_adapters=2, functions_per_adapter=5, **options))
    shares = Counter(request.adapter for request in grouped)
    busy = sum(100 // (number + 1) for number in range(20) if number // 5 % 2 == 0)
    total = sum(100 // (number + 1) for number in range(20))
    assert shares[0] / shares.total() == pytest.approx(busy / total, abs=0.05)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_adapters": 9}, "num_adapters"),
        ({"start_s": 180.0}, "start_s"),
        ({"num_adapters": 1, "seed": 3, "start_s": 60.0, "duration_s": 60.0}, "start_s"),
    ],
)
def test_what_a_counted_trace_cannot_give_is_refused(
    tmp_path: Path, options: dict[str, float], field: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        make_workload(Recipe(source=Source.MAF, trace=file(tmp_path, MAF), **options))
    assert caught.value.field == field


def test_servegen_keeps_counts_and_burstiness(tmp_path: Path) -> None:
    text = "client,t_s,rate,cv,pattern,p1,p2\n0,0,5,4,Gamma,0.0625,1\n1,0,5,0.1,Gamma,100,1\n"
    requests = list(make_workload(Recipe(source=Source.SERVEGEN, trace=file(tmp_path, text))))
    for adapter, cv in ((0, 4.0), (1, 0.1)):
        times_s = [request.arrival_s for request in requests if request.adapter == adapter]
        assert len(times_s) == 3000
        gaps_s = np.diff(times_s)
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.15)


def test_gaps_too_small_for_floating_point_make_one_burst() -> None:
    trace = CountedTrace(
        names=("a", "b"),
        window_s=60,
        windows=np.zeros(2, dtype=np.int64),
        sources=np.arange(2),
        counts=np.array([1.0, 1.0]),
        kinds=np.ones(2, dtype=np.int64),
        shapes=np.full(2, 1e-3),
    )
    for seed in range(50):
        ((times_s, adapters),) = CountedTraffic(trace=trace, adapters=np.arange(2)).batches(seed)
        assert ((times_s >= 0) & (times_s <= 60)).all()
        assert sorted(adapters.tolist()) == [0, 1]


def test_times_alone_can_be_replayed(tmp_path: Path) -> None:
    path = file(tmp_path, AZURE)
    replay = make_workload(Recipe(arrivals=ArrivalKind.REPLAY, replay=path))
    assert [request.arrival_s for request in replay] == [0.0, 0.052, 2.0]
    save_workload(tmp_path / "w.jsonl", replay)
    again = Recipe(arrivals=ArrivalKind.REPLAY, replay=tmp_path / "w.jsonl", rate=3.0)
    assert [request.arrival_s for request in make_workload(again)] == pytest.approx([0.0, 0.026, 1.0])
    at_once = file(tmp_path, "arrival_s\n0\n0\n", "once.csv")
    with pytest.raises(RecipeError, match="all come at once"):
        make_workload(Recipe(arrivals=ArrivalKind.REPLAY, replay=at_once, rate=3.0))
    assert len(list(make_workload(Recipe(arrivals=ArrivalKind.REPLAY, replay=at_once)))) == 2


def test_popularity_can_be_read_of_every_trace(tmp_path: Path) -> None:
    assert read_totals(file(tmp_path, MAF)) == [43, 7, 1, 0]
    assert read_totals(file(tmp_path, SERVEGEN)) == [450, 600]
    assert sorted(read_totals(file(tmp_path, VTC))) == [1, 2]
    assert read_totals(file(tmp_path, "function,hash_function,total\nF0,ab,12\nF1,cd,3\n")) == [12, 3]
    save_workload(tmp_path / "w.jsonl", make_workload(Recipe(source=Source.VTC, trace=file(tmp_path, VTC))))
    assert sorted(read_totals(tmp_path / "w.jsonl")) == [1, 2]
    with pytest.raises(WorkloadError, match=r"trace\.csv\.gz:1: there is no popularity in"):
        read_totals(file(tmp_path, AZURE))
    with pytest.raises(WorkloadError, match=r":2: total must be"):
        read_totals(file(tmp_path, "function,total\nF0,-1\n"))
