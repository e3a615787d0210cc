"""Messages between a server and the process of its shadow twin."""

from __future__ import annotations

import msgspec

from loraplex.core.engine_policy import EnginePolicy


class SeenRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request at one replica; times are in seconds from any common origin. `adapter`: an index into the
    window's `ranks`. `prompt_tokens`: those not found in the prefix cache. `first_s`, `last_s`: times of its
    first and last token; None if it has none."""

    replica: int
    adapter: int
    prompt_tokens: int
    num_output: int
    sent_s: float
    first_s: float | None
    last_s: float | None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order they were sent, of replicas that are alike. `costs`: the engine's profile.
    `ranks`: ranks of the adapters; 0 stands for the base model. `rank_params`: parameters of an adapter per
    unit of rank. Figures cover `since_s` to `until_s`; earlier requests are included because they delay
    later ones."""

    costs: str
    policy: EnginePolicy
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
    """A window as measured, and as predicted by the twin. `seconds`: CPU time of the replay. `error`: why
    there is no prediction."""

    num_requests: int
    measured: Figures
    predicted: Figures | None
    seconds: float
    error: str | None = None
