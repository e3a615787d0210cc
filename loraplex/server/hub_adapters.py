"""Adapters from the Hugging Face hub: which repositories may be fetched, and downloads in their own
threads."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from loraplex.adapters.hub import AllowedRepos, fetch_adapter
from loraplex.core.errors import AdapterError
from loraplex.core.hub import HubRepo

_MAX_DOWNLOADS: Final = 4


class HubAdapters:
    """`allowed`: the repositories that requests may have fetched. Downloads have their own threads, so that
    the server's other work does not wait for a slow network."""

    def __init__(
        self, allowed: AllowedRepos | None = None, *, fetch: Callable[[HubRepo], Path] = fetch_adapter
    ) -> None:
        self.allowed = allowed or AllowedRepos()
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="fetch-adapter")

    def within(self, allowed: AllowedRepos) -> HubAdapters:
        """Return the same with other allowed repositories; it shares the downloads, and is not closed."""
        narrowed = copy.copy(self)
        narrowed.allowed = allowed
        return narrowed

    async def fetch(self, repo: HubRepo) -> Path:
        """Fetch a repository and return the adapter's folder. Raises AdapterError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, repo)

    def fetch_many(self, repos: Sequence[HubRepo]) -> list[Path | AdapterError]:
        """Fetch repositories from synchronous code; return for each, in order, its folder or the error."""

        def fetch_one(repo: HubRepo) -> Path | AdapterError:
            try:
                return self._fetch(repo)
            except AdapterError as error:
                return error

        return list(self._threads.map(fetch_one, repos))

    def close(self) -> None:
        """Begin no more downloads; those in progress end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
