"""The machine: memory and CPU time available to this process within its container, and the CPU's name."""

from __future__ import annotations

import itertools
import math
import os
import platform
from pathlib import Path

from loraplex.core.errors import ModelError


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory available without swapping or exceeding a container's limit."""
    return min([_machine_bytes(proc), *_container_bytes(cgroup)])


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def max_threads() -> int:
    """Return the most threads that can run at a time, within the container's limits."""
    quota = cpu_quota()
    return num_cores() if quota is None else max(min(num_cores(), math.ceil(quota)), 1)


def check_threads(num_threads: int) -> None:
    """Raise ModelError unless this many threads can run at a time."""
    limit = max_threads()
    if not 1 <= num_threads <= limit:
        cores = "1 core" if limit == 1 else f"{limit} cores"
        raise ModelError(
            f"--threads {num_threads} is out of range: this process may use {cores}; give 1 to {limit}, "
            "or leave it out"
        )


def cpu_quota(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores' worth of CPU time that the container may use (docker run --cpus); None without a
    limit."""
    quotas = [_quota(line[0].split()) for line in map(_lines, _cpu_max_files(proc, cgroup)) if line]
    v1 = [_lines(cgroup / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if all(v1):
        quotas.append(_quota([lines[0] for lines in v1]))
    return min((quota for quota in quotas if quota is not None), default=None)


def spread_cores(count: int, topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return `count` of the cores that this process may use, as far apart as possible: two hardware threads
    of one core share its execution units. Returns all cores if there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    threads: dict[str, list[int]] = {}
    for core in cores:
        siblings = _lines(topology / f"cpu{core}" / "topology" / "thread_siblings_list")
        threads.setdefault(siblings[0] if siblings else str(core), []).append(core)
    firsts = [each[0] for each in threads.values()]
    # A virtual machine may not report which of its cores are hardware threads of one: those are adjacent.
    if count <= len(firsts):
        return [firsts[-1 - index * len(firsts) // count] for index in range(count)][::-1]
    others = [core for core in cores if core not in firsts]
    return sorted([*firsts, *others[: count - len(firsts)]])


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name, or the best substitute."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    # ARM kernels name no model, only the implementer's part number.
    name = fields.get("model name") or (
        f"ARM part {part.strip()}" if (part := fields.get("CPU part")) else ""
    )
    return name.strip() or platform.processor() or platform.machine()


def _cpu_max_files(proc: Path, cgroup: Path) -> list[Path]:
    """Return the cpu.max files of this process's cgroup and of its ancestors, all of which limit it."""
    own = next((line[3:] for line in _lines(proc / "self" / "cgroup") if line.startswith("0::")), "/")
    folder = cgroup / own.lstrip("/")
    folders = [folder, *itertools.takewhile(lambda each: each != cgroup.parent, folder.parents)]
    return [each / "cpu.max" for each in folders]


def _quota(fields: list[str]) -> float | None:
    """Return quota over period; None without a limit, which is the quota "max" (cgroup v2) or -1 (v1)."""
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None
    return int(fields[0]) / int(fields[1])


def _machine_bytes(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes(cgroup: Path) -> list[int]:
    """Return the bytes left within the limits of cgroup v2 and v1, where there are any. Cached files count as
    used there, but can be reclaimed."""
    kinds = (
        (cgroup, "memory.max", "memory.current", ""),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    )
    found = []
    for folder, limit_file, usage_file, prefix in kinds:
        limit, usage = _lines(folder / limit_file), _lines(folder / usage_file)
        if limit and usage and limit[0].isdigit() and usage[0].isdigit():  # v2 says "max" for no limit
            stat = dict(line.split() for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            found.append(max(int(limit[0]) - max(int(usage[0]) - cached, 0), 0))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
