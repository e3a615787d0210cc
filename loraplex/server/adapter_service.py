"""Which adapter names are served, which version each stands for, and how that changes while requests run.

    name ──▶ ServedAdapter (immutable version) ◀── Lease, held by each request from lookup to last byte

A change of a name is one assignment, after the registry has it on disk. The version that lost its last
name is retired: once its last lease is gone the engine forgets it.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.base_name import base_names, other_base, other_base_warning
from loraplex.adapters.hub import neither
from loraplex.adapters.names import MAX_NAME_CHARS, validate_adapter_name
from loraplex.adapters.open_file import OpenFile, open_regular
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.registry import AdapterRegistry
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterConflictError,
    AdapterFormatError,
    InvalidRequestError,
    LoraplexError,
    PathNotAllowedError,
    StorageError,
    UnknownModelError,
)
from loraplex.core.hub import HubRepo, parse_hub_repo
from loraplex.core.shape import ModelShape
from loraplex.engine.interface import AsyncEngine
from loraplex.server.errors import NotServedError
from loraplex.server.hub_adapters import HubAdapters
from loraplex.server.version_use import VersionUse

logger = logging.getLogger(__name__)

# Comparing a misspelt name with all of ten thousand would take the event loop tenths of a second.
_MAX_NAMES_COMPARED: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """A name and the version it stands for."""

    name: str
    spec: AdapterSpec

    @property
    def version(self) -> str:
        return self.spec.version


@dataclass(frozen=True, kw_only=True, slots=True)
class Unloaded:
    """How an unload went. `drained`: its requests in flight ended in time; if not they still finish, and the
    engine forgets the version after them. `held_by` is the process id of another running server on the state
    folder that holds the name, so that it comes back when this one is started again; None if there is none.
    """

    drained: bool
    held_by: int | None


class Lease:
    """A request's hold on the model it asked for. `name` and `version` are None for the base model."""

    def __init__(self, *, name: str | None, version: str | None, use: VersionUse | None) -> None:
        self.name = name
        self.version = version
        self._use = use
        if use is not None:
            use.acquire()

    def release(self) -> None:
        """Idempotent."""
        if self._use is not None:
            self._use.release()
            self._use = None


class AdapterService:
    """Lookup, load, reload and unload of adapters, for one base model. Used from one event loop."""

    def __init__(
        self,
        *,
        base_model: str,
        engine: AsyncEngine,
        registry: AdapterRegistry,
        shape: ModelShape,
        allowed: AllowedPaths,
        hub: HubAdapters | None = None,
        known_as: frozenset[str] | None = None,
        alias: str | None = None,
    ) -> None:
        """`known_as` has the comparable names of the base model, beside `base_model` its served one.

        Requests may also call it `alias`, which is not shown to anybody.
        """
        self.base_model = base_model
        self._alias = alias
        self.known_as = base_names(base_model) if known_as is None else known_as
        self.shape = shape
        self.allowed = allowed
        self.hub = hub or HubAdapters()
        self.registry = registry
        self._engine = engine
        self._served: dict[str, ServedAdapter] = {}
        self._changing: set[str] = set()
        self._uses: dict[str, VersionUse] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._retirements: set[asyncio.Task[None]] = set()

    def served(self) -> list[ServedAdapter]:
        """All adapters, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def version_of(self, name: str) -> str | None:
        """The version that an adapter's name stands for now; None if it is not served."""
        adapter = self._served.get(name)
        return None if adapter is None else adapter.version

    def find(self, model: str) -> ServedAdapter | None:
        """Return the adapter that `model` means, as its own name or `base:adapter`; None means the base."""
        if model in (self.base_model, self._alias):
            return None
        adapter = self._served.get(model)
        for base in (self.base_model, self._alias):
            if adapter is None and base is not None:
                adapter = self._served.get(model.removeprefix(f"{base}:"))
        if adapter is None:
            raise self._unknown(model)
        return adapter

    def lease(self, model: str) -> Lease:
        """Hold what a request calls `model`."""
        adapter = self.find(model)
        if adapter is None:
            return Lease(name=None, version=None, use=None)
        use = self._uses.setdefault(adapter.version, VersionUse())
        return Lease(name=adapter.name, version=adapter.version, use=use)

    async def load(self, name: str, path: str, *, replace: bool) -> ServedAdapter:
        """Serve the adapter in a folder, or of a hub repository, under a name. It is in the registry when
        this returns, and nothing of it is anywhere before all its files are here and were read.

        With `replace` a name that is served moves to the new version at once, while requests in flight
        finish on the old one. On any error everything is as it was.
        """
        self.check_name(name)
        with self._change(name):
            if name in self._served and not replace:
                raise InvalidRequestError(
                    f"the adapter {name!r} is already loaded; set load_inplace to replace it",
                    param="lora_name",
                )
            folder, source = await self._bring(path)
            # What the hub's client fetched lies in its cache, as symlinks to where it keeps the contents.
            open_file = self.allowed.open if source is None else open_regular
            spec, other = await asyncio.to_thread(self._read, folder, open_file)
            async with self._lock(spec.version):
                await self._engine.add_adapter(spec)
                try:
                    await asyncio.to_thread(self.registry.put, name, spec, source=source)
                except StorageError:
                    self._retire_if_unused(spec.version)
                    raise
                if other is not None:
                    logger.warning("adapter %r: %s", name, other_base_warning(other, self.base_model))
                return self._point(name, spec)

    async def unload(
        self, name: str, *, drain_timeout_s: float, on_removed: Callable[[], None] = lambda: None
    ) -> Unloaded:
        """Stop serving a name, at once for new requests. A name that is only registered is forgotten.

        `on_removed` is called when the name is free, before its requests in flight ended.
        """
        with self._change(name):
            removal = await asyncio.to_thread(self.registry.remove, name)
            adapter = self._served.pop(name, None)
            if adapter is None and not removal.was_there:
                raise self._not_loaded(name)
            on_removed()
        drained = adapter is None or await self._drain(adapter.version, drain_timeout_s)
        return Unloaded(drained=drained, held_by=removal.held_by)

    async def adopt(self, name: str, spec: AdapterSpec) -> ServedAdapter:
        """Serve a version that needs no registering, at start-up. Raises what the engine raises."""
        async with self._lock(spec.version):
            await self._engine.add_adapter(spec)
            return self._point(name, spec)

    def check_name(self, name: str) -> None:
        """InvalidRequestError unless an adapter may be called this."""
        validate_adapter_name(name, param="lora_name")
        if name == self.base_model:
            raise InvalidRequestError(f"{name!r} is the name of the base model", param="lora_name")

    async def close(self) -> None:
        self.hub.close()
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)

    def _read(self, path: Path, open_file: OpenFile) -> tuple[AdapterSpec, str | None]:
        """The adapter in a folder, and the other base model that it names, if any."""
        spec = read_adapter(path, self.shape, open_file=open_file)
        return spec, other_base(path, self.known_as, open_file)

    def _point(self, name: str, spec: AdapterSpec) -> ServedAdapter:
        """Let a name stand for a version, and retire the one it stood for."""
        previous = self._served.get(name)
        adapter = self._served[name] = ServedAdapter(name=name, spec=spec)
        if previous is not None:
            self._retire_if_unused(previous.version)
        return adapter

    async def _drain(self, version: str, timeout_s: float) -> bool:
        """Retire a version that lost a name; returns whether it is done with in time."""
        retirement = self._retire_if_unused(version)
        if retirement is None:
            return True
        done, _ = await asyncio.wait([retirement], timeout=timeout_s)
        return bool(done)

    def _retire_if_unused(self, version: str) -> asyncio.Task[None] | None:
        if self._has_name(version):
            return None
        task = asyncio.create_task(self._retire(version), name=f"retire-{version[:12]}")
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)
        return task

    async def _retire(self, version: str) -> None:
        """Let the engine forget a version after its last request, unless it gets a name again meanwhile."""
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
        return any(adapter.version == version for adapter in self._served.values())

    def _lock(self, version: str) -> asyncio.Lock:
        """Adding and removing one version take turns; other versions are not held up."""
        return self._locks.setdefault(version, asyncio.Lock())

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        if name in self._changing:
            raise AdapterConflictError(
                f"the adapter {name!r} is being loaded or unloaded right now; wait until that is done"
            )
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    async def _bring(self, path: str) -> tuple[Path, HubRepo | None]:
        """The adapter's folder, all of it here, and the repository and commit that it was fetched from."""
        located = self._locate(path)
        if isinstance(located, Path):
            return located, None
        folder = await self.hub.fetch(located)
        return folder, located.at(folder.name)

    def _locate(self, path: str) -> Path | HubRepo:
        """The folder or repository that a request means, if it may be loaded; a folder that exists wins."""
        repo = parse_hub_repo(path)
        if repo is None:
            folder = self._check_path(path)
            if _is_missing(folder):
                raise AdapterFormatError(neither(self.allowed.explain_missing(path)))
            return folder
        if self.allowed.roots:
            folder = self._check_path(path)
            if os.path.exists(folder):
                return folder
        try:
            self.hub.allowed.check(repo)
        except PathNotAllowedError as error:
            raise PathNotAllowedError(
                f"{self.allowed.explain_missing(path)}, and {error}, or with --allow-adapter-dir FOLDER to "
                "open a folder"
            ) from None
        return repo

    def _check_path(self, path: str) -> Path:
        try:
            return self.allowed.check(path)
        except PathNotAllowedError as error:
            raise PathNotAllowedError(
                f"{error}; start the server with --allow-adapter-dir FOLDER to open one"
            ) from None

    def _unknown(self, model: str) -> UnknownModelError:
        shown = model if len(model) <= MAX_NAME_CHARS else f"{model[:MAX_NAME_CHARS]}…"
        prefix = f"{self.base_model}:"
        near = []
        if model.startswith(prefix):
            near = [prefix + name for name in _near(model.removeprefix(prefix), self._served)]
        near = near or _near(model, [self.base_model, *self._served])
        hint = _did_you_mean(near) or "; GET /v1/models lists what is served"
        return UnknownModelError(f"the model {shown!r} does not exist{hint}")

    def _not_loaded(self, name: str) -> LoraplexError:
        if name == self.base_model:
            return InvalidRequestError(
                f"{name!r} is the base model, which cannot be unloaded", param="lora_name"
            )
        near = _near(name, self._served)
        hint = _did_you_mean(near) or "; GET /v1/adapters lists those that are"
        return NotServedError(f"the adapter {name!r} is not loaded{hint}")


def _is_missing(folder: Path) -> bool:
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # who reads it says why it cannot be
        return False
    return False


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Names that one may have meant, the nearest first."""
    if len(name) > MAX_NAME_CHARS:
        return []
    return difflib.get_close_matches(name, list(islice(known, _MAX_NAMES_COMPARED)), n=3)


def _did_you_mean(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
