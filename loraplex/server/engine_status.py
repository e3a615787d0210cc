"""Where the engine process stands, in words that /health can repeat."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

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
    """Where the engine process stands. `message` says why when it is not ready; `phase` is what is being done
    about it, and `fraction` how much of that is done, as far as it is known. `node`: the machine of `pid`, if
    it is not this one, or the URL of a server that runs elsewhere. `is_dropping`: it answers, but drops
    requests, and nobody knows whether that will end."""

    state: EngineState
    message: str
    num_restarts: int
    pid: int | None
    phase: str | None = None
    fraction: float | None = None
    node: str | None = None
    is_dropping: bool = False

    def explain(self) -> str:
        """Return what a person should know, and do, when the engine is not ready."""
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
    """One replica of a fleet. `num_in_flight`: requests it was sent that have not ended; `num_sent`: all that
    it was ever sent; `num_replayed`: those that another one had before; `num_hits`: those that found their
    adapter in memory. `num_loads`: of adapters; `num_fetches`: those of them that it copied from another
    replica. `drained`: it is sent no more, by order. `num_placed`:
    adapters that the placement gives it, but for those that it refuses; `num_refused`: all of the latter;
    `num_brought`: those that it ever brought in for that;
    `num_migrated`: requests that ever migrated to it."""

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
    """Replicas that can be looked at, and taken out of service one by one."""

    @property
    def num_plans(self) -> int:
        """How often adapters were given other places than before."""
        ...

    def adapter_states(self, version: str) -> list[str]:
        """Return in words how each replica stands with a version."""
        ...

    def holders(self, version: str) -> list[int]:
        """Return the numbers of the replicas that have a version in memory, as far as that is known. May be
        called by any thread."""
        ...

    @property
    def replicas(self) -> list[ReplicaStatus]: ...

    def drain(self, number: int, *, move: bool = False) -> None: ...

    def undrain(self, number: int) -> None: ...

    async def restart(self, number: int, *, move: bool = False) -> None: ...

    async def scale(self, num_replicas: int, *, move: bool = False) -> None: ...


def serving_in_words(fleet: Fleet) -> str:
    """Return how many replicas there are, and how many of them serve if some do not."""
    replicas = fleet.replicas
    num_ready = sum(each.status.state is EngineState.READY for each in replicas)
    if num_ready == len(replicas):
        return str(num_ready)
    return f"{num_ready} of {len(replicas)} serve (`loraplex fleet status` says why the others do not)"


def progress_words(phase: str | None, fraction: float | None) -> str:
    """ " (reading weights, 40%)", or nothing where nothing is known."""
    if phase is None:
        return ""
    return f" ({phase})" if fraction is None else f" ({phase}, {fraction:.0%})"
