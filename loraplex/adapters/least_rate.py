"""The least rate of a download: clients have timeouts for each read, so that a source which sends a byte now
and then would keep a load waiting for days."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Final

from loraplex.core.errors import AdapterFetchError

_LEAST_S: Final = 120.0
"""Longer than the clients take to find that a source does not answer, and than the hub's client takes at the
least rate for the bytes that it writes at once."""
_LEAST_BYTES_PER_S: Final = 100e3


def fetch_at_least_rate(place: str, fetch: Callable[[], Path], kept_bytes: Callable[[], int]) -> Path:
    """Return what `fetch` returns. `kept_bytes`: the bytes on the disk of what was fetched from `place`.

    Raises AdapterFetchError when it has taken longer than `_LEAST_S` plus the bytes that have arrived at the
    least rate. Its thread goes on until the source ends: neither client can be interrupted.
    """
    result: Future[Path] = Future()

    def run() -> None:
        try:
            result.set_result(fetch())
        except BaseException as error:  # raised where it is waited for
            result.set_exception(error)

    begin_bytes, begin_s = kept_bytes(), time.monotonic()
    Thread(target=run, name="fetch-adapter", daemon=True).start()
    num_bytes, elapsed_s, allowed_s = 0, 0.0, _LEAST_S
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
