"""The environment of a measurement. No host names and no paths: results are published."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loraplex.engine.machine import cpu_model, num_cores

CLIENT_PACKAGES = ("loraplex", "aiohttp", "numpy", "uvloop")
ENGINE_PACKAGES = ("loraplex", "torch", "triton", "numpy", "numba")


def environment(packages: Sequence[str] = CLIENT_PACKAGES) -> dict[str, Any]:
    """Return date, machine, versions and commit. LORAPLEX_COMMIT names the commit if the code has no git
    history."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := package_version(name)) is not None},
        "git_commit": os.environ.get("LORAPLEX_COMMIT") or git_commit(),
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "arch": platform.machine(),
        **gpu(),
        "os": f"{platform.system()} {platform.release().partition('-')[0]}",
    }


def gpu() -> dict[str, Any]:
    """Return the CUDA device, if torch is imported and there is one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "gpu_memory_mib": properties.total_memory >> 20}


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit(directory: Path = Path(__file__).parent) -> str | None:
    """Return the commit the code was run from, with `+dirty` if files differ; None outside a repository."""
    try:
        commit = _git(directory, "rev-parse", "--short=12", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+dirty" if changed else "")


def _git(directory: Path, *args: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(directory), *args], capture_output=True, text=True, check=True, timeout=10
    )
    return result.stdout.strip()
