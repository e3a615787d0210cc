"""Adapters of remote sources: which of these requests may name, and downloads in their own threads."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
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
        self._slots = asyncio.Semaphore(_MAX_DOWNLOADS)

    def within(self, allowed: AllowedSources) -> RemoteAdapters:
        """Return the same with other allowed sources; it shares the downloads, and is not closed."""
        narrowed = copy.copy(self)
        narrowed.allowed = allowed
        return narrowed

    async def fetch(self, source: RemoteSource) -> Path:
        """Fetch a source and return the adapter's folder. Raises AdapterError."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        fetched: asyncio.Future[Path] = loop.create_future()

        def settle(path: Path | None, error: BaseException | None) -> None:
            self._slots.release()  # only now: the waiters may have gone, the download has not
            if fetched.cancelled():
                return
            if path is not None:
                fetched.set_result(path)
            else:
                assert error is not None
                fetched.set_exception(error)

        def run() -> None:
            path, failure = None, None
            try:
                path = self._fetch(source)
            except BaseException as error:  # raised where it is awaited
                failure = error
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(settle, path, failure)

        # As a daemon: a store that does not answer must not keep the server from ending.
        Thread(target=run, name="fetch-adapter", daemon=True).start()
        return await fetched

    def fetch_many(self, sources: Sequence[RemoteSource]) -> list[Path | AdapterError]:
        """Fetch sources from synchronous code; return for each, in order, its folder or the error."""

        def fetch_one(source: RemoteSource) -> Path | AdapterError:
            try:
                return self._fetch(source)
            except AdapterError as error:
                return error

        with ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="fetch-adapter") as threads:
            return list(threads.map(fetch_one, sources))
