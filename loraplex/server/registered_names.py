"""The registry's state of each name, and whether this server has followed it.

Other servers on the state folder change names too. A name is written only if it is unchanged since this
server last acted on it, and changes by others are read and served before anything else is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from loraplex.adapters.registry import AdapterRegistry, NameState, Origin
from loraplex.adapters.rollout import Canary
from loraplex.core.errors import AdapterConflictError
from loraplex.server.served_adapter import ServedAdapter

logger = logging.getLogger(__name__)


class RegisteredNames:
    """The registry for one server's adapters. Used from one event loop."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self.registry = registry
        self._seen: dict[str, NameState] = {}  # registered state of a name when last acted on
        self._lags: dict[str, str] = {}  # names not served as in _seen, with the reason

    def began_with(self, states: Mapping[str, NameState]) -> None:
        """Take what is served as the state that the registry had then."""
        self._seen = dict(states)

    def changed_elsewhere(self, states: Mapping[str, NameState]) -> list[str]:
        """Return the names whose registered state differs from the one last acted on."""
        names = states.keys() | self._seen.keys()
        return sorted(name for name in names if states.get(name) != self._seen.get(name))

    def lagging(self) -> list[str]:
        """Return names that are not served as registered, to be tried again."""
        return list(self._lags)

    def why_lagging(self, name: str) -> str | None:
        """Return why a name is not served as registered; None if it is, or following it was not tried yet."""
        return self._lags.get(name)

    def lags(self, name: str, reason: str) -> None:
        """Record that a name is not served as registered, without a log line: the user already knows."""
        self._lags[name] = reason

    def is_trial_missing(self, adapter: ServedAdapter) -> bool:
        """Return whether a name is served as registered except for its canary, which is not served."""
        state = self._seen.get(adapter.name)
        if adapter.name not in self._lags or state is None or adapter.canary is not None:
            return False
        return state.version == adapter.version and state.canary is not None

    def is_followed(self, name: str, state: NameState | None) -> bool:
        """Return whether `state` is the one last acted on, and the name is served accordingly."""
        return state == self._seen.get(name) and name not in self._lags

    def acted_on(self, name: str, state: NameState | None) -> None:
        """Record that a name is served as registered; `state` is None if it is no longer registered."""
        self._lags.pop(name, None)
        if state is None:
            self._seen.pop(name, None)
        else:
            self._seen[name] = state

    def could_not_follow(
        self, name: str, state: NameState | None, *, served: str | None, reason: Exception
    ) -> None:
        """Record that a name stays with the version `served`, and log each reason once."""
        said, is_new = self._lags.get(name), state != self._seen.get(name)
        self.acted_on(name, state)
        self._lags[name] = str(reason)
        if said != str(reason):
            here = "is not served here" if served is None else f"stays with version {served[:12]} here"
            why = (
                "it was changed through another server on the state folder, and this one cannot follow"
                if is_new
                else "it still cannot be served as it is registered"
            )
            logger.warning("adapter %r %s: %s: %s; trying again from time to time", name, here, why, reason)

    async def put(self, adapter: ServedAdapter, origin: Origin | None, *, kept: Canary | None = None) -> None:
        """Register a name as it will be served; with `origin` None it keeps its origin. `kept`: a canary that
        stays on trial though it is not served here.

        Raises AdapterConflictError if another server has changed the name since this one last acted on it.
        """
        name, rollout = adapter.name, adapter.rollout
        put = partial(
            self.registry.put_unless_changed,
            [(name, adapter.spec)],
            seen=self._seen,
            origin=self._origin_of(adapter) if origin is None else origin,
            sources={name: adapter.source},
            rollouts={name: rollout if kept is None else replace(rollout, canary=kept)},
        )
        now = await asyncio.to_thread(put)
        if name not in now:
            raise AdapterConflictError(
                f"the adapter {name!r} was changed through another server on the state folder meanwhile, so "
                "nothing was changed here; GET /v1/adapters says what it is now, try again if that is not it"
            )
        self.acted_on(name, now[name])

    async def remove(self, name: str) -> bool:
        """Remove a name whatever its state is by now; return whether it was registered."""
        was_there = await asyncio.to_thread(self.registry.remove, name)
        self.acted_on(name, None)
        return was_there

    def _origin_of(self, adapter: ServedAdapter) -> Origin:
        """Return the origin of a name's version: the API, unless the registry has another one."""
        state = self._seen.get(adapter.name)
        return Origin.API if state is None or state.version != adapter.version else Origin(state.origin)
