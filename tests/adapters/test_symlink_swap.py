"""Symlinks that are swapped between the check of a path and its opening lead to no file outside."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from adapter_factory import SHAPE, make_tensors, write_adapter
from swapping import before_opening, point

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.open_file import NotRegularFileError
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import AdapterError, PathNotAllowedError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "open" / "good")
    write_adapter(tmp_path / "open" / "bot")
    write_adapter(tmp_path / "secret", tensors=make_tensors(seed=7))
    return tmp_path / "open"


@pytest.fixture
def allowed(root: Path) -> AllowedPaths:
    return AllowedPaths([root])


def read(allowed: AllowedPaths, folder: Path) -> str:
    """The version of what is read from a folder after it was found to be allowed, as a load does it."""
    return read_adapter(allowed.check(folder), SHAPE, open_file=allowed.open).version


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE])
@pytest.mark.parametrize("was_link", [True, False])
def test_a_file_swapped_for_a_link_to_outside_is_refused(
    allowed: AllowedPaths, root: Path, tmp_path: Path, name: str, was_link: bool
) -> None:
    if was_link:
        point(root / "bot" / name, root / "good" / name)
    outside = tmp_path / "secret" / name
    with (
        before_opening(name, lambda: point(root / "bot" / name, outside)),
        pytest.raises(PathNotAllowedError, match="outside the folders"),
    ):
        read(allowed, root / "bot")


def test_a_folder_swapped_for_a_link_to_outside_is_refused(
    allowed: AllowedPaths, root: Path, tmp_path: Path
) -> None:
    def swap() -> None:
        os.rename(root / "bot", root / "away")
        (root / "bot").symlink_to(tmp_path / "secret")

    with (
        before_opening("bot", swap),
        pytest.raises(PathNotAllowedError, match="outside the folders"),
    ):
        read(allowed, root / "bot")


def test_a_link_swapped_for_another_inside_is_followed(allowed: AllowedPaths, root: Path) -> None:
    point(root / "bot" / WEIGHTS_FILE, root / "good" / WEIGHTS_FILE)
    expected = read(allowed, root / "bot")
    other = write_adapter(root / "other", tensors=make_tensors(seed=3))
    with before_opening(WEIGHTS_FILE, lambda: point(root / "bot" / WEIGHTS_FILE, other / WEIGHTS_FILE)):
        assert read(allowed, root / "bot") != expected


def test_links_that_stay_inside_go_on_working(tmp_path: Path) -> None:
    """A hub's cache, opened as a whole: snapshots are links to blobs."""
    repo = tmp_path / "hub" / "models--org--bot"
    plain = write_adapter(tmp_path / "plain")
    snapshot = repo / "snapshots" / "commit"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (repo / "blobs" / f"hash-of-{name}").write_bytes((plain / name).read_bytes())
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / f"hash-of-{name}")
    expected = read_adapter(plain, SHAPE).version
    assert read(AllowedPaths([tmp_path / "hub"]), snapshot) == expected
    with pytest.raises(PathNotAllowedError):
        read(AllowedPaths([repo / "snapshots"]), snapshot)


def test_a_file_swapped_for_a_pipe_is_not_waited_for(allowed: AllowedPaths, root: Path) -> None:
    def swap() -> None:
        (root / "bot" / WEIGHTS_FILE).unlink()
        os.mkfifo(root / "bot" / WEIGHTS_FILE)

    with before_opening(WEIGHTS_FILE, swap), pytest.raises(AdapterError, match="is not a regular file"):
        read(allowed, root / "bot")


def test_a_link_to_the_root_itself_is_no_file(allowed: AllowedPaths, root: Path) -> None:
    point(root / "bot" / WEIGHTS_FILE, root)
    with pytest.raises(NotRegularFileError):
        allowed.open(root / "bot" / WEIGHTS_FILE)


def test_a_loop_of_links_is_an_error(allowed: AllowedPaths, root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        allowed.open(root / "loop")


def test_a_header_is_checked_of_the_file_that_is_open(
    allowed: AllowedPaths, root: Path, tmp_path: Path
) -> None:
    """The safetensors library opens files itself; it must not look at another file than ours."""
    weights = root / "bot" / WEIGHTS_FILE
    broken = tmp_path / "broken"
    broken.write_bytes(b"not safetensors")

    def open_then_swap(path: Path) -> Any:
        file = allowed.open(path)
        if path.name == WEIGHTS_FILE:
            point(weights, broken)
        return file

    # The swap shows at the end, as a change of the files; both attempts fail, and not for a bad header.
    point(weights, root / "good" / WEIGHTS_FILE)
    with pytest.raises(PathNotAllowedError):
        read_adapter(root / "bot", SHAPE, open_file=open_then_swap)


def test_a_link_that_is_swapped_all_the_time_never_leads_outside(
    allowed: AllowedPaths, root: Path, tmp_path: Path
) -> None:
    link, outside = root / "bot" / WEIGHTS_FILE, tmp_path / "secret" / WEIGHTS_FILE
    inside = root / "good" / WEIGHTS_FILE
    forbidden = read_adapter(tmp_path / "secret", SHAPE).version
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            point(link, outside)
            point(link, inside)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: set[str] = set()
    try:
        for _ in range(200):
            try:
                seen.add(read(allowed, root / "bot"))
            except (PathNotAllowedError, AdapterError):
                seen.add("refused")
    finally:
        done.set()
        swapper.join()
    assert forbidden not in seen
    assert "refused" in seen
