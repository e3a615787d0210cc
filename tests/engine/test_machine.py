"""The memory there is to plan with, and the name of the processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.engine.machine import available_bytes, cpu_model, spread_cores

MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 800 kB\n"


def machine(root: Path, files: dict[str, str]) -> int:
    (root / "meminfo").write_text(MEMINFO)
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_bytes(proc=root, cgroup=root / "cgroup")


@pytest.mark.parametrize(
    ("files", "num_kib"),
    [
        ({}, 800),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 800),
        ({"memory.max": f"{500 * 1024}\n", "memory.current": f"{100 * 1024}\n"}, 400),
        ({"memory/memory.limit_in_bytes": str(300 * 1024), "memory/memory.usage_in_bytes": "0"}, 300),
        ({"memory.max": "10", "memory.current": "20"}, 0),
        (
            {
                "memory.max": f"{500 * 1024}\n",
                "memory.current": f"{500 * 1024}\n",
                "memory.stat": f"anon 7\nactive_file {100 * 1024}\ninactive_file {200 * 1024}\n",
            },
            300,
        ),
        (
            {
                "memory/memory.limit_in_bytes": str(300 * 1024),
                "memory/memory.usage_in_bytes": str(300 * 1024),
                "memory/memory.stat": f"active_file 7\ntotal_active_file {50 * 1024}\n",
            },
            50,
        ),
    ],
    ids=[
        "no container",
        "no limit",
        "cgroup v2",
        "cgroup v1",
        "beyond the limit",
        "cgroup v2 full of files",
        "cgroup v1 full of files",
    ],
)
def test_the_container_limits_the_machine(tmp_path: Path, files: dict[str, str], num_kib: int) -> None:
    assert machine(tmp_path, files) == num_kib * 1024


def test_a_system_without_proc_still_has_memory(tmp_path: Path) -> None:
    assert available_bytes(proc=tmp_path / "none", cgroup=tmp_path / "none") > 2**20


def test_cpu_model_reads_both_kinds_of_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\n")
    assert cpu_model(cpuinfo) == "Some CPU @ 2 GHz"
    cpuinfo.write_text("processor\t: 0\nCPU part\t: 0xd0c\n")
    assert cpu_model(cpuinfo) == "ARM part 0xd0c"
    assert cpu_model(tmp_path / "absent")


def say_siblings(folder: Path, siblings: dict[int, str]) -> Path:
    for core, names in siblings.items():
        place = folder / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(names + "\n")
    return folder


def test_cores_of_their_own_come_before_second_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    topology = say_siblings(tmp_path, {core: f"{core % 4},{core % 4 + 4}" for core in range(8)})
    assert spread_cores(4, topology) == [0, 1, 2, 3]
    assert spread_cores(2, topology) == [1, 3]
    assert spread_cores(6, topology) == [0, 1, 2, 3, 4, 5]
    assert spread_cores(9, topology) == list(range(8))


def test_cores_that_nothing_is_known_of_are_taken_far_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 10)))
    assert spread_cores(4, tmp_path) == [3, 5, 7, 9]
    assert spread_cores(3, tmp_path) == [4, 7, 9]
    assert spread_cores(1, tmp_path) == [9]
