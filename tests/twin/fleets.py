"""Simulated fleets for tests: one workload on a few small replicas."""

from __future__ import annotations

from collections.abc import Sequence

from twins import imagined_machine, random_workload

from loraplex.fleet.policy import Policy
from loraplex.twin.fleet import FleetOutcome
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.links import LinkSpeed
from loraplex.twin.outcome import RequestOutcome
from loraplex.twin.replay import ReplayOptions
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest

OPTIONS = ReplayOptions(num_adapters=9, ranks=(8, 16, 64), rank_bytes=1 << 20, kv_tokens=4000)
WORKLOAD = random_workload(3, num_requests=300, num_adapters=9, rps=30.0)
LINK = LinkSpeed(bytes_per_s=2e9)


def run(
    policy: str,
    *,
    num_replicas: int = 3,
    options: ReplayOptions = OPTIONS,
    workload: list[WorkloadRequest] = WORKLOAD,
    seed: int = 0,
    period_s: float = 2.0,
    link: LinkSpeed | None = None,
    warm: bool = False,
) -> FleetOutcome:
    chosen = FleetOptions(
        num_replicas=num_replicas,
        replay=options,
        slo=Slo(tpt_s=0.01),
        period_s=period_s,
        link=link,
        warm=warm,
    )
    return FleetRuns(imagined_machine(), workload, chosen).run(Policy.of_name(policy), seed)


def check_all_served(outcome: FleetOutcome, workload: list[WorkloadRequest]) -> None:
    assert [each.request for each in outcome.all.requests] == workload
    assert all(each.finish_s is not None and not each.failed for each in outcome.all.requests)
    assert sum(each.num_requests for each in outcome.replicas) == len(workload)
    num_gaps = sum(num_steps * num_tokens for _, _, num_steps, num_tokens in outcome.all.gaps)
    assert num_gaps == sum(each.output_tokens - 1 for each in workload)
    num_tokens = sum(each.prompt_tokens + each.output_tokens for each in workload)
    assert sum(each.num_tokens for each in outcome.replicas) == num_tokens


def times_of(requests: Sequence[RequestOutcome]) -> list[float | None]:
    return [moment for each in requests for moment in (each.first_token_s, each.finish_s)]
