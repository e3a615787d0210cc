"""Adapters that a running server refuses to load, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_calls import load
from safetensors.numpy import load_file, save_file
from server_fixtures import Api, write_adapter
from swapping import before_opening, point

from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.server.adapter_startup import start_adapters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is open for loading, with the adapters `one` and `two` in it."""
    write_adapter(tmp_path / "open" / "one", seed=1, rank=4)
    write_adapter(tmp_path / "open" / "two", seed=2)
    return tmp_path / "open"


@pytest.fixture
def api(make_api: Callable[..., Api], folder: Path) -> Api:
    return make_api(allowed=[folder])


@pytest.mark.parametrize(
    ("name", "path", "status", "words"),
    [
        ("base", "one", 400, "base model"),
        ("no//slash", "one", 400, "not a valid adapter name"),
        ("", "one", 400, "empty"),
        ("new", "../outside", 403, "--allow-adapter-dir"),
        ("new", "/etc", 403, "--allow-adapter-dir"),
        ("new", "nothing", 400, "nothing"),
        ("new", "a\x00b", 403, "--allow-adapter-dir"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    api: Api, folder: Path, name: str, path: str, status: int, words: str
) -> None:
    write_adapter(folder.parent / "outside")
    response = load(api, name, Path(path) if path.startswith("/") else folder / path)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert api.served.service.registry.names() == []


def test_a_broken_adapter_is_refused_with_the_reason(api: Api, folder: Path) -> None:
    write_adapter(folder / "bad", use_dora=True)
    response = load(api, "bad", folder / "bad")
    assert response.status_code == 400
    assert "use_dora" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "use_dora"


def of_another_base(path: Path) -> None:
    rewrite_weights(path, lambda weights: np.zeros((weights.shape[0], 32), np.float32), only="lora_A")


def cut_short(path: Path) -> None:
    weights = path / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-8])


def scrambled(path: Path) -> None:
    weights = path / WEIGHTS_FILE
    weights.write_bytes(b"\xa5" * weights.stat().st_size)


def with_a_nan(path: Path) -> None:
    rewrite_weights(path, lambda weights: np.full_like(weights, np.nan), only="lora_B")


def with_an_inf(path: Path) -> None:
    rewrite_weights(path, lambda weights: np.full_like(weights, np.inf), only="lora_B")


def without_config(path: Path) -> None:
    (path / CONFIG_FILE).unlink()


def a_link_to_outside(path: Path) -> None:
    path.rename(path.parents[1] / "outside")
    path.symlink_to(path.parents[1] / "outside")


def with_weights_from_outside(path: Path) -> None:
    weights, outside = path / WEIGHTS_FILE, path.parents[1] / "outside.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)


def rewrite_weights(path: Path, change: Callable[[Any], Any], *, only: str) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    save_file({k: change(v) if only in k else v for k, v in tensors.items()}, path / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("spoil", "status", "words"),
    [
        (of_another_base, 400, ["32", "16", "base"]),
        (cut_short, 400, [WEIGHTS_FILE]),
        (scrambled, 400, [WEIGHTS_FILE]),
        (with_a_nan, 400, ["NaN"]),
        (with_an_inf, 400, ["inf"]),
        (without_config, 400, [CONFIG_FILE]),
        (a_link_to_outside, 403, ["--allow-adapter-dir"]),
        (with_weights_from_outside, 403, ["--allow-adapter-dir"]),
    ],
)
def test_a_bad_adapter_is_refused_and_the_server_goes_on(
    api: Api, folder: Path, spoil: Callable[[Path], None], status: int, words: list[str]
) -> None:
    spoil(write_adapter(folder / "bad", seed=5))
    response = load(api, "bad", folder / "bad")
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert all(word in error["message"] for word in words), error["message"]
    assert api.served.service.registry.names() == []
    assert api.post("/v1/completions", {"model": "bad", "prompt": "x"}).status_code == 404
    assert api.post("/v1/completions", {"model": "pirate", "prompt": "x"}).status_code == 200
    assert load(api, "good", folder / "one").status_code == 200


def test_weights_swapped_for_a_link_to_outside_are_not_loaded(api: Api, folder: Path, tmp_path: Path) -> None:
    secret = write_adapter(tmp_path / "secret", seed=7) / WEIGHTS_FILE
    inside = folder / "two" / WEIGHTS_FILE
    point(folder / "one" / WEIGHTS_FILE, inside)
    with before_opening(WEIGHTS_FILE, lambda: point(folder / "one" / WEIGHTS_FILE, secret)):
        answer = load(api, "sly", folder / "one")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "path_not_allowed")
    assert "sly" not in {adapter.name for adapter in api.served.service.served()}


def test_weights_swapped_before_a_restart_are_not_served(api: Api, folder: Path, tmp_path: Path) -> None:
    secret = write_adapter(tmp_path / "secret", seed=7) / WEIGHTS_FILE
    assert load(api, "sly", folder / "one").status_code == 200
    write_adapter(folder / "one", seed=8)  # other files than were registered, so they are read again
    with before_opening(WEIGHTS_FILE, lambda: point(folder / "one" / WEIGHTS_FILE, secret)):
        report = api.run(start_adapters(api.served.service, []))
    assert report.num_skipped == 1
    assert any("'sly' is not served" in note and "outside the folders" in note for note in report.notes)
