"""Candidates for victims, queues, admission and start policies are tried by a script that must not flatter
them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import policies, policy_starts, policy_twin
from benchmarks.policy_loads import LOADS, Load, Requests
from benchmarks.policy_queues import MOST_OVERTAKING, Order, OrderedQueue, ShortestRequest, SizeClasses
from benchmarks.policy_victims import (
    AbsentFirstBlocks,
    Counts,
    Floor,
    GreedyDualAdapters,
    LfuAdapters,
    LruAdapters,
)
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.adapter_tier import Copy, Presence
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.start_policy import InFlight, StartPolicy
from loraplex.scheduling.victims import IdleAdapters, next_victim
from loraplex.twin.leaping import ANY_TOKEN
from loraplex.workload.jsonl import WorkloadRequest

NAMES = {load.name: load for load in LOADS}


def idle(version: str, *, num_uses: int = 1, num_bytes: int = 1000, on_host: bool = False) -> Copy:
    source = Copy(version=version, num_bytes=num_bytes, presence=Presence.RESIDENT) if on_host else None
    copy = Copy(version=version, num_bytes=num_bytes, source=source)
    for when in range(num_uses):
        copy.uses.add(when)
    return copy


def reload_s(adapter: object) -> float:
    return 1.0 if getattr(adapter, "reloads_from_host") else 30.0  # noqa: B009


# ---- victims


def test_lru_evicts_what_was_idle_for_longest_and_lfu_what_is_used_least() -> None:
    lru, lfu = LruAdapters(set()), LfuAdapters(set())
    for adapter in (idle("often", num_uses=600), idle("seldom", num_uses=2)):
        lru.add(adapter)
        lfu.add(adapter)
    assert lru.first is not None
    assert lfu.first is not None
    assert (lru.first.version, lfu.first.version) == ("often", "seldom")


def test_counts_forget_old_uses() -> None:
    counts = Counts()
    counts.add(idle("often", num_uses=600))
    counts.add(idle("now", num_uses=20_000))
    assert counts.of("often") < 1e-6


def test_what_a_copy_on_the_host_brings_back_goes_before_what_is_on_disk() -> None:
    adapters = GreedyDualAdapters(set(), reload_s, Floor())
    adapters.add(idle("on disk", num_uses=2))
    adapters.add(idle("on host", num_uses=3, on_host=True))
    assert adapters.first is not None
    assert adapters.first.version == "on host"


def test_blocks_of_an_absent_adapter_go_before_everything_else() -> None:
    adapters = IdleAdapters({"there"})
    adapters.add(replace(idle("there"), last_use=1))
    blocks = AbsentFirstBlocks(100, adapters)
    for contents, (version, shared) in enumerate([("there", True), ("gone", True), ("there", False)]):
        blocks.add(contents, contents + 2, version, shared=shared)
    victim = next_victim(adapters, blocks, short=1)
    assert getattr(victim, "contents", None) == 1


# ---- queues


def sequence(number: int, num_prompt: int, max_tokens: int) -> RequestState:
    params = SamplingParams(max_tokens=max_tokens)
    return RequestState(
        EngineRequest(request_id=str(number), prompt_token_ids=[1] * num_prompt, params=params)
    )


@pytest.mark.parametrize("order", [ShortestRequest, SizeClasses])
def test_nobody_is_overtaken_for_ever(order: type[Order]) -> None:
    table = Arena(num_pages=8, page_bytes=4096, block_size=4).table
    queue = OrderedQueue(order(table))
    for number in range(6 * MOST_OVERTAKING):
        queue.append(sequence(number, *((2000, 1000) if number % 2 else (8, 8))))
    order_now = [int(each.request_id) for each in queue.first(1000)]
    queue.check_integrity()
    overtaken = [sum(later > number for later in order_now[:place]) for place, number in enumerate(order_now)]
    assert 0 < max(overtaken) <= MOST_OVERTAKING


# ---- start policies


@pytest.mark.parametrize(
    ("starts", "own_mb", "num_decodes", "joins"),
    [
        (policy_starts.always, 5000, 8, True),
        (policy_starts.never, 1, 8, False),
        (policy_starts.by(StartPolicy), 5000, 8, False),
        (policy_starts.by(policy_starts.GainAgainstDelays), 500, 8, True),
        (policy_starts.by(policy_starts.GainAgainstDelays), 500, 64, False),
        (policy_starts.by(policy_starts.HeavyDecodes), 500, 8, False),
    ],
)
def test_start_policies_let_others_wait_by_their_own_rule(
    starts: policy_starts.Starts, own_mb: int, num_decodes: int, joins: bool
) -> None:
    profile = find_profile(Path(policies.PROFILE))
    assert isinstance(profile, CostModel)
    before = StepFeatures(num_decodes=num_decodes, decode_positions=100.0 * num_decodes)
    assert joins == starts(DriftWatch(profile)).may_join(
        before=before,
        after=before._replace(num_prompts=1, num_prompt_tokens=128),
        in_flight_before=InFlight(awaited_bytes=0, backlog_bytes=0),
        in_flight_after=InFlight(awaited_bytes=own_mb << 20, backlog_bytes=0),
    )


def test_bounds_of_a_decodes_delay_differ() -> None:
    profile = find_profile(Path(policies.PROFILE))
    assert isinstance(profile, CostModel)
    before = StepFeatures(num_decodes=8, decode_positions=800.0)
    after = before._replace(num_prompts=1, num_prompt_tokens=128)
    step_s = profile.step_s(after)

    def joins(kind: type[StartPolicy], stall: float) -> bool:
        in_flight = InFlight(awaited_bytes=0, backlog_bytes=0, assist_delay_s=stall * step_s)
        return policy_starts.by(kind)(DriftWatch(profile)).may_join(
            before=before,
            after=after,
            in_flight_before=InFlight(awaited_bytes=0, backlog_bytes=0),
            in_flight_after=in_flight,
        )

    kinds = (policy_starts.NoDecodeStall, StartPolicy, policy_starts.LongDecodeStall)
    assert [[joins(kind, stall) for stall in (0.0, 0.04, 0.1, 0.3)] for kind in kinds] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
    ]


def test_large_absent_adapters_stand_back() -> None:
    table = Arena(num_pages=8, page_bytes=1 << 30, block_size=4, host_bytes=1 << 34).table
    for version, num_bytes in (("small", 70_000_000), ("large", 7_000_000_000)):
        table.add(version, num_bytes)
    order = policy_starts.ShortestLoad(table)

    def place(version: str | None) -> float:
        params = SamplingParams(max_tokens=8)
        request = EngineRequest(request_id="0", prompt_token_ids=[1], params=params, adapter=version)
        return order.place(RequestState(request), 100)

    assert place(None) == 100 < place("small") < place("large") == 100 + MOST_OVERTAKING


# ---- the script


def small(load: Load) -> tuple[Load, Requests]:
    drawn = load.draw(0, 1.0, None)
    kept = [each for each in drawn.requests if each.arrival_s < 4]
    prompts = None if drawn.prompts is None else drawn.prompts[: len(kept)]
    return replace(load, warm_s=1.0), Requests(requests=kept, prompts=prompts)


@pytest.mark.parametrize("name", ["zipf-100", "conversations-100"])
def test_every_candidate_serves_all_requests(name: str) -> None:
    profile = find_profile(Path(policies.PROFILE))
    assert isinstance(profile, CostModel)
    load, drawn = small(NAMES[name])
    for candidate in policies.CANDIDATES:
        figures = policy_twin.run(profile, load, drawn, candidate)
        assert figures["num_failed"] == 0
        assert figures["num_requests"] == sum(each.arrival_s >= 1 for each in drawn.requests)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    drawn = NAMES["conversations-100"].draw(0, 1.0, None)
    assert drawn.prompts is not None
    said: dict[int, tuple[WorkloadRequest, list[int]]] = {}
    num_later = 0
    for request, prompt in zip(drawn.requests, drawn.prompts, strict=True):
        conversation = prompt[-1]
        if conversation in said:
            before, earlier = said[conversation]
            whole = [*earlier, *[ANY_TOKEN] * before.output_tokens]
            assert prompt[: len(whole)] == whole
            num_later += 1
        said[conversation] = (request, prompt)
    assert num_later > 100


def test_traces_that_are_not_there_are_left_out_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "policies.json"
    monkeypatch.setattr(sys, "argv", ["policies", "maf-600", "--out", str(out)])
    policies.main()
    assert "maf-600: left out, as it needs --data" in capsys.readouterr().err
    assert not out.exists()
