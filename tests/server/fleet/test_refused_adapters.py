"""Servers of a fleet that refuse adapters which others accept: those serve them, and the reason is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from replicas import BASE, TINY, answer, request_for, run, spec_in, until
from server_fixtures import SHAPE
from typer.testing import CliRunner
from vllm_dialect import VllmDialect, tokens_of

from loraplex.cli import fleet_live
from loraplex.cli.main import app
from loraplex.core.clock import ManualClock
from loraplex.core.errors import AdapterError, InvalidRequestError
from loraplex.fleet.policy import Policy
from loraplex.server.continuing import Continued
from loraplex.server.fleet.backend_adapters import adapter_name
from loraplex.server.fleet.backend_errors import AdapterMissingError
from loraplex.server.fleet.backend_http import BackendAddress, BackendError
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet
from loraplex.server.fleet.decision_log import DecisionLog, logged_decisions
from loraplex.server.fleet.explain import explain
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.http_replica import HttpReplica
from loraplex.server.fleet.http_replica_options import HttpReplicaOptions


@asynccontextmanager
async def fleet_of(*servers: VllmDialect, log: DecisionLog | None = None) -> AsyncIterator[FleetEngine]:
    backends = Backends(urls=tuple(server.url for server in servers))
    policy = Policy.of("round-robin")
    fleet = backend_fleet(backends, base_names=[BASE], shape=SHAPE, policy=policy, log=log)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


def test_an_adapter_is_served_by_those_that_take_it_and_the_reason_of_the_other_is_shown(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as bad, VllmDialect() as good, fleet_of(bad, good) as fleet:
            bad.does.max_lora_rank = 4
            await fleet.add_adapter(spec)
            await fleet.stage_adapter(spec.version)
            words = fleet.adapter_states(spec.version)
            assert words[0].startswith("replica 0: refuses it (")
            assert "start it with --max-lora-rank 8" in words[0]
            assert words[1] == "replica 1: ready"
            shown, other = fleet.replicas
            assert (shown.status.state, other.status.message) == ("ready", "")
            assert (shown.num_placed, shown.num_refused) == (0, 1)
            assert (other.num_placed, other.num_refused) == (1, 0)
            assert "it refuses an adapter: " in shown.status.message
            assert "start it with --max-lora-rank 8" in shown.status.message
            for _ in range(4):
                output = await answer(fleet, request_for([5], adapter=spec.version))
                assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            assert not [body for body in bad.bodies("/completions") if body["model"] != BASE]
            assert [fleet.replicas[0].num_replayed, fleet.replicas[1].num_replayed] == [0, 0]
            await fleet.remove_adapter(spec.version)
            assert (good.adapters, fleet.replicas[0].status.message) == ({}, "")

    run(scenario())


def test_what_nobody_takes_is_refused_with_the_fix_and_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as one, VllmDialect() as two, fleet_of(one, two) as fleet:
            one.does.max_lora_rank = two.does.max_lora_rank = 4
            with pytest.raises(AdapterError, match="start it with --max-lora-rank 8"):
                await fleet.add_adapter(spec)
            assert [each.status.message for each in fleet.replicas] == ["", ""]
            one.does.allows_updates = two.does.allows_updates = False
            with pytest.raises(BackendError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
                await fleet.add_adapter(spec)

    run(scenario())


def test_an_adapter_that_all_servers_refuse_is_asked_for_once_on_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as one, VllmDialect() as two, fleet_of(one, two) as fleet:
            await fleet.add_adapter(spec)
            for server in (one, two):
                server.adapters.clear()
                server.does.max_lora_rank = 4
                server.calls.clear()
            for num_requests in (1, 2):
                with pytest.raises(AdapterMissingError, match="start it with --max-lora-rank 8"):
                    await answer(fleet, request_for([5], adapter=spec.version))
                assert len(one.bodies("/load_lora_adapter")) == num_requests
                assert len(two.bodies("/load_lora_adapter")) == num_requests
                assert fleet.continued == {Continued.REFUSED: num_requests}, "nobody has died"
            assert [each.num_replayed for each in fleet.replicas] == [0, 0], "nobody had it"

    run(scenario())


def test_a_decision_is_explained_with_the_reason_why_each_other_server_was_rejected(tmp_path: Path) -> None:
    request = request_for([5], adapter=(spec := spec_in(tmp_path / "one", rank=8)).version)

    async def scenario() -> None:
        async with (
            VllmDialect() as bad,
            VllmDialect() as drained,
            VllmDialect() as cut,
            VllmDialect() as good,
        ):
            bad.does.max_lora_rank = 4
            cut.does.cut_after = 2
            async with fleet_of(bad, drained, cut, good, log=DecisionLog(tmp_path)) as fleet:
                await fleet.add_adapter(spec)
                fleet.drain(1)
                while not cut.bodies("/completions")[1:]:  # the first is the probe
                    cut_request = replace(request, request_id=f"{request.request_id}{len(good.calls)}-0")
                    await answer(fleet, cut_request)
            first, second = explain(cut_request.request_id, logged_decisions(tmp_path))
            verdicts = [row.verdict for row in first.replicas]
            assert verdicts == ["refuses the adapter", "drained", "chosen", ""]
            verdicts = [row.verdict for row in second.replicas]
            assert verdicts == ["refuses the adapter", "drained", "had the request before", "chosen"]
            words = ("fleet", "explain", cut_request.request_id, "--state-dir", str(tmp_path))
            shown = CliRunner().invoke(app, words).stdout
            assert "times are guessed" in shown
            assert "there is no profile of servers behind --backend" in shown
            assert "loraplex profile" not in shown, "it measures this machine, where nothing is computed"

    run(scenario())


def test_a_request_waits_for_a_server_that_may_take_its_adapter(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as bad, VllmDialect() as good, fleet_of(bad, good) as fleet:
            bad.does.max_lora_rank = 4
            await fleet.add_adapter(spec)
            await good.stop()
            await until(lambda: not fleet._members[1].healthy)
            asking = asyncio.create_task(answer(fleet, request_for([5], adapter=spec.version)))
            await good.start()
            assert list((await asking).token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            # Back with another option as well: no server has the adapter, and the client gets the reason.
            await good.stop()
            good.does.max_lora_rank = 4
            await good.start()
            with pytest.raises(AdapterMissingError, match="start it with --max-lora-rank 8"):
                await answer(fleet, request_for([5], adapter=spec.version))

    run(scenario())


def test_a_server_that_refuses_adapters_joins_and_serves_the_base_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as good, VllmDialect() as bad, fleet_of(good, bad) as fleet:
            await fleet.scale(1)
            bad.does.max_lora_rank = 4
            await fleet.add_adapter(spec)
            await fleet.scale(2)
            assert "it refuses an adapter" in fleet.replicas[1].status.message
            for _ in range(2):
                await answer(fleet, request_for([5], adapter=spec.version))
                await answer(fleet, request_for([5]))
            assert {body["model"] for body in bad.bodies("/completions")} == {BASE}

    run(scenario())


def test_what_was_refused_is_offered_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec, clock = spec_in(tmp_path / "one", rank=8), ManualClock()
        async with VllmDialect() as server:
            options = HttpReplicaOptions(idle_interval_s=0.01, refused_retry_s=30.0)
            replica = HttpReplica(BackendAddress(url=server.url), TINY, options=options, clock=clock)
            await replica.start()
            server.does.max_lora_rank = 4
            with pytest.raises(AdapterError):
                await replica.add_adapter(spec)
            server.does.max_lora_rank = 8
            num_asked = server.num_asked
            clock.advance(1.0)
            await until(lambda: server.num_asked > num_asked)
            assert list(replica.refused) == [spec.version], "not at every look"
            clock.advance(30.0)
            await until(lambda: not replica.refused)
            assert list(server.adapters) == [adapter_name(spec.version)]
            await replica.close()

    run(scenario())


def test_a_replica_that_joins_loads_several_adapters_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        specs = [spec_in(tmp_path / str(seed), seed=seed) for seed in range(6)]
        async with VllmDialect() as one, VllmDialect() as two, fleet_of(one, two) as fleet:
            await fleet.scale(1)
            for spec in specs:
                await fleet.add_adapter(spec)
            two.adapters.clear()
            two.does.load_gate = asyncio.Event()
            before = len(two.bodies("/load_lora_adapter"))
            joining = asyncio.create_task(fleet.scale(2))
            # The probe at its start waits as well.
            await until(lambda: len(two.bodies("/load_lora_adapter")) == before + 1)
            two.does.load_gate.set()
            two.does.load_gate = asyncio.Event()
            await until(lambda: len(two.bodies("/load_lora_adapter")) == before + 5)
            two.does.load_gate.set()
            await joining
            assert set(two.adapters) == {adapter_name(spec.version) for spec in specs}

    run(scenario())


def test_a_server_that_others_started_is_not_restarted() -> None:
    async def scenario() -> None:
        async with VllmDialect() as one, VllmDialect() as two, fleet_of(one, two) as fleet:
            before = fleet._members[1]
            with pytest.raises(
                InvalidRequestError, match=r"replica 1 is not restarted: .* restart it where it runs"
            ):
                await fleet.restart(1)
            with pytest.raises(InvalidRequestError, match="there is no replica 2"):
                await fleet.restart(2)
            assert fleet._members[1] is before
            assert before.healthy

    run(scenario())


def test_status_says_why_adapters_are_refused_and_which_are_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"replica": 0, "state": "ready", "message": "it refuses an adapter: open its folder"}]
    left_out = {"left_out": [{"name": "bot", "reason": "nobody takes it"}]}
    monkeypatch.setattr(fleet_live, "list_of", lambda *args, **options: (rows, left_out))
    done = CliRunner().invoke(app, ["fleet", "status"], env={"COLUMNS": "60"})
    assert done.exit_code == 0
    assert "replica 0: it refuses an adapter: open its folder" in done.output
    assert "adapter 'bot' is not served, and tried again: nobody takes it" in done.output
