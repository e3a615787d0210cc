"""The context of a device is created beside the import of torch, if a device may be used at all."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

from loraplex.engine import build, start
from loraplex.engine.options import EngineOptions


class FakeDriver:
    """A driver of CUDA that records its calls and returns given results."""

    def __init__(self, **results: int) -> None:
        self.calls: list[str] = []
        self._results = results

    def __getattr__(self, name: str) -> object:
        def call(*args: object) -> int:
            self.calls.append(name)
            return self._results.get(name, 0)

        return call


@pytest.mark.parametrize(
    ("results", "calls"),
    [
        ({}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ({"cuInit": 100}, ["cuInit"]),  # no device
        ({"cuDeviceGet": 101}, ["cuInit", "cuDeviceGet"]),
    ],
)
def test_a_context_is_created_as_far_as_there_is_a_device(
    results: dict[str, int], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(**results)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    start.create_context()
    assert driver.calls == calls


def test_a_machine_without_a_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []

    def absent(name: str) -> object:
        asked_for.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    start.create_context()
    assert asked_for == ["libcuda.so.1"]


@pytest.mark.parametrize(("device", "begun"), [("cuda", True), ("auto", True), ("cpu", False)])
def test_only_an_engine_that_may_use_a_device_has_a_context(
    device: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = threading.Event()
    options, engine = EngineOptions(model="m", device=device), SimpleNamespace()

    def built(given: EngineOptions, progress: object, peers: object) -> object:
        assert given is options
        if begun:
            assert created.wait(60)
        return engine

    monkeypatch.setattr(start, "create_context", created.set)
    monkeypatch.setattr(build, "build_core", built)
    assert start.build_core(options) is engine
    assert created.is_set() == begun


@pytest.mark.parametrize("has_driver", [True, False])
def test_triton_is_hashed_only_where_there_is_a_driver(
    has_driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on a CPU must not hash half a gigabyte because Triton is installed."""
    hashed = threading.Event()
    monkeypatch.setattr(start, "hash_triton", hashed.set)
    monkeypatch.setattr(start, "_driver", lambda: FakeDriver() if has_driver else None)
    start._hash_triton()
    assert hashed.is_set() == has_driver
