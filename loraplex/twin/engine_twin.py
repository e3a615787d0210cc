"""A simulated engine as a fleet drives it, whichever kind of engine it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from loraplex.twin.outcome import Outcome, RequestEvent, RequestOutcome
from loraplex.workload.jsonl import WorkloadRequest


class AdapterEvent(NamedTuple):
    """A load to the device or a read to host memory that has begun, or an eviction from one of them."""

    kind: Literal["load", "read", "evict", "unstage"]
    version: str


class EngineTwin(Protocol):
    """One engine on a virtual clock. It is advanced to the time at which something is asked of it; the step
    that it is in then may end later, which `now_s` says."""

    @property
    def now_s(self) -> float: ...

    def watch(self, requests: list[RequestEvent], adapters: list[AdapterEvent]) -> None:
        """Append to these lists, from now on, what can be seen from outside."""
        ...

    def fetch_by(self, read_end_s: Callable[[str], float]) -> None:
        """Ask this function, from now on, when a version is in host memory that is read now."""
        ...

    def is_idle(self) -> bool: ...

    def advance(self, until_s: float) -> None:
        """Take all steps that begin before this time."""
        ...

    def quiet_until_s(self) -> float:
        """Return a time before which nothing can be seen from outside, unless a request comes."""
        ...

    def run_to(self, until_s: float) -> float:
        """Take all steps of which something could be seen before this time; return `quiet_until_s`."""
        ...

    def offer(self, request: WorkloadRequest) -> RequestOutcome:
        """Take a request that arrives now; return what will become of it."""
        ...

    def resume(self, request: WorkloadRequest, outcome: RequestOutcome) -> None:
        """Take a request from another engine, whose prompt ends with the answer so far."""
        ...

    def hand_over(self, request_id: str) -> tuple[RequestOutcome, int] | None:
        """Give up a request; return it and the tokens it was answered with here. None if it has ended."""
        ...

    def num_output(self, request_id: str) -> int | None:
        """Return the tokens that a request was answered with here so far; None if it has ended."""
        ...

    def end_s(self, until_s: float) -> float:
        """Return when a run has ended that was to end at `until_s` at the latest."""
        ...

    def outcome(self, end_s: float) -> Outcome: ...


class Adapters(Protocol):
    """The adapters of engines that are all alike. `sizes`: in bytes, by number."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def adapter_number(self, version: str) -> int: ...


T = TypeVar("T", bound=EngineTwin)


class Engines(Adapters, Protocol[T]):
    """Makes engines that are all alike, and makes adapters known to them."""

    def make(self) -> T: ...

    def register(self, simulator: T, adapter: int) -> None: ...

    def unstage(self, simulator: T, adapter: int) -> bool:
        """Let go the copy in the engine's host memory. Return False if it stays for now, as it is in use."""
        ...
