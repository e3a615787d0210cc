"""The end of a fleet, or its failure to start: signals at bad moments, ports, folders. The core is a fake."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
import tiny
from fake_core import BEGUN, CHILD_ENV, LOADING
from server_process import PATIENCE_S, replicas, run_command, wait_until
from serving_fakes import hf_tokenizer

from loraplex.adapters.registry import AdapterRegistry, base_model_key
from loraplex.model.config import load_config

FRONT = """
import sys
from pathlib import Path
from loraplex.engine.options import EngineOptions
from loraplex.server.options import ServeOptions
from loraplex.server.run import serve

folder = Path(sys.argv[1])
serve(
    ServeOptions(
        engine=EngineOptions(model=str(folder), device="cpu"),
        served_model_name="tiny",
        allow_adapter_dirs=(folder / "adapters",),
        port=0,
        state_dir=folder / "state",
        num_replicas=2,
        shutdown_grace_s=0.1,
        engine_factory="fake_core:build_held",
    )
)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    base = tiny.save_model(root, vocab_size=400)
    hf_tokenizer().save_pretrained(root)
    tiny.save_adapter(root / "adapters" / "one", base, rank=4)
    return root


@pytest.fixture
def folder(model: Path) -> Iterator[Path]:
    """Yield the model; no engine has begun to load it, and none is blocked."""
    yield model
    for file in (model / LOADING, *model.glob(f"{BEGUN}*")):
        file.unlink(missing_ok=True)


@contextmanager
def front_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a fleet's front as a terminal would: with its own process group."""
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **CHILD_ENV, "COLUMNS": "200"},
        start_new_session=True,
    )
    try:
        yield front
    finally:
        front.kill()
        front.communicate()


def begun(folder: Path) -> set[int]:
    """Return the process ids of all engines that have begun to load."""
    return {int(file.name.removeprefix(BEGUN)) for file in folder.glob(f"{BEGUN}*")}


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_begun(folder: Path, number: int) -> None:
    wait_until(lambda: len(begun(folder)) == number, f"{number} engines load")


def until_ready(front: subprocess.Popen[str]) -> str:
    assert front.stdout is not None
    said = ""
    for line in front.stdout:
        said += line
        if "ready at " in line:
            return line.split("ready at ")[1].strip().removesuffix("/v1")
    pytest.fail(f"the front ended: {said}")


def scale_in_vain(url: str) -> threading.Thread:
    """Ask for a third replica, with a client that ignores the loss of the front."""

    def ask() -> None:
        with suppress(httpx.TransportError):
            httpx.post(f"{url}/v1/fleet/scale", json={"replicas": 3}, timeout=PATIENCE_S)

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


def end(front: subprocess.Popen[str], how: signal.Signals, folder: Path) -> None:
    """End the front as Ctrl-C in a terminal does, or without a chance to clean up: no engine may be left."""
    if how is signal.SIGINT:
        os.killpg(front.pid, how)  # a terminal signals the engines too
    else:
        front.kill()
    said, _ = front.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said
    if how is signal.SIGINT:
        assert front.returncode == 0
        assert said.splitlines()[-1] == "shut down"
    wait_until(lambda: not any(is_running(pid) for pid in begun(folder)), "all engines have ended")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are there")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_fleet_that_ends_while_it_starts_leaves_no_engine(folder: Path, how: signal.Signals) -> None:
    (folder / LOADING).touch()
    with front_of(folder) as front:
        until_begun(folder, 2)
        end(front, how, folder)


def children_of(pid: int) -> list[int]:
    found = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in found for child in children]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are there")
def test_ctrl_c_while_engine_processes_still_import_leaves_no_traceback(folder: Path) -> None:
    (folder / LOADING).touch()
    with front_of(folder) as front:
        wait_until(lambda: len(children_of(front.pid)) == 2, "the engine processes are there")
        end(front, signal.SIGINT, folder)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are there")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_fleet_that_ends_while_it_scales_leaves_no_engine_and_a_whole_registry(
    folder: Path, how: signal.Signals
) -> None:
    with front_of(folder) as front:
        url = until_ready(front)
        body = {"lora_name": how.name, "lora_path": str(folder / "adapters" / "one")}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
        (folder / LOADING).touch()
        asking = scale_in_vain(url)
        until_begun(folder, 3)
        assert len(replicas(url)) == 2
        end(front, how, folder)
        asking.join()
    registry = AdapterRegistry(
        folder / "state", base_model_key(str(folder.resolve()), load_config(folder).shape)
    )
    assert how.name in registry.names()
    registry.close()


def refused(folder: Path, *options: str) -> str:
    """Return the output of a fleet that cannot start."""
    start = ("fleet", "serve", "--model", str(folder), "--kv-memory", "4MiB", *options)
    found = run_command(*start)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert not begun(folder), "an engine was started"
    return found.stderr


def test_a_port_in_use_is_said_before_any_replica_starts(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = refused(folder, "--port", port, "--state-dir", str(tmp_path / "state"))
    assert f"127.0.0.1:{port}: Address already in use; choose another with --host and --port" in said
    assert not (tmp_path / "state").exists()


def test_a_state_folder_that_cannot_be_written_is_said_before_any_replica_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", fail)  # not by its mode: an administrator may write everywhere
    said = refused(folder, "--port", "0", "--state-dir", str(tmp_path / "state"))
    assert "cannot be made: Read-only file system; make it writable, or choose another" in said
