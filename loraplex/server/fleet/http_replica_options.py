"""Timeouts and other options of a replica that is a server elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.server.fleet.backend_adapters import IsRegistered, SeenPath


@dataclass(frozen=True, kw_only=True)
class HttpReplicaOptions:
    """Timeouts and other options of a replica.

    `ready_timeout_s`: seconds that a request waits for a server that is away; by default it does not wait, as
    a fleet has other replicas. A server that has sent nothing for `silence_s` seconds, not even an answer to
    a health check, is taken for dead; it is checked every `busy_interval_s` seconds while requests wait for
    it, else every `idle_interval_s`. `seen_path` returns where the server finds a version's files, if not at
    the same path, and `is_registered` returns whether another front of the server may want a version that
    this one does not. Refused adapters are offered again every `refused_retry_s` seconds. `aside_s`: the
    first and the longest pause in seconds of a server that drops requests. A stream that is silent for
    `stall_s` seconds, or longer if requests are long or the server computes others, has stalled
    (`stalled_streams`). An answer with a token beyond `vocab_size` is an error.
    """

    call_timeout_s: float = 30.0
    load_timeout_s: float = 300.0
    ready_timeout_s: float = 0.0
    busy_interval_s: float = 0.5
    idle_interval_s: float = 1.0
    silence_s: float = 1.5
    first_pause_s: float = 0.1
    max_pause_s: float = 3.0
    stats_max_age_s: float = 0.5
    stats_timeout_s: float = 2.0
    num_loads_at_once: int = 4
    refused_retry_s: float = 30.0
    aside_s: tuple[float, float] = (0.5, 10.0)
    stall_s: float = 60.0
    vocab_size: int | None = None
    seen_path: SeenPath | None = None
    is_registered: IsRegistered | None = None
