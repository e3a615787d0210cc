"""Folders that outlive a killed process, and their removal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loraplex.server.private_folder import PrivateFolder

KILLED = """
import os, signal, sys
from loraplex.server.private_folder import PrivateFolder
folder = PrivateFolder(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    folder = PrivateFolder(str(tmp_path), "ray")
    (made,) = tmp_path.iterdir()
    assert str(made) == folder.name
    assert made.name.startswith("loraplex-ray-")
    assert made.stat().st_mode & 0o777 == 0o700
    folder.cleanup()
    folder.cleanup()
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "loraplex-of-another-kind").mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    first, second = PrivateFolder(str(tmp_path)), PrivateFolder(str(tmp_path))
    kept = {Path(first.name).name, Path(second.name).name, "loraplex-of-another-kind"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    first.cleanup()
    second.cleanup()
