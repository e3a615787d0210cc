"""The interface of an executor, which carries out plans. The twin simulates one (`twin.simulator`)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest, TokenLogprob
from loraplex.engine.grammars import AnswerGrammar
from loraplex.engine.peers import ReadCounts
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, BlockCopy, Move, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterEvent:
    """A load that ended, with or without an error. `read`: a read from disk into host memory only. `copied`:
    bytes copied to the device and the seconds that took, if known."""

    version: str
    error: str | None = None
    read: bool = False
    copied: tuple[int, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapEvent:
    """Copies of KV blocks to the host (`out`) or to the device that ended, with or without an error."""

    copies: tuple[BlockCopy, ...]
    out: bool
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Results by request id: sampled tokens, their log-probabilities where requested, and failures.

    `prompt_logprobs`: the part computed in this step: one entry for each prompt token after the first whose
    preceding token is in the chunk. `failed_params`: the request's field at fault, where one is. `device_s`:
    seconds that the step took on its device, None without one.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    failed_params: dict[str, str] = field(default_factory=dict)
    device_s: float | None = None


class Flight(Protocol):
    """A step that was launched.

    `runs_ahead`: its tokens stay on the device for the next step, which may be decided and launched before
    they are known to the host.
    """

    @property
    def runs_ahead(self) -> bool: ...

    def land(self) -> StepResult:
        """Wait for the step and return its result. Flights land in the order they were launched."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LandedFlight:
    """A step that was executed synchronously when it was launched."""

    result: StepResult
    runs_ahead: bool = False

    def land(self) -> StepResult:
        return self.result


class LoadOrder(NamedTuple):
    """A version to load, and the folders that hold it; any of them can be read."""

    sources: Sequence[AdapterSpec]
    load: AdapterLoad


class Executor(Protocol):
    """One device: its memory and its computation."""

    def begin(self, request: EngineRequest, grammar: AnswerGrammar | None = None) -> None:
        """Keep the request's sampling state until `end`. `grammar`: of its structured output."""
        ...

    def preempt(self, request_id: str) -> None:
        """Stop running a request for now: later steps compute it again from its first token."""
        ...

    def end(self, request_id: str) -> None: ...

    def adapter_bytes(self, spec: AdapterSpec) -> int:
        """Return the bytes that a version takes when it is loaded."""
        ...

    def read_adapter(self, sources: Sequence[AdapterSpec], read: AdapterRead) -> None:
        """Start to read a version into host memory; `poll_adapters` reports when it is complete.

        `sources`: the folders that hold it; any of them can be read.
        """
        ...

    def load_adapters(self, loads: Sequence[LoadOrder]) -> None:
        """Start to load versions beside the running steps; `poll_adapters` reports when each is complete.

        Steps may use versions that load from host memory at once: they wait for the weights they need.
        """
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Copy within the arena, in order, after the steps launched so far and before later ones."""
        ...

    def swap(self, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> None:
        """Start to copy KV blocks to the host (`outs`) and to the device, after the steps and moves launched
        so far and beside later ones; `poll_swaps` reports when copies are complete. Only for executors with a
        host tier."""
        ...

    def poll_swaps(self) -> Sequence[SwapEvent]:
        """Return the copies of KV blocks that ended."""
        ...

    def evict_adapter(self, version: str) -> None:
        """Free a version's memory; steps in flight may still read it."""
        ...

    @property
    def why_not_merged(self) -> str | None:
        """The reason why this executor cannot merge adapters, in words for users; None if it can."""
        ...

    def merge_bytes(self, spec: AdapterSpec) -> int | None:
        """Return the bytes of the memory that merging an adapter needs; None if it is not possible."""
        ...

    def merge_adapter(self, version: str, place: int | None) -> None:
        """Write W + scale * B A of a resident adapter into a second set of weights, after the steps launched
        so far and before later ones, in place of what was merged before. The base model's weights stay as
        they are.

        `place`: the first byte of their memory in the arena; None where they have memory of their own.
        """
        ...

    def drop_merged(self) -> None:
        """Free the memory of the merged weights, if there are any; steps in flight may still read it."""
        ...

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        """Return the reads and loads that ended; wait up to `timeout_s` for the first of them, or for a copy
        of KV blocks."""
        ...

    def overdue_adapters(self, deadline_s: float) -> Sequence[str]:
        """Return the versions whose read from disk has taken longer than `deadline_s`. They may still end.

        Called in each step, even when nothing is being read.
        """
        ...

    @property
    def read_counts(self) -> ReadCounts:
        """Number of adapters read from files, and of copies from other replicas."""
        ...

    @property
    def num_pending_loads(self) -> int:
        """Number of reads and loads whose end `poll_adapters` will report before long, and of copies that
        `poll_swaps` will: without overdue ones, unless they have ended after all."""
        ...

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step behind those already launched. With `plan.merged` it runs on the merged weights, which
        must be those of that version."""
        ...

    def expect(self, spec: AdapterSpec) -> None:
        """Record that steps with adapters like this one may follow."""
        ...

    @property
    def num_required(self) -> int:
        """Number of calls of `prepare` needed before steps with everything expected are as fast as later
        ones."""
        ...

    def prepare(self) -> bool:
        """Do a part of the work that would slow down the first steps, such as a graph capture. Return False
        if nothing is left to do."""
        ...

    def check_integrity(self, request_ids: Set[str], adapters: Set[str]) -> None:
        """Assert that state is kept for exactly these requests, and weights for exactly these versions."""
        ...

    def close(self) -> None:
        """Free all memory, except memory that an overdue read may still write to."""
        ...
