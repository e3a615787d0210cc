"""Replicas that are servers already running: vLLM or loraplex, each at a URL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.shape import ModelShape
from loraplex.core.url_secrets import without_secrets
from loraplex.fleet.live_policy import check_live_policy
from loraplex.fleet.policy import Policy
from loraplex.fleet.replanner import PERIOD_S
from loraplex.server.fleet.backend_adapters import IsRegistered
from loraplex.server.fleet.backend_http import BackendAddress, BackendError
from loraplex.server.fleet.backend_identity import ExpectedBase, look_at
from loraplex.server.fleet.backend_metrics import BLOCK_TOKENS
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.guessed_costs import ELSEWHERE, guessed_costs
from loraplex.server.fleet.http_replica import HttpReplica
from loraplex.server.fleet.http_replica_options import HttpReplicaOptions
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.protocol_ipc import Ready

_RETRY_S: Final = (5.0, 30.0)
"""The first and the longest pause in seconds before a server that could not be used is tried again."""
_NO_RESTART: Final = (
    "it is a server that the fleet did not start; restart it where it runs, and it is used again when it is "
    "back (`loraplex fleet drain N --move` before that lets the others go on with its requests)"
)
_MAX_RUNNING: Final = 256
_UNKNOWN_KV_TOKENS: Final = 1 << 30
"""KV tokens assumed for servers that do not report them, so that KV memory never limits routing."""


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Servers that a fleet uses. `api_key`, `admin_key`: shared by all of them. `max_adapters`: adapters that
    each can have in a batch (vLLM's --max-loras); None for no limit."""

    urls: tuple[str, ...] = ()
    api_key: str | None = None
    admin_key: str | None = None
    max_adapters: int | None = None


def backend_fleet(
    backends: Backends,
    *,
    base_names: Sequence[str],
    shape: ModelShape,
    policy: Policy,
    period_s: float = PERIOD_S,
    log: DecisionLog | None = None,
    is_registered: IsRegistered | None = None,
) -> FleetEngine:
    """Return a fleet of these servers, which are identified when it starts.

    `base_names`: the names they may have for the base model, the first one for messages. `is_registered`:
    returns whether any front on the registry wants a version, which is then not unloaded. Raises UserError
    for a policy that is not possible, and BackendError for an address that is invalid or given twice.
    """
    check_live_policy(policy, shares_memory=False)
    addresses = [
        BackendAddress(url=url, api_key=backends.api_key, admin_key=backends.admin_key)
        for url in backends.urls
    ]
    repeated = [url for url, count in Counter(address.url for address in addresses).items() if count > 1]
    if repeated:
        raise BackendError(
            f"{without_secrets(repeated[0])} is given twice with --backend; name each server once"
        )
    expected = ExpectedBase.of(*base_names)
    options = HttpReplicaOptions(is_registered=is_registered, vocab_size=shape.vocab_size)

    def limits(info: Ready) -> Limits:
        blocks = info.num_kv_blocks
        return Limits(
            max_running=_MAX_RUNNING,
            kv_tokens=_UNKNOWN_KV_TOKENS if blocks is None else blocks * BLOCK_TOKENS,
            max_adapters=backends.max_adapters,
        )

    async def look(place: int) -> None:
        await look_at(addresses[place], expected, timeout_s=options.call_timeout_s)

    number = len(addresses)
    why = f"as many servers as were given with --backend, {number}"
    setup = FleetSetup(
        make=lambda place: HttpReplica(addresses[place], expected, options=options),
        limits=limits,
        policy=policy,
        period_s=period_s,
        costs=guessed_costs(shape, "cuda", machine=ELSEWHERE),
        most=(number, why),
        no_restart=_NO_RESTART,
        num_loads_at_once=options.num_loads_at_once,
        may_lack=True,
        look=look,
        retry_s=_RETRY_S,
    )
    return FleetEngine(setup, number, log)
