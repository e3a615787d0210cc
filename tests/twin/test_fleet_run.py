"""Whole runs of a fleet by a policy's name: figures, pictures, SLOs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleets import LINK, OPTIONS, WORKLOAD, run, times_of
from matplotlib.collections import QuadMesh
from twins import imagined_machine

from loraplex.cli.fleet_plot import draw_outcome
from loraplex.core.errors import CapacityError, UserError
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import with_padded_kernels
from loraplex.twin.fleet_compare import FleetInputs
from loraplex.twin.fleet_figures import figures_of
from loraplex.twin.fleet_run import FleetOptions, FleetRuns, at_rate, base_times, shuffled
from loraplex.twin.replay import replay
from loraplex.twin.slo import NO_SLO, Slo
from loraplex.workload.jsonl import WorkloadRequest


def test_a_run_reports_how_many_requests_have_come() -> None:
    shares: list[float] = []
    runs = FleetRuns(imagined_machine(), WORKLOAD, FleetOptions(num_replicas=2, replay=OPTIONS))
    assert runs.run(Policy.of_name("random"), report=shares.append) == runs.run(Policy.of_name("random"))
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1


def test_figures_of_a_run() -> None:
    outcome = run("rank-aware")
    found = figures_of(outcome, Slo(tpt_s=0.01))
    assert found.attainment == outcome.all.slo_attainment(Slo(tpt_s=0.01))
    assert found.adapter_loads == sum(each.num_loads for each in outcome.replicas)
    sizes = [rank << 20 for rank in (8, 16, 64)]
    assert found.bytes_moved >= 3 * sum(sizes), "every adapter came to some host"
    assert found.busiest_over_mean >= 1.0


def test_requests_over_time_are_those_of_each_replica() -> None:
    outcome = run("first-fit")
    parts, whole = outcome.timelines(num_intervals=20), outcome.all.timeline(num_intervals=20)
    for name in ("running", "waiting"):
        by_replica = np.array([getattr(part, name) for part in parts])
        np.testing.assert_allclose(by_replica.sum(axis=0), getattr(whole, name), atol=1e-4)
    for part, figures in zip(parts, outcome.replicas, strict=True):
        present = np.mean(part.running) + np.mean(part.waiting)
        assert present == pytest.approx(figures.mean_running + figures.mean_waiting, rel=1e-3)


def test_a_picture_of_a_run_has_each_replica_over_time() -> None:
    outcome = run("first-fit")
    figure = draw_outcome(outcome, title="first-fit")
    heat = next(each for axes in figure.axes for each in axes.collections if isinstance(each, QuadMesh))
    parts = outcome.timelines(num_intervals=100)
    expected = [np.add(part.running, part.waiting) for part in parts]
    np.testing.assert_allclose(heat.get_array(), expected)


def test_routers_see_the_time_per_token_of_the_slo_only() -> None:
    def times_with(slo: Slo) -> list[float | None]:
        runs = FleetRuns(imagined_machine(), WORKLOAD, FleetOptions(num_replicas=3, replay=OPTIONS, slo=slo))
        return times_of(runs.run(Policy(routing="rank-aware")).all.requests)

    assert times_with(Slo(ttft_s=0.001)) == times_with(NO_SLO)
    assert times_with(Slo(tpt_s=0.0045)) != times_with(NO_SLO)


def test_routers_keep_steps_within_the_strictest_limit_on_tokens() -> None:
    assert Slo(tpt_s=0.03, tpot_s=0.01).token_s == 0.01
    assert Slo(tpt_s=0.01, tpot_s=0.03).token_s == 0.01
    assert Slo(tpot_s=0.03, ttft_s=0.001).token_s == 0.03
    assert Slo(ttft_s=0.001).token_s is None


def test_padded_kernels_make_a_mixed_fleet_slower() -> None:
    options = FleetOptions(num_replicas=2, replay=OPTIONS, slo=Slo(tpt_s=0.01))
    plain, padded = (
        FleetRuns(model, WORKLOAD, options).run(Policy(routing="round-robin")).all.summary()["tpt_s"]["mean"]
        for model in (imagined_machine(), with_padded_kernels(imagined_machine()))
    )
    assert padded > plain


def test_base_time_per_token_is_of_requests_alone() -> None:
    request = WorkloadRequest(arrival_s=7.0, prompt_tokens=9, output_tokens=5, adapter=3)
    alone = replay(imagined_machine(), [replace(request, adapter=0)], replace(OPTIONS, num_adapters=0))
    expected = (alone.requests[0].tpt_s, alone.requests[0].tpot_s)
    assert base_times(imagined_machine(), [request] * 3, OPTIONS) == pytest.approx(expected)
    one = replace(request, output_tokens=1)
    found = base_times(imagined_machine(), [one], OPTIONS)
    assert found.tpot_s == found.tpt_s > 0, "nobody has a token after the first"


def test_another_seed_is_another_workload_like_it() -> None:
    assert shuffled(WORKLOAD, 0) is WORKLOAD
    other = shuffled(WORKLOAD, 1)
    assert other != WORKLOAD
    assert [each.arrival_s for each in other] == [each.arrival_s for each in WORKLOAD]

    def bodies(requests: list[WorkloadRequest]) -> list[tuple[int, int, int]]:
        return sorted((each.prompt_tokens, each.output_tokens, each.adapter) for each in requests)

    assert bodies(list(other)) == bodies(WORKLOAD)


def test_rates_count_from_the_first_arrival() -> None:
    def rate_of(workload: list[WorkloadRequest]) -> float:
        options = FleetOptions(num_replicas=1, replay=OPTIONS)
        return FleetInputs(profile=imagined_machine(), workload=workload, options=options).rate

    later = [replace(each, arrival_s=each.arrival_s + 1e6) for each in WORKLOAD]
    assert rate_of(WORKLOAD) == pytest.approx(30.0, rel=0.1)
    assert rate_of(later) == pytest.approx(rate_of(WORKLOAD))
    faster = at_rate(later, 4.0)
    assert faster[0] == later[0]
    assert rate_of(faster) == pytest.approx(4 * rate_of(later))


SMALL_HOSTS = replace(OPTIONS, host_memory=100 << 20)
"""Two such hosts hold 200 MiB of adapters, which take 264 MiB."""


@pytest.mark.parametrize("policy", ["most-idle", "most-idle+contiguous", "auto"])
def test_host_memory_binds_no_placement_where_adapters_come_from_disk(policy: str) -> None:
    outcome = run(policy, num_replicas=2, options=SMALL_HOSTS)
    assert all(each.is_served for each in outcome.all.requests)


@pytest.mark.parametrize(
    ("host_memory", "says"),
    [
        (100 << 20, "9 adapters take 276,824,064 bytes, 67,108,864 more than the 209,715,200 bytes of host"),
        (60 << 20, "adapter 2 takes 67,108,864 bytes, 4,194,304 more than the 62,914,560 bytes of host"),
    ],
)
def test_hosts_hold_every_adapter_that_a_link_carries(host_memory: int, says: str) -> None:
    options = FleetOptions(num_replicas=2, replay=replace(OPTIONS, host_memory=host_memory), link=LINK)
    with pytest.raises(
        UserError, match=f"{says}.*--adapter-mib.*without --link replicas read them from disk"
    ):
        FleetRuns(imagined_machine(), WORKLOAD, options)


def test_what_no_fleet_can_do_is_refused() -> None:
    options = FleetOptions(num_replicas=0, replay=OPTIONS)
    with pytest.raises(UserError, match="at least one replica, not 0"):
        FleetRuns(imagined_machine(), WORKLOAD, options)
    with pytest.raises(UserError, match="there are 3, counted from 0"):
        FleetRuns(
            imagined_machine(),
            WORKLOAD,
            FleetOptions(num_replicas=2, replay=replace(OPTIONS, num_adapters=3)),
        )
    with pytest.raises(CapacityError, match="KV memory holds"):
        FleetRuns(
            imagined_machine(), WORKLOAD, FleetOptions(num_replicas=2, replay=replace(OPTIONS, kv_tokens=64))
        )
