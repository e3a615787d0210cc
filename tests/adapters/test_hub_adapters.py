"""Adapters from the hub, by the real client over a hub on loopback."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from adapter_factory import SHAPE, write_adapter
from fake_hub import FakeHub, fake_hub

from loraplex.adapters.least_rate import bytes_below
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.remote import AllowedSources, locate_adapter
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import HubError, PathNotAllowedError
from loraplex.core.hub import HubRepo, cache_folder, fetch_snapshot, parse_hub_repo


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hf-home") as running:
        yield running


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter, with files beside it that nobody needs for serving."""
    folder = write_adapter(tmp_path / "mine")
    (folder / "README.md").write_text("# pirate")
    (folder / "optimizer.pt").write_bytes(b"large")
    return folder


def test_only_the_two_files_are_fetched_once_and_pinned_to_their_commit(hub: FakeHub, adapter: Path) -> None:
    sha = hub.push("org/pirate", adapter)
    folder = Path(hub.fetch("org/pirate")["folder"])
    assert folder.name == sha
    assert folder.is_relative_to(hub.home)
    assert read_adapter(folder, SHAPE).version == read_adapter(adapter, SHAPE).version
    assert sorted(hub.fetched) == [("org/pirate", CONFIG_FILE), ("org/pirate", WEIGHTS_FILE)]
    assert hub.fetch("org/pirate") == {"folder": str(folder)}
    assert len(hub.fetched) == 2


def test_the_bytes_of_a_repository_in_the_cache_are_counted(
    hub: FakeHub, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("org/pirate", adapter)
    hub.fetch("org/pirate")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.home / "hub"))
    num_bytes = sum((adapter / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
    assert bytes_below(cache_folder(HubRepo(repo_id="org/pirate"))) >= num_bytes
    assert bytes_below(cache_folder(HubRepo(repo_id="org/other"))) == 0


def test_a_revision_is_a_branch_or_a_commit(hub: FakeHub, adapter: Path) -> None:
    old = hub.push("org/pirate", adapter)
    (adapter / CONFIG_FILE).write_text((adapter / CONFIG_FILE).read_text().replace("8", "16"))
    new = hub.push("org/pirate", adapter, branch="refs/pr/1")
    assert old != new
    for revision, sha in (("main", old), ("refs/pr/1", new), (new, new)):
        assert Path(hub.fetch(f"org/pirate@{revision}")["folder"]).name == sha


def test_a_folder_wins_over_the_hub(hub: FakeHub, adapter: Path, tmp_path: Path) -> None:
    hub.push("org/pirate", adapter)
    shutil.copytree(adapter, tmp_path / "here" / "org" / "pirate")
    assert hub.fetch("org/pirate", cwd=tmp_path / "here") == {"folder": "org/pirate"}
    assert hub.fetched == []


def test_what_was_fetched_is_found_without_network(hub: FakeHub, adapter: Path) -> None:
    hub.push("org/pirate", adapter)
    folder = hub.fetch("org/pirate")
    assert hub.fetch("org/pirate", HF_ENDPOINT=nobody_listens()) == folder
    assert hub.fetch("org/pirate", HF_HUB_OFFLINE="1") == folder


def test_a_private_repository_is_read_with_a_token(hub: FakeHub, adapter: Path) -> None:
    sha = hub.push("org/private", adapter)
    hub.repos["org/private"].refusal = (401, "RepoNotFound")
    assert Path(hub.fetch("org/private", HF_TOKEN="hf_secret")["folder"]).name == sha


def nothing(hub: FakeHub, files: dict[str, bytes]) -> None:
    """The hub has no such repository."""


def private(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", files)
    hub.repos["org/it"].refusal = (401, "RepoNotFound")


def gated(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", files)
    hub.repos["org/it"].refusal = (403, "GatedRepo")
    hub.repos["org/it"].is_gated = True


def forbidden(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", files)
    hub.repos["org/it"].refusal = (403, "")


def other_branch(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", files, branch="dev")


def whole_model(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", {"config.json": b"{}", "model.safetensors": b"gigabytes"})


def subfolders(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", {f"step-100/{name}": data for name, data in files.items()})


def pickle_only(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", {CONFIG_FILE: files[CONFIG_FILE], "adapter_model.bin": b"pickle"})


def no_weights(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.push("org/it", {CONFIG_FILE: files[CONFIG_FILE]})


@pytest.mark.parametrize(
    ("prepare", "error", "words"),
    [
        (
            nothing,
            "AdapterFetchError",
            ["org/it is no folder here", "no such repository", "private", "spelling", "HF_TOKEN"],
        ),
        (
            private,
            "AdapterFetchError",
            ["org/it is no folder here", "no such repository", "private", "HF_TOKEN"],
        ),
        (gated, "AdapterFetchError", ["org/it is gated", "ask for access at http", "HF_TOKEN"]),
        (forbidden, "AdapterFetchError", ["status 403", "HF_TOKEN"]),
        (other_branch, "AdapterFetchError", ["no branch, tag or commit"]),
        (
            whole_model,
            "AdapterFormatError",
            ["org/it has no adapter_config.json", "not that of a whole model"],
        ),
        (subfolders, "AdapterFormatError", ["step-100/adapter_config.json", "give one of them"]),
        (pickle_only, "AdapterFormatError", ["adapter_model.bin alone", "safe_serialization=True"]),
        (no_weights, "AdapterFormatError", ["no adapter_model.safetensors", "save_pretrained"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_had_is_one_line_with_the_fix(
    hub: FakeHub,
    adapter: Path,
    prepare: Callable[[FakeHub, dict[str, bytes]], None],
    error: str,
    words: list[str],
) -> None:
    prepare(hub, {name: (adapter / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)})
    answer = hub.fetch("org/it@main" if prepare is other_branch else "org/it")
    assert answer["error"] == error
    assert "\n" not in answer["message"]
    for word in words:
        assert word in answer["message"]
    assert ("org/it", WEIGHTS_FILE) not in hub.fetched


def test_a_hub_that_cannot_be_reached_is_told_from_one_that_may_not_be(hub: FakeHub, adapter: Path) -> None:
    hub.push("org/it", adapter)
    unreachable = hub.fetch("org/it", HF_ENDPOINT=nobody_listens())
    assert unreachable["error"] == "AdapterFetchError"
    assert "; check the name and the network" in unreachable["message"]
    assert "\n" not in unreachable["message"]
    offline = hub.fetch("org/it", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in offline["message"]


def test_a_disk_without_room_leaves_nothing_half_and_works_when_there_is_some(
    hub: FakeHub, adapter: Path
) -> None:
    sha = hub.push("org/it", adapter)
    full = hub.fetch("org/it", max_file_bytes=4096)  # less than the weights, more than all else
    assert full["error"] == "AdapterFetchError"
    assert "no room for org/it" in full["message"]
    assert "HF_HOME" in full["message"]
    assert list(hub.home.rglob(f"snapshots/{sha}/{WEIGHTS_FILE}")) == []
    assert Path(hub.fetch("org/it")["folder"]).name == sha


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free some space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "(Permission denied); make that writable"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "check the name and the network"),
        (RuntimeError("first\nsecond"), "(RuntimeError); check the name and the network"),
        (ValueError(), "(ValueError); check the name and the network"),
    ],
)
def test_whatever_the_client_raises_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(HubError) as caught:
        fetch_snapshot(HubRepo(repo_id="org/it"), ["*"])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("org/name", HubRepo(repo_id="org/name")),
        ("o-r.g/N_a.m-e@v1.0", HubRepo(repo_id="o-r.g/N_a.m-e", revision="v1.0")),
        ("org/name@refs/pr/1", HubRepo(repo_id="org/name", revision="refs/pr/1")),
    ],
)
def test_repositories_are_read_as_they_are_shown(text: str, repo: HubRepo) -> None:
    assert parse_hub_repo(text) == repo
    assert str(repo) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "name", "a/b/c", "/a", "a/", "./a", "../a", "~/a", "a/..", "a/.b", "-a/b", "a/b--c", "a b/c",
        "a/b.git", "é/a", "a/b@", "a/b@../../x", "a/b@/etc", "a/b@x//y", "a/b@-x", "a/b\0",
        f"a/{'b' * 97}", "a/b\n",
    ],
)  # fmt: skip
def test_everything_else_is_no_repository(text: str) -> None:
    assert parse_hub_repo(text) is None


def test_a_path_object_never_means_the_hub() -> None:
    assert locate_adapter(Path("org/nowhere")) == Path("org/nowhere")
    assert locate_adapter("org/nowhere") == HubRepo(repo_id="org/nowhere")


def test_requests_may_have_fetched_what_a_pattern_opens() -> None:
    repo = HubRepo(repo_id="org/name", revision="v1")
    for pattern in ("org/name", "org/*", "*"):
        AllowedSources([pattern]).check(repo)
    for patterns, words in (([], "is off"), (["other/*", "org/nam", "ORG/*"], "is not open for it")):
        with pytest.raises(PathNotAllowedError, match=words) as caught:
            AllowedSources(patterns).check(repo)
        assert "--allow-adapter-repo org/name " in str(caught.value)


def nobody_listens() -> str:
    """The URL of a port of loopback that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"
