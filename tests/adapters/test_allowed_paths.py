from __future__ import annotations

from pathlib import Path

import pytest
from adapter_factory import write_adapter

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.spec import WEIGHTS_FILE
from loraplex.core.errors import PathNotAllowedError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapters" / "inside")
    write_adapter(tmp_path / "adapters-evil" / "a")
    write_adapter(tmp_path / "secret")
    return tmp_path / "adapters"


def test_paths_inside_are_resolved(root: Path) -> None:
    allowed = AllowedPaths([root])
    assert allowed.check(root / "inside") == root / "inside"
    assert allowed.check(f"{root}/x/../inside") == root / "inside"
    assert allowed.check("inside") == root / "inside"
    assert allowed.check("./inside/") == root / "inside"


def test_a_path_inside_need_not_exist(root: Path) -> None:
    assert AllowedPaths([root]).check("not-yet") == root / "not-yet"


def test_a_relative_path_is_taken_from_the_root_that_has_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    assert AllowedPaths([tmp_path / "first", root]).check("inside") == root / "inside"


@pytest.mark.parametrize("path", ["adapters/inside", "./adapters/inside", "../cwd/adapters/inside"])
def test_a_relative_path_is_also_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    inside = write_adapter(tmp_path / "cwd" / "adapters" / "inside")
    write_adapter(tmp_path / "cwd" / "closed" / "other")
    monkeypatch.chdir(tmp_path / "cwd")
    allowed = AllowedPaths([Path("adapters")])
    assert allowed.check(path) == inside
    # What is there but outside is like what is not there.
    roots = tmp_path / "cwd" / "adapters"
    assert [allowed.check(f"closed/{name}") for name in ("other", "absent")] == [
        roots / "closed" / "other",
        roots / "closed" / "absent",
    ]
    write_adapter(roots / "adapters" / "inside")
    assert (
        allowed.check("adapters/inside") == roots / "adapters" / "inside"
    )  # folders that are open come first


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../secret",
        "inside/../../secret",
        "../adapters-evil/a",
        "/",
        "/etc/passwd",
        "a\0b",
        "~",
        "~root/../..",
    ],
)
def test_paths_outside_are_refused(root: Path, path: str) -> None:
    allowed = AllowedPaths([root])
    if path.startswith("~"):
        assert allowed.check("~") == root / "~"  # not expanded: just a name
        return
    with pytest.raises(PathNotAllowedError, match="outside the folders"):
        allowed.check(path)


def test_a_sibling_with_the_same_prefix_is_outside(root: Path) -> None:
    with pytest.raises(PathNotAllowedError):
        AllowedPaths([root]).check(f"{root}-evil/a")


def test_symlinks_that_lead_outside_are_refused(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "loop").symlink_to(root / "loop")
    (root / "inner").symlink_to(root / "inside")
    allowed = AllowedPaths([root])
    for name in ("link", "dangling", "loop"):
        with pytest.raises(PathNotAllowedError):
            allowed.check(name)
    assert allowed.check("inner") == root / "inside"


def test_a_weights_file_that_is_a_symlink_to_outside_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "inside" / WEIGHTS_FILE).unlink()
    (root / "inside" / WEIGHTS_FILE).symlink_to(tmp_path / "secret" / WEIGHTS_FILE)
    with pytest.raises(PathNotAllowedError):
        AllowedPaths([root]).check("inside")


def test_a_root_that_is_a_symlink_works(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert AllowedPaths([tmp_path / "alias"]).check(tmp_path / "alias" / "inside") == root / "inside"


def test_the_error_does_not_tell_whether_an_outside_path_exists(root: Path, tmp_path: Path) -> None:
    allowed = AllowedPaths([root])
    messages = []
    for name in ("secret", "absent"):
        with pytest.raises(PathNotAllowedError) as caught:
            allowed.check(tmp_path / name)
        messages.append(str(caught.value).replace(name, "NAME"))
    assert messages[0] == messages[1]


def test_without_roots_everything_is_refused(root: Path) -> None:
    with pytest.raises(PathNotAllowedError, match="is off"):
        AllowedPaths([]).check(root / "inside")
