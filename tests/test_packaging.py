"""What is published carries its licence."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools sets argv itself
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="only a checkout can be built")
def test_wheel_and_sdist_hold_the_licence(tmp_path: Path) -> None:
    # Asked without an import: setuptools refuses to be imported where a library has imported distutils.
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("pyproject.toml needs setuptools 77 or newer to build")
    tree, out = tmp_path / "tree", tmp_path / "out"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "loraplex", tree / "loraplex", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith("licenses/LICENSE")]
        assert files.read(name) == licence
        [name] = [name for name in files.namelist() if name.endswith("dist-info/METADATA")]
        metadata = files.read(name).decode()
        assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(metadata.splitlines())
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE")
        assert member is not None
        assert member.read() == licence
