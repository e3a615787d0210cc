"""The state of the engine process, in words that /health can repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from loraplex.fleet.plan import Entry

SHUTTING_DOWN: Final = "the server is shutting down; send the request again later"


class EngineState(StrEnum):
    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"
    RESTARTING = "restarting"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """The state of the engine process. `message` says why it is not ready; `phase` is the current phase of
    its start and `fraction` the part of it that is done, if known. `node`: the machine of `pid` if it is not
    this one, or the URL of a server that runs elsewhere. `is_dropping`: it answers but drops requests, and
    may never recover."""

    state: EngineState
    message: str
    num_restarts: int
    pid: int | None
    phase: str | None = None
    fraction: float | None = None
    node: str | None = None
    is_dropping: bool = False

    def explain(self) -> str:
        """Return what a person should know and do when the engine is not ready."""
        match self.state:
            case EngineState.RESTARTING:
                return f"{self.message}; it is being restarted{progress_words(self.phase, self.fraction)}"
            case EngineState.UNREACHABLE:
                return f"{self.message}; it is sent requests again when it answers"
            case EngineState.SILENT:
                return f"{self.message}; it is restarted if it does not answer soon"
            case EngineState.FAILED:
                return f"{self.message}; see the log and restart the server"
            case _:
                return self.message


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """One replica of a fleet.

    `num_in_flight`: requests sent to it that have not ended; `num_sent`: all requests ever sent to it;
    `num_replayed`: those of them that another replica had before; `num_hits`: those that found their adapter
    in memory. `num_loads`: loads of adapters; `num_fetches`: loads that copied the adapter from another
    replica. `drained`: an operator stopped sending it requests. `num_placed`: adapters that the placement
    gives it, except those it refuses; `num_refused`: adapters it refuses; `num_brought`: adapters it has ever
    loaded because of a placement; `num_migrated`: requests that ever migrated to it.
    """

    number: int
    status: EngineStatus
    num_in_flight: int
    num_sent: int
    drained: bool
    num_placed: int = 0
    num_refused: int = 0
    num_brought: int = 0
    num_migrated: int = 0
    num_replayed: int = 0
    num_hits: int = 0
    num_loads: int = 0
    num_fetches: int = 0


class Fleet(Protocol):
    """Replicas that can be inspected, and taken out of service one by one."""

    @property
    def num_plans(self) -> int:
        """Number of times that the placement of adapters changed."""
        ...

    def adapter_states(self, version: str) -> list[str]:
        """Return the state of a version on each replica, in words."""
        ...

    def holders(self, version: str) -> list[int]:
        """Return the numbers of the replicas that have a version in memory, as far as known. Thread-safe."""
        ...

    @property
    def replicas(self) -> list[ReplicaStatus]: ...

    @property
    def has_placement(self) -> bool:
        """Return whether adapters are placed; otherwise every replica serves all of them. Raises
        ServerStartingError until that is known."""
        ...

    def give(self, given: Mapping[str, Entry]) -> None:
        """Keep these entries of versions instead of the policy's, and begin to carry them out; with none, let
        the policy place all adapters again. The fleet has a placement."""
        ...

    def placed_on(self, version: str) -> Entry | None:
        """Return the replicas that serve a version, and their shares; None if all do."""
        ...

    def waiting(self, version: str) -> list[int]:
        """Return the replicas that are to load a version before its requests go there."""
        ...

    def num_bytes(self, version: str) -> int:
        """Return the bytes of a version."""
        ...

    def drain(self, number: int, *, move: bool = False) -> None: ...

    def undrain(self, number: int) -> None: ...

    async def restart(self, number: int, *, move: bool = False) -> None: ...

    async def scale(self, num_replicas: int, *, move: bool = False) -> None: ...


def serving_in_words(fleet: Fleet) -> str:
    """Return the number of replicas as text, and how many of them serve if some do not."""
    replicas = fleet.replicas
    num_ready = sum(each.status.state is EngineState.READY for each in replicas)
    if num_ready == len(replicas):
        return str(num_ready)
    return f"{num_ready} of {len(replicas)} serve (`loraplex fleet status` says why the others do not)"


def progress_words(phase: str | None, fraction: float | None) -> str:
    """Return the progress as text like " (reading weights, 40%)"; empty if nothing is known."""
    if phase is None:
        return ""
    return f" ({phase})" if fraction is None else f" ({phase}, {fraction:.0%})"
