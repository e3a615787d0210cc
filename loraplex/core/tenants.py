"""Names and rights of tenants, and the senders of requests, as far as decisions depend on them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

NO_TENANT = ""
"""The tenant of requests without one: of a server without tenants, that of all requests."""

MAX_TENANT_CHARS: Final = 64
TENANT_PATTERN: Final = rf"[A-Za-z0-9_-]{{1,{MAX_TENANT_CHARS}}}"
TENANT_NAMES: Final = f"1 to {MAX_TENANT_CHARS} letters, digits, '_' and '-'"
"""Names of tenants, in words."""
BATCH_PRIORITY: Final = 2**30
"""The priority of the lines of a batch. Requests with this one or a higher one are served after all others,
whose tenants they are of, and give way to them while they run."""
_NAME: Final = re.compile(TENANT_PATTERN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The sender of a request, as EngineRequest has it. `slo_ttft_s`, `slo_tpt_s`: the request's own
    objectives; None for those of its tenant, if it has any."""

    tenant: str = NO_TENANT
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpt_s: float | None = None
    cache_salt: str = ""


NOBODY: Final = Caller()


def is_tenant_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantPolicy:
    """The rights of one tenant.

    `share`: its part of the service, relative to the shares of the other tenants that have requests.
    `priority`: tenants with a lower one are served first, and refused last, whatever their shares.
    `slo_ttft`, `slo_tpt`: seconds until the first token, and for each later one, that its requests should
    take at most; None without such a target.
    """

    name: str
    share: float = 1.0
    priority: int = 0
    slo_ttft: float | None = None
    slo_tpt: float | None = None

    def __post_init__(self) -> None:
        assert 0 < self.share < math.inf
        assert all(slo is None or 0 < slo < math.inf for slo in (self.slo_ttft, self.slo_tpt))
