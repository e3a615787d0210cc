"""Operating points: what a replica sustains of each rank, however far ranks are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fleets import OPTIONS, WORKLOAD
from twins import imagined_machine

from loraplex.core.errors import UserError
from loraplex.perf.named_profiles import Profile
from loraplex.twin import operating_points as module
from loraplex.twin.replay import ReplayOptions
from loraplex.workload.jsonl import WorkloadRequest


@pytest.mark.parametrize("sustained", [{8: 12.0, 64: 11.0}, {8: 40.0, 64: 5.0}, {8: 4.0, 64: 60.0}])
def test_points_are_found_however_far_they_are_apart(
    sustained: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "replay", engine_of(sustained))
    points = module.operating_points(imagined_machine(), WORKLOAD, replace(OPTIONS, ranks=(8, 64)))
    tokens = sum(each.prompt_tokens + each.output_tokens for each in WORKLOAD) / len(WORKLOAD)
    found = {rank: point / tokens for rank, point in points.items()}
    # The number of requests of Poisson arrivals is not quite what their rate says.
    assert found == pytest.approx(sustained, rel=0.25)


def test_a_rank_that_is_sustained_at_no_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "replay", engine_of({8: 12.0, 64: 0.0}))
    with pytest.raises(UserError, match="on adapters of rank 64; the profile and the workload do not go"):
        module.operating_points(imagined_machine(), WORKLOAD, replace(OPTIONS, ranks=(8, 64)))


def engine_of(sustained: dict[int, float]) -> object:
    """An engine that holds its objective up to these numbers of requests per second, by rank."""

    def replay(profile: Profile, workload: Sequence[WorkloadRequest], options: ReplayOptions) -> object:
        (rank,) = options.ranks
        p95_s = 1.0 if len(workload) / 60.0 <= sustained[rank] else 100.0
        return SimpleNamespace(summary=lambda: {"ttft_s": {"p95": p95_s}})

    return replay
