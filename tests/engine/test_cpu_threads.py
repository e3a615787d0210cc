"""Threads of a CPU engine: numbers that are refused, and changes while requests run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import ModelError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine import cpu_build
from loraplex.engine.build import build_core
from loraplex.engine.cpu_threads import Reading, StepThreads
from loraplex.engine.machine import cpu_quota, max_threads
from loraplex.engine.options import EngineOptions
from loraplex.perf.thread_governor import StepUsage, ThreadGovernor
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.work import StepWork


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model(folder)
    return folder


def generate(options: EngineOptions, num_tokens: int = 60) -> list[list[int]]:
    """Greedy answers to four prompts of different lengths, all in one batch."""
    engine = build_core(options)
    answers: dict[str, list[int]] = {}
    for index in range(4):
        request = EngineRequest(
            request_id=str(index),
            prompt_token_ids=list(range(1, 4 + 9 * index)),
            params=SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True),
        )
        answers[request.request_id] = []
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    engine.close()
    return list(answers.values())


def options_of(folder: Path, num_threads: int | None = None) -> EngineOptions:
    return EngineOptions(model=str(folder), device="cpu", kv_memory_bytes=1 << 22, num_threads=num_threads)


class HeldUpMeters:
    """Meters of a machine where two threads wait for each other for seconds, and one does not."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._reading = Reading(0.0, 0.0, 0)

    def read(self) -> Reading:
        wall_s = 1.0 if torch.get_num_threads() == 2 else 0.02
        self.seen.append(torch.get_num_threads())
        self._reading = Reading(self._reading.wall_s + wall_s, self._reading.cpu_s + 0.01, 0)
        return self._reading


def test_answers_agree_when_threads_change_in_the_middle(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(options_of(model_folder, num_threads=1))
    meters = HeldUpMeters()
    monkeypatch.setattr(cpu_build, "default_threads", lambda: 2)
    monkeypatch.setattr(cpu_build, "StepThreads", lambda *made: StepThreads(*made, meters.read))
    with caplog.at_level(logging.DEBUG):
        assert generate(options_of(model_folder)) == expected
    assert set(meters.seen) == {1, 2}
    assert meters.seen[0] == 2
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == (
        "other programs take CPU time from this process: using 1 of 2 threads, "
        "steps take 20 ms instead of 1,000 ms; set --threads to choose"
    )
    assert torch.get_num_threads() == 2, "a closed engine gives the threads back"


def decode(position: int) -> Chunk:
    """A chunk whose one token is not known yet, as when steps are launched ahead."""
    return Chunk(
        request_id=str(position), adapter=None, start=position, token_ids=[], block_ids=[], samples=True
    )


def test_the_governor_is_told_what_contexts_cost() -> None:
    seen: list[StepUsage] = []

    class Recorder(ThreadGovernor):
        def observe(self, step: StepUsage, now_s: float) -> None:
            seen.append(step)

    threads = StepThreads(Recorder(2), StepWork(position_cost=0.01))
    for plan in (StepPlan(chunks=(decode(0),)), StepPlan(chunks=(decode(1000), decode(500)))):
        with threads.step(plan):
            pass
    assert [step.num_tokens for step in seen] == [1, 2]
    assert [step.work for step in seen] == pytest.approx([1.0, 17.0], abs=0.02)


def test_the_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    meters = HeldUpMeters()
    threads = StepThreads(ThreadGovernor(2), StepWork(), meters.read)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with threads.step(StepPlan(chunks=(decode(10),))):
                pass
        threads._governor = ThreadGovernor(2)  # as if all threads had been faster for a while
        for _ in range(20):
            with threads.step(StepPlan(chunks=(decode(10),))):
                pass
    assert len(caplog.records) == 1


def test_a_given_number_is_kept(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "StepThreads", lambda *made: pytest.fail("it would be changed"))
    num_threads = min(max_threads(), 2)
    generate(options_of(model_folder, num_threads), num_tokens=2)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_impossible_numbers_are_refused(num_threads: int) -> None:
    with pytest.raises(ModelError, match=rf"--threads {num_threads} is out of range: this process may use"):
        build_core(options_of(Path("nowhere"), num_threads))


def test_threads_are_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="--threads is for an engine on a CPU"):
        build_core(EngineOptions(model="nowhere", device="cuda", num_threads=1))


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("/", {}, None),
        ("/", {"cpu.max": "max 100000"}, None),
        ("/", {"cpu.max": "150000 100000"}, 1.5),
        ("/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4.0),
        ("/a/b", {"cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, 2.0),
        ("/other", {"a/cpu.max": "400000 100000"}, None),
        ("/", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ("/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_a_container_limits_cpu_time(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"0::{own}\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert cpu_quota(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup") == quota


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "engine", "decode", "--shape", "tiny", "--device", "cpu"],
        ["profile", "--shape", "tiny", "--device", "cpu"],
    ],
)
def test_commands_refuse_more_threads_than_cores(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--threads", "100000"])
    assert isinstance(result.exception, ModelError)
    assert "--threads 100000 is out of range" in str(result.exception)


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_that_wait_spin_for_a_moment_only_unless_told_otherwise(
    given: dict[str, str], spin_count: str | None
) -> None:
    """OpenMP reads it when torch is imported, so it has to be there before."""
    program = "import os, sys, loraplex; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(spin_count), "False"]
