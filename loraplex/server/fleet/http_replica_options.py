"""How patient a replica is that is a server elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.server.fleet.backend_adapters import IsRegistered, SeenPath


@dataclass(frozen=True, kw_only=True)
class HttpReplicaOptions:
    """How patient a replica is.

    `ready_timeout_s`: how long a request waits for a server that is away; not at all by default, as a fleet
    has other replicas. A server that has sent nothing for `silence_s`, not even to a question after its
    health, is taken for dead; it is asked every `busy_interval_s` while requests wait for it, else every
    `idle_interval_s`. `seen_path` says where the server finds a version's files, if elsewhere than here, and
    `is_registered` whether another front of the server may want a version that this one does not. Adapters
    that the server refuses are offered again every `refused_retry_s`. `aside_s`: the first and the longest
    pause of a server that drops requests. A stream that is silent for `stall_s`, and longer where requests
    are long or the server computes others, has stalled (`stalled_streams`). An answer with a token beyond
    `vocab_size` cannot be read.
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
