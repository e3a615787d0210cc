"""The adapters of one server elsewhere, loaded under names that contain their version.

Such a name always stands for the same content, so an answer comes from the promised version whatever happens
to the names that clients use. Loads and unloads of one version are serialized; callers that ask for a change
already in progress wait for it together.

Another front may use the server too. A version that is in the shared registry is never unloaded: the other
front serves it, or will soon, and this one will follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterConflictError,
    AdapterError,
    EngineClosedError,
    EngineDeadError,
    LoraplexError,
    PathNotAllowedError,
    RequestMovedError,
    UnknownModelError,
)
from loraplex.server.engine_status import SHUTTING_DOWN
from loraplex.server.fleet.backend_errors import error_detail
from loraplex.server.fleet.backend_http import Answer, BackendError, BackendHttp
from loraplex.server.fleet.completion_body import BackendKind
from loraplex.server.request_log import VERSION_HEADER

logger = logging.getLogger(__name__)

_PREFIX: Final = "lpx-"
_BUSY_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_GATEWAY_ERRORS: Final = (502, 503, 504)

SeenPath = Callable[[AdapterSpec], str]
"""Returns the path at which the server finds the files of a version."""
IsRegistered = Callable[[str], bool]
"""Returns whether a name in the registry stands for a version, or has it on trial; called on a thread."""


def adapter_name(version: str) -> str:
    """Return the name of a version on the server."""
    return _PREFIX + version


@dataclass(kw_only=True)
class _Change:
    """The change of a version that was started last."""

    is_load: bool
    task: asyncio.Task[None]


class BackendAdapters:
    """The versions that the server should have, and those it has. For use in one event loop."""

    def __init__(
        self,
        http: BackendHttp,
        *,
        timeout_s: float,
        num_at_once: int,
        seen_path: SeenPath | None,
        is_registered: IsRegistered | None = None,
        in_use: Callable[[str], bool] | None = None,
    ) -> None:
        """`in_use`: returns whether requests in flight from this front use a version."""
        self._http = http
        self._timeout_s = timeout_s
        self._num_at_once = num_at_once
        self._seen_path = seen_path
        self._is_registered = is_registered or (lambda version: False)
        self._in_use = in_use or (lambda version: False)
        self.kind = BackendKind.VLLM
        # By version and folder: any of the folders may disappear later.
        self._wanted: dict[str, dict[Path, AdapterSpec]] = {}
        self._loaded: set[str] = set()
        self._loaded_here: set[str] = set()  # by this front, at any time
        self._unwanted: set[str] = set()  # not unloaded yet: the server was away, or failed to
        self._kept: set[str] = set()  # those of them that the server fails to unload; already logged
        self.refused: dict[str, str] = {}
        """The wanted versions that the server refused when it was last asked, with the reasons."""
        self._changes: dict[str, _Change] = {}
        self._end_reason: EngineDeadError = RequestMovedError("")  # why changes in progress were cancelled

    def note(self, spec: AdapterSpec) -> None:
        """Record that the server should have a version, also after it comes back."""
        self._wanted.setdefault(spec.version, {})[spec.path] = spec
        self._unwanted.discard(spec.version)
        self._kept.discard(spec.version)

    def forget(self, version: str) -> bool:
        """Record that the server should not have a version any more; return whether it may have it now."""
        was_wanted = self._wanted.pop(version, None) is not None
        if self.refused.pop(version, None) is not None:
            return False
        if was_wanted or version in self._loaded:
            self._unwanted.add(version)
        return True

    def doubt(self, version: str) -> None:
        """Record that the server turned out not to have a version: load it again before use."""
        self._loaded.discard(version)

    def give_up(self, reason: str) -> None:
        """Handle that the server is away: end changes in progress with EngineDeadError, and trust nothing it
        had."""
        # A request that waits for its adapter has not been sent yet, so it did not cause this.
        self._end_reason = RequestMovedError(reason)
        self._loaded.clear()
        self.refused.clear()  # it may come back with other options
        for change in self._changes.values():
            change.task.cancel()
        self._changes.clear()

    async def load(self, version: str) -> None:
        """Wait until the server has a wanted version. One that it refuses stays wanted: it may accept it
        later.

        Raises UnknownModelError if it is not wanted, AdapterError or BackendError if the server refuses it,
        EngineDeadError if the server does not answer.
        """
        if version not in self._wanted:
            raise UnknownModelError(f"the adapter version {version[:12]} was not added to {self._http.url}")
        if version in self._loaded and version not in self._changes:
            return
        await self._change(version, is_load=True)

    async def unload(self, version: str) -> None:
        """Wait until the server has unloaded a version that is no longer wanted."""
        await self._change(version, is_load=False)

    async def restore(self, served: Iterable[str]) -> None:
        """Make the server have what it should; `served` has the names of what it has.

        Versions refused before are left to `retry`; newly refused ones are added to `refused` and logged, as
        are those it fails to unload. Versions used by requests in flight are not unloaded: their removal
        waits for these requests, and unloads them then. Raises EngineDeadError if the server goes away
        meanwhile.
        """
        names = set(served)
        self._loaded = {version for version in self._wanted if adapter_name(version) in names}
        self._unwanted = {version for version in self._unwanted if adapter_name(version) in names}
        before = set(self.refused)
        missing = [each for each in self._wanted if each not in self._loaded and each not in before]
        await self._load_all(missing)
        if gone := [version for version in self.refused if version not in before]:
            logger.warning(
                "%d adapters are gone from %s, the first is version %s: %s",
                *(len(gone), self._http.url, gone[0][:12], self.refused[gone[0]]),
            )
        for version in list(self._unwanted):
            if not self._in_use(version):
                await self._unload_if_it_does(version)

    async def _unload_if_it_does(self, version: str) -> None:
        """Unload a version; if the server fails to, the version does no harm and is retried later."""
        try:
            await self.unload(version)
        except EngineDeadError:
            raise
        except LoraplexError as error:
            if version not in self._kept:
                self._kept.add(version)
                logger.warning("%s; version %s stays there for now", error, version[:12])

    async def retry(self) -> None:
        """Ask the server again for versions it refused. Raises EngineDeadError if it goes away meanwhile."""
        before = len(self.refused)
        await self._load_all(list(self.refused))
        if (taken := before - len(self.refused)) > 0:
            logger.info("the server at %s takes %d adapters now that it refused", self._http.url, taken)

    async def _load_all(self, versions: Sequence[str]) -> None:
        """Load versions, a few at a time; refused ones are recorded in `refused`. When the server goes away,
        no more loads are started, and EngineDeadError is raised."""
        gate = asyncio.Semaphore(self._num_at_once)
        end: EngineDeadError | None = None

        async def bring(version: str) -> None:
            nonlocal end
            async with gate:
                if end is not None:
                    return
                try:
                    await self.load(version)
                except EngineDeadError as error:
                    end = error
                except LoraplexError:
                    pass  # it is in `refused`, unless it was removed meanwhile

        for problem in await asyncio.gather(*map(bring, versions), return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem
        if end is not None:
            raise end

    async def close(self) -> None:
        """End changes in progress with EngineClosedError."""
        tasks = [change.task for change in self._changes.values()]
        self.give_up("")
        self._end_reason = EngineClosedError(SHUTTING_DOWN)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _change(self, version: str, *, is_load: bool) -> None:
        """Start a change, after one of the other kind in progress, or join one of the same kind."""
        last = self._changes.get(version)
        if last is None or last.is_load is not is_load:
            begun = self._run_change(version, is_load, None if last is None else last.task)
            last = self._changes[version] = _Change(is_load=is_load, task=asyncio.create_task(begun))
            last.task.add_done_callback(lambda task: self._end_change(version, task))
        try:
            await asyncio.shield(last.task)
        except asyncio.CancelledError:
            if last.task.cancelled():  # the change was cancelled, not this waiter
                raise type(self._end_reason)(str(self._end_reason)) from None
            raise

    def _end_change(self, version: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the waiters have seen it
        if (last := self._changes.get(version)) is not None and last.task is task:
            del self._changes[version]

    async def _run_change(self, version: str, is_load: bool, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        if not is_load:
            if version not in self._wanted:  # else it was added again meanwhile
                self._loaded.discard(version)
                self._loaded_here.discard(version)
                if not await asyncio.to_thread(self._is_registered, version):
                    await self._unload(version)
                self._unwanted.discard(version)
                self._kept.discard(version)
            return
        if version in self._loaded:
            return
        try:
            await self._load_from_any(version)
        except EngineDeadError:
            raise
        except LoraplexError as error:
            if version in self._wanted:
                self.refused[version] = str(error)
            raise
        self.refused.pop(version, None)
        self._loaded.add(version)

    async def _load_from_any(self, version: str) -> None:
        """Load a version from the first of its folders that works."""
        problem: LoraplexError | None = None
        for spec in list(self._wanted.get(version, {}).values()):
            try:
                return await self._load(spec)
            except (AdapterError, PathNotAllowedError) as error:
                problem = error
        raise problem or UnknownModelError(f"the adapter version {version[:12]} was removed")

    async def _load(self, spec: AdapterSpec) -> None:
        path = str(spec.path.absolute()) if self._seen_path is None else self._seen_path(spec)
        await self._check_files(spec)
        body: dict[str, object] = {"lora_name": adapter_name(spec.version), "lora_path": path}
        if self.kind is BackendKind.LORAPLEX:
            body["load_inplace"] = True  # the server compares it with what it has
        answer = await self._post("load", body)
        if _says_loaded(answer) and spec.version not in self._loaded_here:
            # Loaded by an earlier front, perhaps from a folder that is gone. load_inplace is not used: vLLM
            # reads an adapter loaded that way from its files in every step that uses it. And this is done
            # only once: otherwise two fronts would keep taking it from each other.
            await self._unload(spec.version)
            answer = await self._post("load", body)
        if answer.status != 200 and not _says_loaded(answer):
            raise self._refusal(answer, spec, path)
        self._loaded_here.add(spec.version)
        try:
            self._check_version(answer, spec, path)
            await self._check_files(spec)
        except AdapterError:
            await self._unload(spec.version)
            raise

    async def _unload(self, version: str) -> None:
        answer = await self._post("unload", {"lora_name": adapter_name(version)})
        if answer.status not in (200, 404):
            message = error_detail(answer).message
            raise BackendError(
                f"the server at {self._http.url} does not unload an adapter (HTTP {answer.status}: {message})"
            )

    async def _post(self, verb: str, body: object) -> Answer:
        """Request a change, and repeat it while the server is busy with another change of the same name."""
        path = f"/v1/{verb}_lora_adapter"
        for pause_s in (*_BUSY_PAUSES_S, None):
            answer = await self._http.call("POST", path, body, timeout_s=self._timeout_s, admin=True)
            if answer.status in _GATEWAY_ERRORS:
                message = error_detail(answer).message
                raise EngineDeadError(f"the server at {self._http.url} is not ready ({message})")
            if answer.status != 409 or pause_s is None:
                break
            await asyncio.sleep(pause_s)
        return answer

    async def _check_files(self, spec: AdapterSpec) -> None:
        """Raise AdapterError if the files no longer have the content whose hash is the version."""
        if not spec.fingerprint or self._seen_path is not None:
            return  # the server's files are not those here
        if not await asyncio.to_thread(files_unchanged, spec):
            raise AdapterError(
                f"the files in {spec.path} have changed since they were read; load the adapter again"
            )

    def _check_version(self, answer: Answer, spec: AdapterSpec, path: str) -> None:
        header = VERSION_HEADER.decode()
        found = next((value for name, value in answer.headers.items() if name.lower() == header), None)
        if found is not None and found != spec.version:
            raise AdapterError(
                f"the server at {self._http.url} finds another adapter at {path} than there is here "
                f"(version {found[:12]}, not {spec.version[:12]}); give both the same files"
            )

    def _refusal(self, answer: Answer, spec: AdapterSpec, path: str) -> LoraplexError:
        detail, url = error_detail(answer), self._http.url
        message = detail.message
        if answer.status == 401 or (answer.status == 403 and detail.code != "path_not_allowed"):
            return BackendError(
                f"the server at {url} does not let the fleet change adapters ({message}); give its admin "
                "key as --backend-admin-key"
            )
        if answer.status == 403:
            return PathNotAllowedError(f"the server at {url}: {message}")
        if answer.status == 409:
            return AdapterConflictError(f"the server at {url}: {message}")
        if answer.status == 404 and self.kind is BackendKind.VLLM and "lora" not in message.lower():
            return BackendError(
                f"the vLLM server at {url} does not load adapters while it runs ({message}); start it with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        if answer.status == 404 or "No adapter found" in message:
            return AdapterError(
                f"the server at {url} finds no adapter at {path}; let it see the same folders as the fleet"
            )
        if "max_lora_rank" in message:
            return AdapterError(
                f"the server at {url} takes no adapter of rank {spec.max_rank} ({message}); start it with "
                f"--max-lora-rank {spec.max_rank}"
            )
        return AdapterError(f"the server at {url} cannot load the adapter at {path}: {message}")


def _says_loaded(answer: Answer) -> bool:
    return answer.status == 400 and "already" in error_detail(answer).message
