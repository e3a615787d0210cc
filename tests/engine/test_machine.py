"""How much memory there is to plan with, and what the processor is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.engine.machine import available_bytes, cpu_model

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
    ],
    ids=["no container", "no limit", "cgroup v2", "cgroup v1", "beyond the limit"],
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
