"""Adapters of remote sources: which of these requests may name, and downloads in their own threads."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from loraplex.adapters.remote import AllowedSources, RemoteSource, fetch_adapter
from loraplex.core.errors import AdapterError

_MAX_DOWNLOADS: Final = 4


class RemoteAdapters:
    """`allowed`: the sources that requests may have fetched. Downloads have their own threads, so that
    the server's other work does not wait for a slow network."""

    def __init__(
        self, allowed: AllowedSources | None = None, *, fetch: Callable[[RemoteSource], Path] = fetch_adapter
    ) -> None:
        self.allowed = allowed or AllowedSources()
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="fetch-adapter")

    def within(self, allowed: AllowedSources) -> RemoteAdapters:
        """Return the same with other allowed sources; it shares the downloads, and is not closed."""
        narrowed = copy.copy(self)
        narrowed.allowed = allowed
        return narrowed

    async def fetch(self, source: RemoteSource) -> Path:
        """Fetch a source and return the adapter's folder. Raises AdapterError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, source)

    def fetch_many(self, sources: Sequence[RemoteSource]) -> list[Path | AdapterError]:
        """Fetch sources from synchronous code; return for each, in order, its folder or the error."""

        def fetch_one(source: RemoteSource) -> Path | AdapterError:
            try:
                return self._fetch(source)
            except AdapterError as error:
                return error

        return list(self._threads.map(fetch_one, sources))

    def close(self) -> None:
        """Begin no more downloads; those in progress end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
