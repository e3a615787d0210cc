"""The processes of a sharded engine: however it ends, all of them end, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest
import shard_builds
import torch
from tiny import save_model

from loraplex.core.errors import CapacityError, EngineDeadError, ModelError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.machine import num_cores
from loraplex.engine.options import EngineOptions
from loraplex.engine.parallel import worker
from loraplex.engine.parallel.start import start_parallel
from loraplex.model.collective import GroupCollective


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    num_threads, before = torch.get_num_threads(), children()
    yield
    assert list((tmp_path / "tmp").iterdir()) == []
    assert torch.get_num_threads() == num_threads
    assert children() == before


def children() -> set[int]:
    """Processes that this one has started and not seen the end of."""
    found: set[int] = set()
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended since
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def test_a_process_killed_in_mid_step_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "base")
    before = children()
    engine = build_core(
        EngineOptions(
            model=str(tmp_path / "base"), kv_memory_bytes=1 << 20, tensor_parallel=2, num_threads=num_cores()
        )
    )
    try:
        assert torch.get_num_threads() == max(num_cores() // 2, 1)
        [pid] = children() - before
        in_collective = threading.Event()
        all_reduce = GroupCollective.all_reduce

        def signalled(self: GroupCollective, x: torch.Tensor) -> None:
            in_collective.set()
            all_reduce(self, x)

        monkeypatch.setattr(GroupCollective, "all_reduce", signalled)
        os.kill(pid, signal.SIGSTOP)

        def kill_when_waited_for() -> None:
            in_collective.wait()
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_waited_for)
        killer.start()
        request = EngineRequest(
            request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=9)
        )
        engine.add_request(request)
        with pytest.raises(EngineDeadError, match="shard 1: killed by SIGKILL"):
            engine.step()
        killer.join()
        with pytest.raises(EngineDeadError, match="shard 1"):
            engine.step()
        with pytest.raises(EngineDeadError, match="shard 1"):
            engine.prepare()  # what an engine does that has nothing to do
    finally:
        engine.close()


def test_a_shard_that_cannot_be_loaded_ends_the_start_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = [str(Path(shard_builds.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    build = partial(shard_builds.build_but_one, failing=1)
    with pytest.raises(EngineDeadError, match="shard 1: CapacityError: no room for shard 1"):
        start_parallel(build, count=2, device="cpu", num_threads=1, report=lambda phase, fraction: None)


@pytest.mark.slow
def test_a_worker_leaves_with_its_parent() -> None:
    their_calls, calls = Pipe(duplex=False)
    answers, their_answers = Pipe(duplex=False)
    fds = (their_calls.fileno(), their_answers.fileno())
    with calls, answers, their_calls, their_answers:
        command = [sys.executable, "-m", worker.__name__, *map(str, fds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds) as process:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == worker.EXIT_PARENT_GONE


def test_numbers_of_processes_that_cannot_be_start_none(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(ModelError, match=r"does not divide into 3 equal parts.* can be 1 or 2"):
        build_core(EngineOptions(model=str(tmp_path), tensor_parallel=3))
    with pytest.raises(ModelError, match="at least 1, not 0"):
        build_core(EngineOptions(model=str(tmp_path), tensor_parallel=0))
    with pytest.raises(CapacityError, match="to each of 2 processes"):
        build_core(EngineOptions(model=str(tmp_path), tensor_parallel=2, kv_memory_bytes=1 << 60))
