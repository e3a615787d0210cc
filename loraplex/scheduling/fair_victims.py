"""Decides which running requests are preempted first when memory is short, if tenants or priorities differ.

From the last to the first:

    1. tenants of a higher `priority` first, and of these, lines of batches
    2. of those left, the tenant that would still hold the most memory for its share without the request; so a
       tenant with a single request is not preempted for one with many, and two that hold as much as each
       other do not preempt each other in turns
    3. of its requests, one of a higher `priority`, else the youngest
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.scheduling.fair_share import FairShare
from loraplex.scheduling.request_state import RequestState


def kept_first(running: Sequence[RequestState], fair: FairShare) -> list[RequestState]:
    """Return the running requests, which are in order of admission, with those in front that are preempted
    last."""
    places = {id(request): place for place, request in enumerate(running)}
    lines: dict[str, list[RequestState]] = {}
    for request in running:
        lines.setdefault(request.request.tenant, []).append(request)
    held = {tenant: sum(len(each.block_ids) for each in line) for tenant, line in lines.items()}
    for line in lines.values():
        line.sort(key=lambda each: each.request.priority)  # stable: the youngest of a priority comes last

    def urgency(tenant: str) -> tuple[int, bool, float, int]:
        last = lines[tenant][-1]
        left = (held[tenant] - len(last.block_ids)) / fair.share(tenant)
        return fair.rank(tenant), last.is_line, left, places[id(last)]

    victims: list[RequestState] = []
    while lines:
        tenant = max(lines, key=urgency)
        victim = lines[tenant].pop()
        held[tenant] -= len(victim.block_ids)
        victims.append(victim)
        if not lines[tenant]:
            del lines[tenant]
    victims.reverse()
    return victims
