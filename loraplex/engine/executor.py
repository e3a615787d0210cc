"""Carries out what the scheduler decides. The twin has an executor of its own behind this interface."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest, TokenLogprob
from loraplex.engine.peers import ReadCounts
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, Move, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterEvent:
    """A load that ended: well, or with an error. `read`: one from disk to the host's memory only. `copied`:
    bytes that were brought to the device with it, and the seconds that took, if they are known."""

    version: str
    error: str | None = None
    read: bool = False
    copied: tuple[int, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """By request id: the tokens sampled, their log-probabilities where asked for, and failures.

    `prompt_logprobs` holds what this step computed of them: one entry for each prompt token after the
    first that stands right behind a token of the chunk.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class Flight(Protocol):
    """A step that was launched.

    `runs_ahead`: its tokens stay where the next step finds them, so that one may be decided and launched
    before they are known here.
    """

    @property
    def runs_ahead(self) -> bool: ...

    def land(self) -> StepResult:
        """Wait for the step. Flights land in the order they were launched."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LandedFlight:
    """A step that was carried out as it was launched."""

    result: StepResult
    runs_ahead: bool = False

    def land(self) -> StepResult:
        return self.result


class LoadOrder(NamedTuple):
    """A version to load, and the folders that hold it, any of which will do."""

    sources: Sequence[AdapterSpec]
    load: AdapterLoad


class Executor(Protocol):
    """One device's memory and arithmetic."""

    def begin(self, request: EngineRequest) -> None:
        """Keep what sampling needs of a request until `end`."""
        ...

    def preempt(self, request_id: str) -> None:
        """It runs no more for now: steps to come bring it anew from its first token on."""
        ...

    def end(self, request_id: str) -> None: ...

    def adapter_bytes(self, spec: AdapterSpec) -> int:
        """Return the bytes that a version takes when it is loaded."""
        ...

    def read_adapter(self, sources: Sequence[AdapterSpec], read: AdapterRead) -> None:
        """Start to read a version into the host's memory; `poll_adapters` tells when it is there.

        Sources are the folders that hold it, any of which will do.
        """
        ...

    def load_adapters(self, loads: Sequence[LoadOrder]) -> None:
        """Start to load versions beside the running steps; `poll_adapters` tells when each is there.

        Those that come from the host's memory may be used from now on: steps wait for what they need of them.
        """
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Copy within the arena, one after the other, behind the steps launched and before those to come."""
        ...

    def evict_adapter(self, version: str) -> None:
        """Give up a version's memory; steps under way may still read it."""
        ...

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        """Reads and loads that ended; waits for the first of them no longer than `timeout_s`."""
        ...

    def overdue_adapters(self, deadline_s: float) -> Sequence[str]:
        """Versions that have been read from disk for so long without an end. They may still come.

        Called in each step, also when nothing is being read.
        """
        ...

    @property
    def read_counts(self) -> ReadCounts:
        """How often adapters were read from files, and copied from other replicas."""
        ...

    @property
    def num_pending_loads(self) -> int:
        """Reads and loads whose end `poll_adapters` will report before long: without those that were found to
        be overdue, unless they have ended after all."""
        ...

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step behind those already launched."""
        ...

    def expect(self, spec: AdapterSpec) -> None:
        """Steps with adapters like this one may come."""
        ...

    @property
    def num_required(self) -> int:
        """How often `prepare` has to be called before steps with all that is expected take no longer than
        later ones will."""
        ...

    def prepare(self) -> bool:
        """Do a little ahead of the steps that are expected, so that the first of them takes no longer; False
        if nothing is left to do."""
        ...

    def check_integrity(self, request_ids: Set[str], adapters: Set[str]) -> None:
        """Assert that state is kept for exactly these requests, and weights for exactly these versions."""
        ...

    def close(self) -> None:
        """Free all there is, but for memory that a read which does not end may still write to."""
        ...
