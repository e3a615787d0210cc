"""What a server and the process of its shadow twin say to each other."""

from __future__ import annotations

import msgspec


class SeenRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request at one replica, with seconds from any moment. `adapter`: a number of the window's.
    `prompt_tokens`: that were read; `first_s`, `last_s`: when tokens came, None if none did."""

    replica: int
    adapter: int
    prompt_tokens: int
    num_output: int
    sent_s: float
    first_s: float | None
    last_s: float | None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order they were sent, of replicas that are alike. `costs`: the engine's profile.
    `ranks`: of the adapters; 0 stands for the base model. `rank_params`: parameters of an adapter for each
    unit of rank. Figures are of `since_s` to `until_s`; requests before that are there for what they cost
    those after them."""

    costs: str
    max_running: int
    rank_params: float
    ranks: list[int]
    requests: list[SeenRequest]
    since_s: float
    until_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Means over a window; None where there was nothing to measure."""

    tokens_per_s: float
    ttft_s: float | None
    itl_s: float | None


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A window as it was, and as the twin has it. `seconds`: of CPU time that the replay took. `error`: why
    there is no prediction."""

    num_requests: int
    measured: Figures
    predicted: Figures | None
    seconds: float
    error: str | None = None
