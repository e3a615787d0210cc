"""The published package: its version, its licence, and the files that it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from loraplex.perf.named_profiles import named_profiles

ROOT = Path(__file__).parent.parent
BUILD_EDITABLE = """
import sys
from setuptools import build_meta
build_meta.build_editable(sys.argv[1])
"""

VERSION = "import loraplex as l; print(l.__version__, l.__version__)"
NAMES = "from loraplex.perf import named_profiles as n; print(n.__file__, *n.named_profiles(), sep='\\n')"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is needed to build the package."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("only a checkout can be built")
    # Asked without an import: setuptools refuses to be imported where a library has imported distutils.
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("pyproject.toml needs setuptools 77 or newer to build")
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "loraplex", tree / "loraplex", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def built(tree: Path) -> Path:
    """The folder that `make package` makes, with the sdist and the wheel that was built from it."""
    shutil.copy(ROOT / "Makefile", tree)
    installed = ("-o", ".venv/.installed-dev", f"BIN={Path(sys.executable).parent}")
    done = subprocess.run(
        ["make", *installed, "package", "BUILD_OPTIONS=--no-isolation"],
        cwd=tree,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2, "twine has checked both"
    return tree / "dist"


def environment() -> dict[str, str]:
    """Return this process's, without a version that is given from outside."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM")}


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def git(*args: str, cwd: Path) -> None:
    who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com", "-c", "tag.gpgSign=false")
    subprocess.run(["git", *who, *args], cwd=cwd, check=True, capture_output=True)


def test_the_version_is_the_latest_tag_if_one_can_be_seen(tree: Path, tmp_path: Path) -> None:
    shutil.copy(tree / "pyproject.toml", tmp_path)
    (tmp_path / "loraplex").mkdir()

    def found() -> str:
        return run("-m", "setuptools_scm", cwd=tmp_path).stdout.strip()

    assert found() == "0.1.0", "an archive, or a copy into an image"
    git("init", "-q", cwd=tmp_path)
    git("add", "pyproject.toml", cwd=tmp_path)
    git("commit", "-qm", "Begin", "--no-gpg-sign", cwd=tmp_path)
    assert found().startswith("0.1.0.post1.dev1+g"), "a clone without tags"
    git("tag", "v1.2.3", cwd=tmp_path)
    assert found() == "1.2.3"
    git("tag", "some-branch-point", cwd=tmp_path)
    git("commit", "-qm", "Go on", "--no-gpg-sign", "--allow-empty", cwd=tmp_path)
    assert found().startswith("1.2.3.post1.dev1+g")


def test_an_editable_install_is_a_path_and_needs_no_warning(tree: Path, tmp_path: Path) -> None:
    """With a finder, Python takes a clone for the package when it is started in the folder above it."""
    assert "Warning" not in run("-c", BUILD_EDITABLE, str(tmp_path), cwd=tree).stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.startswith("__editable__"))
        assert name.endswith(".pth")
        assert files.read(name).decode().strip() == str(tree)


def test_the_package_knows_the_version_that_it_was_built_as(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    program = f"import sys; sys.path.insert(0, {str(wheel)!r}); {VERSION}"
    assert run("-c", program, cwd=built).stdout == "0.1.0 0.1.0\n"


def test_wheel_and_sdist_hold_the_licence(built: Path) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith("licenses/LICENSE")]
        assert files.read(name) == licence
        [name] = [name for name in files.namelist() if name.endswith("dist-info/METADATA")]
        metadata = files.read(name).decode()
        assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(metadata.splitlines())
        assert "Version: 0.1.0" in metadata.splitlines()
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE")
        assert member is not None
        assert member.read() == licence


def test_profiles_are_found_where_the_package_is_installed(built: Path) -> None:
    """A wheel is a zip, and Python imports from one: not even a folder is needed."""
    [wheel] = built.glob("*.whl")
    done = subprocess.run(
        [sys.executable, "-c", NAMES],
        cwd=built,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=False,
    )
    place, *names = done.stdout.splitlines()
    assert place.startswith(str(wheel)), done.stderr
    assert names == list(named_profiles())
