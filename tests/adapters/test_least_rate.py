"""Fetches that were given up, and whose threads go on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loraplex.adapters import least_rate
from loraplex.core.errors import AdapterFetchError


def test_who_repeats_a_load_that_was_given_up_joins_its_fetch_and_few_such_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_rate, "_LEAST_S", 0.0)
    monkeypatch.setattr(least_rate, "_running", least_rate._RunningFetches())
    may_end, has_begun = threading.Event(), threading.Semaphore(0)
    begun: list[int] = []
    threads: list[threading.Thread] = []

    def fetch(source: int) -> Path:
        begun.append(source)
        threads.append(threading.current_thread())
        has_begun.release()
        assert may_end.wait(60)
        return tmp_path

    def load(source: int) -> Path:
        return least_rate.fetch_at_least_rate(source, f"place-{source}", lambda: fetch(source), lambda: 0)

    sources = range(least_rate._MAX_ABANDONED)
    try:
        for source in [*sources, *sources]:
            with pytest.raises(AdapterFetchError, match="only 0 bytes have arrived"):
                load(source)
        with pytest.raises(AdapterFetchError, match=r"place-99 was not fetched: 16 .* first is of place-0;"):
            load(99)
        for _ in sources:
            assert has_begun.acquire(timeout=60)
        assert sorted(begun) == [*sources], "each once"
        monkeypatch.setattr(least_rate, "_LEAST_S", 60.0)
    finally:
        may_end.set()
    assert load(0) == tmp_path
    for thread in threads:
        thread.join()
    assert load(99) == tmp_path
