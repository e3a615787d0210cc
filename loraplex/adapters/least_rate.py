"""The least rate of a download: clients have timeouts for each read, so that a source which sends a byte now
and then would keep a load waiting for days."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from loraplex.core.errors import AdapterFetchError

_LEAST_S: Final = 120.0
"""Longer than the clients take to find that a source does not answer, and than the hub's client takes at the
least rate for the bytes that it writes at once."""
_LEAST_BYTES_PER_S: Final = 100e3
_MAX_ABANDONED: Final = 16
"""Fetches that were given up, but whose threads go on: each keeps a connection, and what it has written."""


class _Fetch:
    """A fetch on its thread. `num_waiting`: the callers that wait for it; those that nobody waits for are
    abandoned."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.result: Future[Path] = Future()
        self.num_waiting = 0


class _RunningFetches:
    """The fetches of this process whose threads have not ended, by source."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._fetches: dict[Hashable, _Fetch] = {}

    @contextmanager
    def joined(self, source: Hashable, place: str, fetch: Callable[[], Path]) -> Iterator[Future[Path]]:
        """Yield the result of the running fetch of a source; of a new one if there is none. Raises
        AdapterFetchError instead of starting one while too many are abandoned."""
        with self._lock:
            found = self._fetches.get(source)
            if found is None:
                self._check_room(place)
                found = self._fetches[source] = _Fetch(place)
                Thread(
                    target=self._run, args=(source, found, fetch), name="fetch-adapter", daemon=True
                ).start()
            found.num_waiting += 1
        try:
            yield found.result
        finally:
            with self._lock:
                found.num_waiting -= 1

    def _check_room(self, place: str) -> None:
        abandoned = [each.place for each in self._fetches.values() if each.num_waiting == 0]
        if len(abandoned) >= _MAX_ABANDONED:
            raise AdapterFetchError(
                f"{place} was not fetched: {len(abandoned)} fetches that came too slowly were given up and "
                f"have not ended, the first is of {abandoned[0]}; check the network and whether these stores "
                "are well, and try again when they have ended, or restart this process, which ends them"
            )

    def _run(self, source: Hashable, running: _Fetch, fetch: Callable[[], Path]) -> None:
        path, problem = None, None
        try:
            path = fetch()
        except BaseException as error:  # raised where it is waited for
            problem = error
        with self._lock:  # before the result is known: who tries again then starts a new one
            del self._fetches[source]
        if path is None:
            running.result.set_exception(problem)
        else:
            running.result.set_result(path)


_running: Final = _RunningFetches()


def fetch_at_least_rate(
    source: Hashable, place: str, fetch: Callable[[], Path], kept_bytes: Callable[[], int]
) -> Path:
    """Return what `fetch` returns, or the fetch of the same `source` that is still running. `kept_bytes`: the
    bytes on the disk of what was fetched from `place`.

    Raises AdapterFetchError when it has taken longer than `_LEAST_S` plus the bytes that have arrived at the
    least rate. Its thread goes on until the source ends, since neither client can be interrupted; while there
    are `_MAX_ABANDONED` such threads, none is started.
    """
    begin_bytes, begin_s = kept_bytes(), time.monotonic()
    num_bytes, elapsed_s, allowed_s = 0, 0.0, _LEAST_S
    with _running.joined(source, place, fetch) as result:
        while elapsed_s < allowed_s:
            wait([result], timeout=allowed_s - elapsed_s)
            if result.done():
                return result.result()
            num_bytes = max(kept_bytes() - begin_bytes, 0)
            elapsed_s, allowed_s = time.monotonic() - begin_s, _LEAST_S + num_bytes / _LEAST_BYTES_PER_S
    raise AdapterFetchError(
        f"{place} could not be fetched: only {num_bytes:,} bytes have arrived in {elapsed_s:.0f} s; check "
        "the network and whether its store is well, or give a local folder"
    )


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 if it is not there."""
    num_bytes = 0
    for path in folder.rglob("*"):
        try:
            num_bytes += path.lstat().st_size
        except OSError:  # renamed meanwhile
            continue
    return num_bytes
