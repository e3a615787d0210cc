"""The interface through which a fleet drives a simulated engine of either kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from loraplex.twin.outcome import Outcome, RequestEvent, RequestOutcome
from loraplex.workload.jsonl import WorkloadRequest


class AdapterEvent(NamedTuple):
    """A load to the device or a read into host memory that has begun, or an eviction from one of them."""

    kind: Literal["load", "read", "evict", "unstage"]
    version: str


class EngineTwin(Protocol):
    """One engine on a virtual clock. It is advanced to the time of each call; the step in flight then may end
    later, at `now_s`."""

    @property
    def now_s(self) -> float: ...

    def watch(self, requests: list[RequestEvent], adapters: list[AdapterEvent]) -> None:
        """Append externally visible events to these lists from now on."""
        ...

    def fetch_by(self, read_end_s: Callable[[str], float]) -> None:
        """Set the function that returns when a version requested now is in host memory."""
        ...

    def is_idle(self) -> bool: ...

    def advance(self, until_s: float) -> None:
        """Simulate all steps that begin before this time."""
        ...

    def quiet_until_s(self) -> float:
        """Return a time before which nothing becomes visible from outside, unless a request arrives."""
        ...

    def run_to(self, until_s: float) -> float:
        """Simulate all steps with visible results before this time; return `quiet_until_s`."""
        ...

    def offer(self, request: WorkloadRequest) -> RequestOutcome:
        """Add a request that arrives now; return its outcome, filled in later."""
        ...

    def resume(self, request: WorkloadRequest, outcome: RequestOutcome) -> None:
        """Continue a request from another engine; its prompt ends with the answer so far."""
        ...

    def hand_over(self, request_id: str) -> tuple[RequestOutcome, int] | None:
        """Give up a request; return it and its number of output tokens here. None if it has ended."""
        ...

    def num_output(self, request_id: str) -> int | None:
        """Return the number of output tokens of a request here so far; None if it has ended."""
        ...

    def end_s(self, until_s: float) -> float:
        """Return when a run ended that was limited to `until_s`."""
        ...

    def outcome(self, end_s: float) -> Outcome: ...


class Adapters(Protocol):
    """The adapters of identical engines. `sizes`: bytes, by number."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def adapter_number(self, version: str) -> int: ...


T = TypeVar("T", bound=EngineTwin)


class Engines(Adapters, Protocol[T]):
    """Makes identical engines, and registers adapters with them."""

    def make(self) -> T: ...

    def register(self, simulator: T, adapter: int) -> None: ...

    def unstage(self, simulator: T, adapter: int) -> bool:
        """Evict the copy in the engine's host memory. Return False if it is in use and stays for now."""
        ...
