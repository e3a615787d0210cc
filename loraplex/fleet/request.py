"""A request as the fleet's decisions see it."""

from __future__ import annotations

from typing import NamedTuple

from loraplex.core.tenants import NO_TENANT


class RoutedRequest(NamedTuple):
    """A request to be sent to a replica. `adapter`: None for the base model, whose `rank` is 0.
    `output_tokens`: length of its answer; None while it is unknown. `tenant`: whose it is; routers do not
    decide by it."""

    adapter: int | None
    rank: int
    prompt_tokens: int
    output_tokens: int | None = None
    tenant: str = NO_TENANT
