"""Serve the changes that other servers on the state folder make to names, and serialize changes of a name:
those requested here, and those that are followed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from loraplex.adapters.registry import RegistryEntry
from loraplex.adapters.rollout import VersionRef
from loraplex.core.errors import AdapterConflictError, LoraplexError
from loraplex.server.adapter_files import AdapterFiles, ReadAdapter
from loraplex.server.registered_names import RegisteredNames
from loraplex.server.served_adapter import ServedAdapter, ServedCanary

logger = logging.getLogger(__name__)


class FollowedNames(Protocol):
    """The served names, as far as a follower changes them."""

    def check_name(self, name: str) -> None:
        """Raise InvalidRequestError unless an adapter may have this name."""

    def get(self, name: str) -> ServedAdapter | None:
        """Return the adapter served under a name; None if there is none."""

    async def serve_registered(self, after: ServedAdapter, needed: Sequence[ReadAdapter]) -> None:
        """Serve a name as `after` from now on, staged first like a load. `needed`: versions that the engine
        may not know. On an error nothing has changed."""

    def drop(self, name: str) -> bool:
        """Stop serving a name; its requests in flight finish. Return whether it was served."""


class RegistryFollower:
    """Changes names to match the registry. Used from one event loop."""

    def __init__(self, registered: RegisteredNames, files: AdapterFiles, names: FollowedNames) -> None:
        self.registered = registered
        self._files = files
        self._names = names
        self._changing: set[str] = set()
        self._following: dict[str, asyncio.Event] = {}  # names being followed, with an event for waiters

    async def follow(self, name: str) -> bool:
        """Serve a name as registered, which another server may have changed; it is staged first, like a load
        here. A failure is logged, and what was served stays.

        Return False if the name is being changed here right now, in which case the caller asks again.
        """
        if self.is_changing(name):
            return False
        followed = self._following[name] = asyncio.Event()
        try:
            with self._claim(name):
                await self._catch_up(name)
        finally:
            del self._following[name]
            followed.set()
        return True

    @asynccontextmanager
    async def change(self, name: str, *, catches_up: bool = True) -> AsyncIterator[None]:
        """Claim a name for a change; with `catches_up`, first follow what other servers changed.

        Raises AdapterConflictError if another call changes it; if it is being followed, waits for that.
        """
        while (followed := self._following.get(name)) is not None:
            await followed.wait()
        with self._claim(name):
            if catches_up:
                await self._catch_up(name)
            yield

    def is_changing(self, name: str) -> bool:
        """Return whether a call or the follower is changing the name right now."""
        return name in self._changing

    @contextmanager
    def _claim(self, name: str) -> Iterator[None]:
        if self.is_changing(name):
            raise AdapterConflictError(
                f"the adapter {name!r} is being changed by another call right now; wait until that is done"
            )
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    async def _catch_up(self, name: str) -> None:
        """Serve a name as registered, unless that is done already."""
        found = await asyncio.to_thread(self.registered.registry.look_up, name)
        state, entry = (None, None) if found is None else found
        if self.registered.is_followed(name, state):
            return
        try:
            if entry is not None:
                await self._serve(entry)
            elif self._names.drop(name):
                logger.info("adapter %r was unloaded through another server on the state folder", name)
        except LoraplexError as error:
            served = self._names.get(name)
            version = None if served is None else served.version
            self.registered.could_not_follow(name, state, served=version, reason=error)
        else:
            self.registered.acted_on(name, state)

    async def _serve(self, entry: RegistryEntry) -> None:
        """Serve a name as another server has registered it. Raises what prevents it."""
        self._names.check_name(entry.name)
        before = self._names.get(entry.name)
        found = await self._read(entry, before)
        if found is None:
            return
        after, needed = found
        await self._names.serve_registered(after, needed)
        logger.info(
            "adapter %r is version %s now, instead of %s%s: another server on the state folder changed it",
            after.name,
            after.version[:12],
            "none" if before is None else before.version[:12],
            "" if after.canary is None else f", with {after.canary.version[:12]} on trial",
        )

    async def _read(
        self, entry: RegistryEntry, before: ServedAdapter | None
    ) -> tuple[ServedAdapter, list[ReadAdapter]] | None:
        """Return a name as another server has registered it, and those of its versions that the engine needs
        for it; None if it is already served that way. Raises what prevents reading them."""
        ref = VersionRef(version=entry.spec.version, path=entry.spec.path, source=entry.source)
        if before is not None and (before.ref, before.rollout) == (ref, entry.rollout):
            return None
        known = {} if before is None else {each.ref: each for each in before.adapters}
        stable = known.get(ref) or await self._files.read_again(ref)
        # A canary that was promoted is staged once more, as in a promotion here.
        needed = [] if before is not None and before.ref == ref else [stable]
        canary, trial = None, entry.rollout.canary
        if trial is not None:
            found = known.get(trial.ref) or await self._files.read_again(trial.ref)
            canary = ServedCanary(adapter=found, share=trial.share)
            needed += [] if trial.ref in known else [found]
        after = ServedAdapter(
            name=entry.name,
            spec=stable.spec,
            source=stable.source,
            canary=canary,
            previous=entry.rollout.previous,
        )
        return after, needed
