"""The adapters of a fleet: every replica knows all of them, and has in memory those it is placed with."""

from __future__ import annotations

import asyncio
from pathlib import Path

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import AdapterError, EngineDeadError, LoraplexError
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members, is_gone
from loraplex.server.fleet.placing import bring_in
from loraplex.server.replica import Replica


class FleetAdapters:
    """The versions that the members of a fleet know. `routing`: None until the fleet has started.
    `start_error`: why it could not start, once `start_ended` is set. `may_lack`: the fleet may start without
    some of its members."""

    def __init__(self, members: Members, *, may_lack: bool = False) -> None:
        self._members = members
        self._may_lack = may_lack
        # By version and folder: a replica that joins must know every folder that holds a version.
        self._specs: dict[str, dict[Path, AdapterSpec]] = {}
        self.routing: LiveRouting | None = None
        self.start_error: Exception | None = None
        self.start_ended = asyncio.Event()

    def specs(self) -> list[AdapterSpec]:
        """Return all versions, with each of their folders."""
        return [spec for sources in self._specs.values() for spec in sources.values()]

    def joining(self, replica: Replica, num_at_once: int) -> JoiningAdapters:
        """Return an object that gives all versions to a replica that is not a member yet, `num_at_once` at a
        time."""
        return JoiningAdapters(self, replica, num_at_once)

    async def add(self, spec: AdapterSpec) -> None:
        """See AsyncEngine. Adds it to all replicas or to none, except that individual replicas may refuse it
        if another one accepts it."""
        asked: list[Replica] = []
        errors: list[BaseException] = []
        refusals: list[BaseException] = []
        num_taken = 0
        # Repeated for replicas that have joined meanwhile: they were given the versions known then.
        while not errors and (new := [each for each in self._members.alive() if each not in asked]):
            asked += new
            results = await asyncio.gather(
                *(replica.add_adapter(spec) for replica in new), return_exceptions=True
            )
            for replica, result in zip(new, results, strict=True):
                if not isinstance(result, BaseException):
                    num_taken += 1
                elif spec.version in replica.refused:
                    refusals.append(result)
                elif not self._has_left(replica, result):
                    errors.append(result)
        if not num_taken:
            errors += refusals
        if not errors:
            self._specs.setdefault(spec.version, {})[spec.path] = spec
            return
        if spec.version not in self._specs:
            await asyncio.gather(
                *(replica.remove_adapter(spec.version) for replica in self._members.alive()),
                return_exceptions=True,
            )
        if self.routing is None and self._members.is_gone:
            await self.start_ended.wait()  # the last one has failed, which ends the start
        if self.start_error is not None:
            # The other replicas were given up because of it, and would only say so.
            raise self.start_error
        # The reason for a refusal says more than that a replica died meanwhile.
        raise next((error for error in errors if not isinstance(error, EngineDeadError)), errors[0])

    def _has_left(self, replica: Replica, error: BaseException) -> bool:
        """Return whether a replica has left meanwhile, and the fleet can serve without it."""
        if not isinstance(error, EngineDeadError) or not is_gone(replica):
            return False
        return (self._may_lack or self.routing is not None) and not self._members.is_gone

    async def stage(self, version: str) -> None:
        """See AsyncEngine. Stages it on all serving replicas that it is placed on and that do not refuse it.
        One that dies meanwhile reads the version from its files when it is back, like all others."""
        routing, members = self.routing, self._members
        serving = [number for number in members.present if members[number].healthy]
        reasons = [members[number].refused.get(version) for number in serving]
        serving = [number for number, reason in zip(serving, reasons, strict=True) if reason is None]
        placed = None if routing is None else routing.placed_on(version)
        if placed is not None:  # if none of its replicas serves right now, any other may get requests for it
            serving = [number for number in serving if number in placed.replicas] or serving
        if not serving and (refusals := [reason for reason in reasons if reason is not None]):
            raise AdapterError(refusals[0])
        if not serving:
            why = members.status.message
            raise EngineDeadError(
                f"no replica is there to stage the adapter on{f' ({why})' if why else ''}; "
                "try again when one is back"
            )
        results = await asyncio.gather(
            *(bring_in(members[number], version) for number in serving), return_exceptions=True
        )
        if routing is not None:
            for number, result in zip(serving, results, strict=True):
                routing.staged(number, version, is_there=not isinstance(result, BaseException))
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, EngineDeadError):
                raise error
        if len(errors) == len(serving):
            raise errors[0]

    def states(self, version: str) -> list[str]:
        """Return the state of a version on each replica, in words."""
        states = []
        for number in self._members.meant:
            replica = self._members[number]
            state = self._members.state(number)
            if (reason := replica.refused.get(version)) is not None:
                word = f"refuses it ({reason}), and is asked again from time to time"
            elif state is not EngineState.READY:
                word = f"{state.value}, reads it when it is back"
            elif self.routing is not None and self.routing.has(number, version):
                word = "ready"
            else:
                word = "reads it when it is asked for it"
            states.append(f"replica {number}: {word}")
        return states

    def holders(self, version: str) -> list[int]:
        """Return the replicas that have a version in memory, as far as known."""
        if (routing := self.routing) is None:
            return []
        return [number for number in self._members.present if routing.has(number, version)]

    async def remove(self, version: str) -> None:
        """See AsyncEngine. Removes it from all replicas."""
        self._specs.pop(version, None)
        if self.routing is not None:
            self.routing.remove(version)
        results = await asyncio.gather(
            *(replica.remove_adapter(version) for replica in self._members.alive()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result


class JoiningAdapters:
    """Gives a joining replica the versions that the others know."""

    def __init__(self, adapters: FleetAdapters, replica: Replica, num_at_once: int) -> None:
        self._adapters = adapters
        self._replica = replica
        self._known: dict[str, set[Path]] = {}
        self._gate = asyncio.Semaphore(num_at_once)

    async def catch_up(self) -> None:
        """Return when the replica knows what the others do; they may get more meanwhile."""
        known, replica = self._known, self._replica
        while True:
            specs = self._adapters.specs()
            missing = [spec for spec in specs if spec.path not in known.get(spec.version, ())]
            gone = known.keys() - {spec.version for spec in specs}
            if not missing and not gone:
                return
            results = await asyncio.gather(*map(self._add, missing), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            for version in gone:
                await replica.remove_adapter(version)
                del known[version]

    async def _add(self, spec: AdapterSpec) -> None:
        async with self._gate:
            try:
                await self._replica.add_adapter(spec)
            except LoraplexError:
                if spec.version not in self._replica.refused:  # else other replicas serve it
                    raise
        self._known.setdefault(spec.version, set()).add(spec.path)
