"""Traces of cold starts: what is made of the profiler's records, and the picture that is drawn of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import draw_timelines, gpu_cold
from benchmarks.trace_lanes import (
    ARRIVAL,
    COMPUTE,
    COPIES,
    FIRST_TOKEN,
    LANES,
    OTHERS_TOKENS,
    STEP,
    WAITS,
    WORKER_COPIES,
    WORKERS,
    TraceRecord,
    bus_stream,
    calls_within,
    device_lanes,
    merged,
    pauses,
    read_trace,
    timeline_of,
)
from loraplex.core.cold_start import ColdStart

MAIN, SIDE, BUS = 7, 13, 21
MB = 1 << 20
HTOD, DTOH = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"


def mark(name: str, begin: float, end: float) -> TraceRecord:
    return TraceRecord(name=name, begin_us=begin, end_us=end, on_device=False)


def on(stream: int, name: str, begin: float, end: float, num_bytes: int = 0) -> TraceRecord:
    return TraceRecord(name=name, begin_us=begin, end_us=end, stream=stream, num_bytes=num_bytes)


def a_cold_start() -> list[TraceRecord]:
    """Arrives at 1000; steps of 100 before and of 400 with it."""
    tokens = [mark(OTHERS_TOKENS, time, time + 1) for time in (700, 800, 900, 1000, 1400, 1500)]
    return [
        *tokens,
        mark(ARRIVAL, 1000, 1005),
        mark(STEP, 910, 999),
        mark(STEP, 1010, 1399),
        mark(FIRST_TOKEN, 1400, 1401),
        on(BUS, HTOD, 1020, 1100, 8 * MB),
        on(BUS, HTOD, 1101, 1102, 8),
        on(BUS, HTOD, 1103, 1300, 16 * MB),
        on(MAIN, HTOD, 1015, 1017, 4096),
        on(MAIN, "gemm", 1030, 1090),
        on(SIDE, "_wait", 1060, 1250),
        on(SIDE, "_shrink_blocks", 1251, 1260),
        on(MAIN, "Memcpy DtoD (Device -> Device)", 1300, 1310, 4 * MB),
        on(MAIN, DTOH, 1390, 1392, 128),
    ]


def test_lanes_are_told_apart_by_stream_name_and_size() -> None:
    found = timeline_of(a_cold_start(), 24 * MB)
    assert found["lanes"] == {
        COPIES: [[20.0, 300.0]],
        WAITS: [[60.0, 250.0]],
        COMPUTE: [[30.0, 90.0], [251.0, 260.0], [300.0, 310.0]],
        WORKER_COPIES: [],
        WORKERS: [],
    }
    assert found["steps_us"] == [[-90.0, -1.0], [10.0, 399.0]]
    assert found["first_token_us"] == 400.0
    assert found["decode_token_times_us"] == [-300.0, -200.0, -100.0, 0.0, 400.0, 500.0]
    assert (found["usual_gap_us"], found["pauses_us"]) == (100.0, [[0.0, 400.0]])


def test_rows_are_at_workers_from_their_leave_to_their_return() -> None:
    records = [
        on(BUS, HTOD, 0, 900, 64 * MB),
        on(MAIN, "_fetch", 50, 60),  # a step's integers
        on(SIDE, DTOH, 100, 120, MB),
        on(MAIN, DTOH, 130, 131, 128),  # tokens
        on(MAIN, "_fetch", 400, 460),
        on(SIDE, DTOH, 500, 520, MB),
        on(MAIN, "_fetch", 700, 760),
    ]
    lanes = device_lanes(records, 64 * MB)
    assert lanes[WORKERS] == [(100, 460), (500, 760)]
    assert lanes[WORKER_COPIES] == [(100, 120), (400, 460), (500, 520), (700, 760)]
    assert lanes[COPIES] == [(0, 900)]


def test_an_adapter_that_was_there_before_has_no_bus() -> None:
    uploads = [on(MAIN, HTOD, time, time + 2, 4096) for time in range(0, 1000, 100)]
    assert bus_stream(uploads, 24 * MB) is None
    assert bus_stream([], 24 * MB) is None
    assert device_lanes(uploads, 24 * MB) == {name: [] for name in LANES}


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(0, 10), (29, 40)], [(0, 40)]),
        ([(0, 10), (30, 40)], [(0, 10), (30, 40)]),
        ([(50, 60), (0, 100), (20, 30)], [(0, 100)]),
    ],
)
def test_intervals_that_nearly_touch_are_one(
    intervals: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> None:
    assert merged(intervals) == expected


def test_a_pause_is_told_by_what_was_usual_before() -> None:
    usual_us, found = pauses([-30, -20, -10, 4, 20, 30])
    assert (usual_us, found) == (10, [(4, 20)])


@pytest.mark.parametrize("missing", [ARRIVAL, FIRST_TOKEN])
def test_a_trace_without_its_marks_is_none(missing: str) -> None:
    with pytest.raises(AssertionError, match=missing):
        timeline_of([record for record in a_cold_start() if record.name != missing], 24 * MB)


def test_a_trace_file_is_read_for_marks_and_the_device(tmp_path: Path) -> None:
    def event(category: str, name: str, **args: int) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": 5.5, "dur": 2.0, "args": args}

    events = [
        {"ph": "M", "name": "process_name", "ts": 0},
        event("cpu_op", "aten::copy_"),
        event("user_annotation", "step"),
        event("gpu_user_annotation", "step", stream=7),
        event("kernel", "_wait", stream=13),
        event("gpu_memcpy", HTOD, stream=21, bytes=64),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path) == [mark("step", 5.5, 7.5), on(13, "_wait", 5.5, 7.5), on(21, HTOD, 5.5, 7.5, 64)]


@pytest.mark.slow
def test_cold_starts_are_traced_on_a_cpu_too(tmp_path: Path) -> None:
    out = tmp_path / "gpu_cold.json"
    gpu_cold.main(["timeline", "--tiny", "--out", str(out)])
    section = draw_timelines.read_section(out)
    policies = section["results"]["policies"]
    assert list(policies) == ["cached", "on-demand", "overlap"]
    for found in policies.values():
        assert all(found["lanes"][name] == [] for name in LANES)
        assert 0 < found["first_token_us"] < found["decode_token_times_us"][-1]
        assert found["untraced_first_token_us"] > 0
        assert len(found["steps_us"]) >= 8 + 1 + 4
    draw_timelines.main(["--results", str(out), "--out", str(tmp_path / "tiny.png")])


def section_of(policies: list[str]) -> dict[str, Any]:
    timeline = timeline_of(a_cold_start(), 24 * MB) | {"untraced_first_token_us": 390.0}
    return {
        "date": "2020-02-02T00:00:00",
        "shape": "tiny",
        "machine": {"gpu": "a synthetic one"},
        "results": {
            "prompt_tokens": 8,
            "num_decoding": 8,
            "policies": dict.fromkeys(policies, timeline),
        },
    }


def write(path: Path, section: Any) -> Path:
    path.write_text(json.dumps({"timeline": section}))
    return path


def test_the_picture_has_every_policy(tmp_path: Path) -> None:
    results = write(tmp_path / "results.json", section_of([str(policy) for policy in reversed(ColdStart)]))
    out = tmp_path / "images" / "timelines.png"
    draw_timelines.main(["--results", str(results), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size < 300_000
    panels = draw_timelines.draw(draw_timelines.read_section(results)).axes
    assert [panel.get_title(loc="left") for panel in panels] == [str(policy) for policy in ColdStart]
    assert all("first token 0.4 ms" in panel.get_title(loc="right") for panel in panels)
    bars = {len(path.get_paths()) for path in panels[0].collections}
    assert {1, 3} <= bars  # copies and waits; compute


def without_machine() -> dict[str, Any]:
    return {key: value for key, value in section_of(["overlap"]).items() if key != "machine"}


def without_lanes() -> dict[str, Any]:
    section = section_of(["overlap"])
    del section["results"]["policies"]["overlap"]["lanes"]
    return section


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "no section 'timeline'"),
        ('{"idle": {}}', "no section 'timeline'"),
        ('{"timeline": {"results": {"policies": {}}}}', "holds no policies"),
        ('{"timeline": 3}', "holds no policies"),
        (json.dumps({"timeline": section_of(["magic"])}), "'magic', which there is not"),
        (
            json.dumps({"timeline": without_lanes()}),
            "'overlap' in the section 'timeline' is not one: KeyError",
        ),
    ],
)
def test_results_that_cannot_be_drawn_say_why(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        draw_timelines.main(["--results", str(path), "--out", str(tmp_path / "out.png")])
    assert message in str(stopped.value)
    assert not (tmp_path / "out.png").exists()


def test_calls_before_and_behind_the_mark_are_not_counted() -> None:
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("cudaDeviceSynchronize", 0, 1),
        event("the step", 2, 9),
        event("cudaGraphLaunch", 2, 3),
        event("aten::copy_", 3, 4),
        event("cudaEventSynchronize", 9, 10),
        event("cudaDeviceSynchronize", 11, 12),
    ]
    assert calls_within("the step", events) == ["cudaGraphLaunch", "cudaEventSynchronize"]
