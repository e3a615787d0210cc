"""The adapter names that are served, the version each stands for, and how that changes while requests run.

    name ──▶ ServedAdapter ──▶ immutable version, and perhaps a canary ◀── Lease, held by each request
                                                                           from lookup to last byte

A name changes in one assignment, after the new version was staged and the registry has written the change to
disk. A version that lost its last name is retired: the engine removes it after its last lease has ended.

Other servers may change names in the same registry. This server follows their changes in the same way: a
version is staged before it is used. Every change requested here starts from the latest registered state of
the name (`registry_follower`).
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Final
from weakref import WeakValueDictionary

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.base_name import base_names, other_base_warning
from loraplex.adapters.names import MAX_NAME_CHARS, validate_adapter_name
from loraplex.adapters.registry import AdapterRegistry, Origin
from loraplex.adapters.rollout import Canary
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterConflictError,
    AdapterFormatError,
    EngineDeadError,
    InvalidRequestError,
    LoraplexError,
    UnknownModelError,
    UserError,
)
from loraplex.core.shape import ModelShape
from loraplex.engine.interface import AsyncEngine
from loraplex.server.adapter_files import AdapterFiles, ReadAdapter
from loraplex.server.errors import BusyError, NotServedError
from loraplex.server.registered_names import RegisteredNames
from loraplex.server.registry_follower import RegistryFollower
from loraplex.server.remote_adapters import RemoteAdapters
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.tenants.access import UNRESTRICTED, Access
from loraplex.server.tenants.tenants_file import LoadSources
from loraplex.server.version_use import Lease, VersionUse

logger = logging.getLogger(__name__)

# Comparing a misspelt name with ten thousand names would block the event loop for tenths of a second.
_MAX_NAMES_COMPARED: Final = 1000
STAGE_TIMEOUT_S: Final = 300.0
"""Seconds that a new version may wait to be scheduled among the other requests, on every replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToServe:
    """An adapter that a server begins with. `canary`: the version on trial under its name. `origin`: the
    origin to register it with once it is served; None if the registry keeps another adapter."""

    adapter: ServedAdapter
    canary: Canary | None
    origin: Origin | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """An adapter that could not be served at the start, and why. `find` reads its files again and returns
    what to serve; it is called on a thread and raises UserError if they cannot be read. `is_refused`: the
    engine refused it; otherwise its files could not be read."""

    find: Callable[[], ToServe]
    reason: str
    is_refused: bool


OnStaged = Callable[[str], None]
"""Called with a version that is ready, before its name is switched to it."""


class AdapterService:
    """Lookup, load, reload and unload of adapters, for one base model. Used from one event loop.

    `on_dropped` is called with a name that another server has unloaded, once the name is free; `on_changed`
    with one that stands for another version, or for one more, once it does.
    """

    def __init__(
        self,
        *,
        base_model: str,
        engine: AsyncEngine,
        registry: AdapterRegistry,
        shape: ModelShape,
        allowed: AllowedPaths,
        remote: RemoteAdapters | None = None,
        known_as: frozenset[str] | None = None,
        alias: str | None = None,
        stages_new: bool = False,
    ) -> None:
        """`known_as` has the comparable names of the base model, in addition to `base_model`, its served
        name.

        Requests may also call it `alias`, which is never listed. `stages_new`: an adapter loaded under a new
        name is staged before the name is served, as a new version of a served name always is.
        """
        self.base_model = base_model
        self._alias = alias
        self.files = AdapterFiles(
            shape=shape,
            allowed=allowed,
            remote=remote or RemoteAdapters(),
            known_as=base_names(base_model) if known_as is None else known_as,
        )
        self.registered = RegisteredNames(registry)
        self.follower = RegistryFollower(self.registered, self.files, self)
        self.on_dropped: Callable[[str], None] = lambda name: None
        self.on_changed: Callable[[str], None] = lambda name: None
        self.left_out: dict[str, LeftOut] = {}
        """Names that are not served because their adapters could not be read at the start, or the engine
        refused them (see the module `left_out`)."""
        self._engine = engine
        self._stages_new = stages_new
        self._served: dict[str, ServedAdapter] = {}
        self._uses: dict[str, VersionUse] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._retirements: set[asyncio.Task[None]] = set()

    @property
    def registry(self) -> AdapterRegistry:
        return self.registered.registry

    def served(self) -> list[ServedAdapter]:
        """Return all served adapters, sorted by name."""
        return [self._served[name] for name in sorted(self._served)]

    def get(self, name: str) -> ServedAdapter | None:
        """Return the adapter of that name; None if it is not served."""
        return self._served.get(name)

    def version_of(self, name: str) -> str | None:
        """Return the version that an adapter's name stands for now; None if it is not served."""
        adapter = self._served.get(name)
        return None if adapter is None else adapter.version

    def canary_of(self, name: str) -> str | None:
        """Return the version on trial under an adapter's name; None if there is none."""
        adapter = self._served.get(name)
        return None if adapter is None or adapter.canary is None else adapter.canary.version

    def find(self, model: str, access: Access = UNRESTRICTED) -> ServedAdapter | None:
        """Return the adapter that `model` means, by its own name or as `base:adapter`; None means the base
        model. Models that `access` may not use are not there for it."""
        if model in (self.base_model, self._alias) and access.uses_base:
            return None
        adapter = self._served.get(model)
        for base in (self.base_model, self._alias):
            if adapter is None and base is not None:
                adapter = self._served.get(model.removeprefix(f"{base}:"))
        if adapter is None or not access.uses(adapter.name):
            raise self._unknown(model, access)
        return adapter

    def lease(self, model: str, *, key: str, access: Access = UNRESTRICTED) -> Lease:
        """Lease the version for a request that names `model`. If the name has a canary, `key` decides which
        of the two versions answers. `access`: see `find`."""
        adapter = self.find(model, access)
        if adapter is None:
            return Lease(name=None, version=None, use=None)
        version = adapter.version_for(key)
        use = self._uses.setdefault(version, VersionUse())
        return Lease(name=adapter.name, version=version, use=use, is_canary=version != adapter.version)

    async def load(
        self,
        name: str,
        path: str,
        *,
        replace: bool,
        canary_share: float | None = None,
        sources: LoadSources | None = None,
        on_staged: OnStaged = lambda version: None,
    ) -> ServedAdapter:
        """Serve the adapter in a folder, or of a remote source, under a name. `sources`: it must be there;
        None for anything that the server has opened.

        It is registered when this returns; nothing is changed before all its files were fetched and read.
        With `replace` a served name switches to the new version at once after staging, while requests in
        flight finish on the old one. With `canary_share` the name keeps its version, and the new one answers
        that share of its requests. On any error nothing is changed.
        """
        self.check_name(name)
        async with self.follower.change(name):
            before = self._served.get(name)
            if canary_share is not None:
                self._check_follows(name)
            self._check_load(name, before, replace=replace, canary_share=canary_share)
            found = await self.files.read(path, sources)
            if before is None:
                after = ServedAdapter(name=name, spec=found.spec, source=found.source)
            elif canary_share is None:
                after = before.moved_to(found)
            else:
                after = before.with_canary(found, canary_share)
            # A canary does not change what the name stands for, so the name keeps its origin.
            origin = Origin.API if canary_share is None else None
            await self._move(before, after, [found], on_staged, partial(self.registered.put, after, origin))
            if found.other_base is not None:
                logger.warning("adapter %r: %s", name, other_base_warning(found.other_base, self.base_model))
            return after

    async def promote(
        self, name: str, *, access: Access = UNRESTRICTED, on_staged: OnStaged = lambda version: None
    ) -> ServedAdapter:
        """Make a name's canary its version, which answers all requests from now on."""
        async with self.follower.change(name):
            self._check_follows(name)
            before = self._find_served(name, access)
            after = before.promoted()
            assert before.canary is not None, "one without was refused"
            register = partial(self.registered.put, after, Origin.API)
            return await self._move(before, after, [before.canary.adapter], on_staged, register)

    async def abort(self, name: str, *, access: Access = UNRESTRICTED) -> ServedAdapter:
        """End the trial of a name's canary; its requests in flight finish on it. This also covers a canary
        that is only registered because the engine here refused it."""
        async with self.follower.change(name):
            before = self._find_served(name, access)
            after = before if self.registered.is_trial_missing(before) else before.aborted()
            await self.registered.put(after, None)
            return self._point(after)

    async def roll_back(
        self,
        name: str,
        version: str | None = None,
        *,
        access: Access = UNRESTRICTED,
        on_staged: OnStaged = lambda version: None,
    ) -> ServedAdapter:
        """Make a name stand for its previous version, or for the earlier one whose hash starts with
        `version`. Its files are read again and must be unchanged."""
        async with self.follower.change(name):
            self._check_follows(name)
            before = self._find_served(name, access)
            found = await self.files.read_again(before.find_previous(version))
            after = before.rolled_back_to(found)
            register = partial(self.registered.put, after, Origin.API)
            return await self._move(before, after, [found], on_staged, register)

    async def unload(
        self,
        name: str,
        *,
        drain_timeout_s: float,
        access: Access = UNRESTRICTED,
        on_removed: Callable[[], None] = lambda: None,
    ) -> bool:
        """Stop serving a name, at once for new requests. A name that is only registered is removed there.

        `on_removed` is called when the name is free, before its requests in flight have ended. Return whether
        they ended within the timeout; if not, they still finish, and the engine removes the version after
        them.
        """
        async with self.follower.change(name, catches_up=False):
            was_registered = await self.registered.remove(name)
            was_left_out = self.left_out.pop(name, None) is not None
            adapter = self._served.pop(name, None)
            if adapter is None and not was_registered and not was_left_out:
                raise self._not_loaded(name, access)
            on_removed()
        return adapter is None or await self._drain(adapter.versions, drain_timeout_s)

    def _check_follows(self, name: str) -> None:
        """Raise AdapterConflictError if a change based on what is served here would undo a later change by
        another server."""
        if (why := self.registered.why_lagging(name)) is not None:
            raise AdapterConflictError(
                f"another server has changed the adapter {name!r}, and this one could not follow: {why}; "
                "make this change there, or load the adapter here with load_inplace"
            )

    async def serve_registered(self, after: ServedAdapter, needed: Sequence[ReadAdapter]) -> None:
        """Serve a name as it is registered by another server (see `FollowedNames`)."""
        await self._move(self.get(after.name), after, needed, lambda version: None, _registered_already)

    def drop(self, name: str) -> bool:
        """Stop serving a name that another server has unloaded (see `FollowedNames`)."""
        self.left_out.pop(name, None)
        adapter = self._served.pop(name, None)
        if adapter is None:
            return False
        for version in adapter.versions:
            self._retire_if_unused(version)
        self.on_dropped(name)
        return True

    async def adopt(self, adapter: ServedAdapter) -> None:
        """Serve an adapter at start-up without registering it. Raises what the engine raises."""
        specs = [adapter.spec] if adapter.canary is None else [adapter.spec, adapter.canary.adapter.spec]
        for spec in specs:
            async with self._lock(spec.version):
                await self._engine.add_adapter(spec)
        self._point(adapter)

    def check_name(self, name: str) -> None:
        """Raise InvalidRequestError unless an adapter may have this name."""
        validate_adapter_name(name, param="lora_name")
        if name in (self.base_model, self._alias):
            raise InvalidRequestError(f"{name!r} is the name of the base model", param="lora_name")

    async def close(self) -> None:
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)

    async def _move(
        self,
        before: ServedAdapter | None,
        after: ServedAdapter,
        found: Sequence[ReadAdapter],
        on_staged: OnStaged,
        register: Callable[[], Awaitable[None]],
    ) -> ServedAdapter:
        """Switch a name to `after`, which needs the adapters in `found`: add them to the engine, stage them
        if the name is served already or new names are staged, register the change, and only then serve it."""
        specs = [each.spec for each in found]
        async with AsyncExitStack() as stack:
            for version in sorted({spec.version for spec in specs}):
                await stack.enter_async_context(self._lock(version))
            added: list[str] = []
            try:
                for spec in specs:
                    await self._engine.add_adapter(spec)
                    added.append(spec.version)
                    if before is not None or self._stages_new:
                        await self._stage(before, after.name, spec)
                    if before is not None:
                        on_staged(spec.version)
                await register()
            except BaseException:
                for version in added:
                    self._retire_if_unused(version)
                raise
            return self._point(after)

    async def _stage(self, before: ServedAdapter | None, name: str, spec: AdapterSpec) -> None:
        """Stage a version. Raises what prevents it, with a message that says what is served instead."""
        instead = "is not served" if before is None else f"stays with version {before.version[:12]}"
        outcome = f"version {spec.version[:12]} could not be staged, so {name!r} {instead}"
        try:
            async with asyncio.timeout(STAGE_TIMEOUT_S):
                await self._engine.stage_adapter(spec.version)
        except TimeoutError:
            raise BusyError(
                f"{outcome}: it was not ready after {STAGE_TIMEOUT_S:g} s; try again when fewer requests wait"
            ) from None
        except EngineDeadError as error:
            raise type(error)(f"{outcome}: {error}") from error
        except UserError as error:
            raise AdapterFormatError(f"{outcome}: {error}") from error
        except LoraplexError as error:
            raise LoraplexError(f"{outcome}: {error}") from error

    def _point(self, after: ServedAdapter) -> ServedAdapter:
        """Make a name stand for `after` from now on, and retire the versions that it no longer uses."""
        before = self._served.get(after.name)
        self._served[after.name] = after
        self.left_out.pop(after.name, None)
        self.on_changed(after.name)
        for version in set() if before is None else before.versions - after.versions:
            self._retire_if_unused(version)
        return after

    async def _drain(self, versions: Iterable[str], timeout_s: float) -> bool:
        """Retire versions that lost a name; return whether all were removed within the timeout."""
        retirements = [task for version in versions if (task := self._retire_if_unused(version)) is not None]
        if not retirements:
            return True
        _, left = await asyncio.wait(retirements, timeout=timeout_s)
        return not left

    def _retire_if_unused(self, version: str) -> asyncio.Task[None] | None:
        if self._has_name(version):
            return None
        task = asyncio.create_task(self._retire(version), name=f"retire-{version[:12]}")
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)
        return task

    async def _retire(self, version: str) -> None:
        """Remove a version from the engine after its last request, unless it gets a name again meanwhile."""
        use = self._uses.setdefault(version, VersionUse())
        await use.wait_idle()
        async with self._lock(version):
            if self._has_name(version) or not use.idle:
                return
            self._uses.pop(version, None)
            try:
                await self._engine.remove_adapter(version)
            except LoraplexError as error:
                logger.warning("the engine could not forget adapter version %s: %s", version[:12], error)

    def _has_name(self, version: str) -> bool:
        return any(version in adapter.versions for adapter in self._served.values())

    def _lock(self, version: str) -> asyncio.Lock:
        """Return the lock that serializes adding and removing this version; other versions are not
        blocked."""
        return self._locks.setdefault(version, asyncio.Lock())

    def _unknown(self, model: str, access: Access) -> UnknownModelError:
        shown = model if len(model) <= MAX_NAME_CHARS else f"{model[:MAX_NAME_CHARS]}…"
        prefix = f"{self.base_model}:"
        near = []
        if model.startswith(prefix):
            near = [prefix + name for name in _near(model.removeprefix(prefix), self._served, access.uses)]
        bases = [self.base_model] if access.uses_base else []
        near = near or _near(model, self._served, access.uses, bases)
        hint = _did_you_mean(near) or "; GET /v1/models lists what is served"
        return UnknownModelError(f"the model {shown!r} does not exist{hint}")

    def _check_load(
        self, name: str, before: ServedAdapter | None, *, replace: bool, canary_share: float | None
    ) -> None:
        """Refuse a load that is wrong whatever the files hold."""
        if canary_share is not None:
            if not 0.0 < canary_share < 1.0:
                raise InvalidRequestError(
                    f"canary_share is {canary_share:g}, and must be above 0 and below 1: it is the share of "
                    "requests that the new version answers, such as 0.1; leave it out to move all of them",
                    param="canary_share",
                )
            if before is None:
                raise InvalidRequestError(
                    f"the adapter {name!r} is not served, so it has no version for a canary to stand beside; "
                    "load it without canary_share first",
                    param="canary_share",
                )
        elif before is not None and not replace:
            raise InvalidRequestError(
                f"the adapter {name!r} is already loaded; set load_inplace to replace it, or canary_share to "
                "try the new version beside it",
                param="lora_name",
            )

    def _find_served(self, name: str, access: Access) -> ServedAdapter:
        adapter = self._served.get(name)
        if adapter is None:
            raise self._not_loaded(name, access)
        return adapter

    def _not_loaded(self, name: str, access: Access) -> LoraplexError:
        if name == self.base_model:
            return InvalidRequestError(
                f"{name!r} is the base model, which has no versions and cannot be unloaded", param="lora_name"
            )
        near = _near(name, self._served, access.sees)
        hint = _did_you_mean(near) or "; GET /v1/adapters lists those that are"
        return NotServedError(f"the adapter {name!r} is not loaded{hint}")


async def _registered_already() -> None:
    """Register nothing: the server that made the change has registered it."""


def _near(
    name: str, adapters: Iterable[str], is_visible: Callable[[str], bool], others: Iterable[str] = ()
) -> list[str]:
    """Return the names most similar to `name`, the nearest first, of visible adapters and of `others`."""
    if len(name) > MAX_NAME_CHARS:
        return []
    known = islice(chain(others, filter(is_visible, adapters)), _MAX_NAMES_COMPARED)
    return difflib.get_close_matches(name, list(known), n=3)


def _did_you_mean(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
