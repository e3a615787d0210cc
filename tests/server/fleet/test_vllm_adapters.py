"""Adapters on a server with vLLM's API: loaded once, refused, and loaded again after it was away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from replicas import BASE, answer, replica_of, request_for, run, spec_in, started, until
from server_fixtures import SHAPE, write_adapter
from vllm_dialect import Behaviour, VllmDialect, tokens_of

from loraplex.core.errors import (
    AdapterError,
    EngineClosedError,
    EngineDeadError,
    RequestMovedError,
    UnknownModelError,
)
from loraplex.core.request import FinishReason
from loraplex.fleet.policy import Policy
from loraplex.server.fleet.backend_adapters import adapter_name
from loraplex.server.fleet.backend_errors import AdapterMissingError
from loraplex.server.fleet.backend_http import Answer, BackendError, UnreachableError
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet


def test_adapters_answer_under_names_that_hold_their_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            with pytest.raises(UnknownModelError):
                await answer(replica, request_for([5], adapter=spec.version))
            await replica.add_adapter(spec)
            await replica.add_adapter(spec)
            assert server.adapters == {adapter_name(spec.version): str(tmp_path / "one")}
            output = await answer(replica, request_for([5], adapter=spec.version))
            assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            await replica.remove_adapter(spec.version)
            await replica.remove_adapter(spec.version)
            assert server.adapters == {}
            with pytest.raises(UnknownModelError):
                await answer(replica, request_for([5], adapter=spec.version))

    run(scenario())


def test_a_version_that_the_registry_has_stays_for_the_other_front_of_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept, given_up = spec_in(tmp_path / "a"), spec_in(tmp_path / "b", seed=1)
        async with (
            VllmDialect() as server,
            started(server.url, is_registered=lambda version: version == kept.version) as replica,
        ):
            for spec in (kept, given_up):
                await replica.add_adapter(spec)
            for spec in (kept, given_up):
                await replica.remove_adapter(spec.version)
            assert set(server.adapters) == {adapter_name(kept.version)}
            with pytest.raises(UnknownModelError):
                await answer(replica, request_for([5], adapter=kept.version))

    run(scenario())


def test_a_version_that_another_front_unloads_while_it_is_staged_is_loaded_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            server.does.num_forgotten = 3  # by its load of the same version, and when it gives that up
            await replica.stage_adapter(spec.version)
            assert server.does.num_forgotten == 0
            assert set(server.adapters) == {adapter_name(spec.version)}
            server.does.num_forgotten = 4
            with pytest.raises(EngineDeadError, match="does not know the model"):
                await replica.stage_adapter(spec.version)

    run(scenario())


def test_one_load_however_many_ask(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec, gate = spec_in(tmp_path / "one"), asyncio.Event()
        async with VllmDialect() as server, started(server.url) as replica:
            server.does.load_gate = gate
            adding = [asyncio.create_task(replica.add_adapter(spec)) for _ in range(100)]
            await until(lambda: len(server.bodies("/load_lora_adapter")) == 2)  # the first is the probe
            adding.pop().cancel()  # cancelling one waiter does not cancel the load
            answering = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            gate.set()
            await asyncio.gather(*adding[:-1])
            assert (await answering).finish_reason is FinishReason.LENGTH
            assert len(server.bodies("/load_lora_adapter")) == 2

    run(scenario())


def test_a_request_that_waits_for_its_adapter_is_not_what_a_server_died_of(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            server.does.load_gate = asyncio.Event()
            replica._adapters.note(spec)
            waiting = asyncio.create_task(replica._adapters.load(spec.version))
            await until(lambda: len(server.bodies("/load_lora_adapter")) == 2)  # the first is the probe
            replica._adapters.give_up("it is away")
            with pytest.raises(RequestMovedError, match="it is away"):
                await waiting
            server.does.load_gate.set()

    run(scenario())


def test_an_adapter_that_is_loaded_already_is_read_again_and_no_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            server.adapters[adapter_name(spec.version)] = "/a/folder/that/is/gone"
            await replica.add_adapter(spec)
            assert server.adapters == {adapter_name(spec.version): str(tmp_path / "one")}
            # As after a request that another front's change interfered with: that front has it loaded there.
            replica._adapters.doubt(spec.version)
            await replica._adapters.load(spec.version)
            assert len(server.bodies("/unload_lora_adapter")) == 2  # the first is the probe
            # With it vLLM would read the files in every step.
            assert not any("load_inplace" in body for body in server.bodies("/load_lora_adapter"))

    run(scenario())


def test_adapters_that_the_server_refuses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            large = spec_in(tmp_path / "large", rank=16, seed=3)
            server.does.max_lora_rank = 8
            with pytest.raises(
                AdapterError, match=r"no adapter of rank 16 .*start it with --max-lora-rank 16"
            ):
                await replica.add_adapter(large)
            changed = spec_in(tmp_path / "changed")
            write_adapter(tmp_path / "changed", seed=9)
            with pytest.raises(
                AdapterError, match="have changed since they were read; load the adapter again"
            ):
                await replica.add_adapter(changed)
            assert server.adapters == {}
            assert replica.healthy
        async with (
            VllmDialect() as server,
            started(server.url, seen_path=lambda spec: f"/elsewhere/{spec.version}") as replica,
        ):
            with pytest.raises(AdapterError, match=r"finds no adapter at /elsewhere/.*see the same folders"):
                await replica.add_adapter(spec_in(tmp_path / "one"))

    run(scenario())


def test_adapters_come_back_after_the_server_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        specs = [spec_in(tmp_path / str(seed), seed=seed) for seed in range(4)]
        kept, removed, late, broken = specs
        async with VllmDialect() as server, started(server.url) as replica:
            for spec in (kept, removed, broken):
                await replica.add_adapter(spec)
            await server.stop()
            with pytest.raises(EngineDeadError):
                await answer(replica, request_for([5], adapter=kept.version))
            await until(lambda: not replica.healthy)
            await replica.add_adapter(late)  # only recorded
            await replica.remove_adapter(removed.version)
            write_adapter(broken.path, seed=99)
            await server.start()
            await until(lambda: replica.healthy)
            assert server.adapters.keys() == {adapter_name(kept.version), adapter_name(late.version)}
            for spec in (kept, late):
                output = await answer(replica, request_for([5], adapter=spec.version))
                assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            with pytest.raises(
                EngineDeadError, match=r"does not have adapter version .* files .* have changed"
            ):
                await answer(replica, request_for([5], adapter=broken.version))
            assert replica.healthy

    run(scenario())


def test_an_adapter_that_the_server_does_not_unload_does_not_keep_it_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        stuck, other = spec_in(tmp_path / "a"), spec_in(tmp_path / "b", seed=1)
        async with VllmDialect() as server, started(server.url, silence_s=0.2) as replica:
            for spec in (stuck, other):
                await replica.add_adapter(spec)
            server.does.keeps = {adapter_name(stuck.version)}
            with pytest.raises(BackendError, match="does not unload an adapter"):
                await replica.remove_adapter(stuck.version)
            for _ in range(2):
                server.does.is_deaf = True
                await until(lambda: not replica.healthy)
                await replica.remove_adapter(other.version)
                server.does.is_deaf = False
                await until(lambda: replica.healthy)
            assert list(server.adapters) == [adapter_name(stuck.version)]
            assert caplog.text.count("stays there for now") == 1
            server.does.keeps = set()
            server.does.is_deaf = True
            await until(lambda: not replica.healthy)
            server.does.is_deaf = False
            await until(lambda: replica.healthy)
            assert not server.adapters, "it is tried again"

    run(scenario())


def test_the_watch_over_a_server_goes_on_while_it_loads_adapters_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        lost, refused = spec_in(tmp_path / "a"), spec_in(tmp_path / "b", rank=8, seed=1)
        async with VllmDialect() as server, started(server.url, silence_s=0.2) as replica:
            await replica.add_adapter(lost)
            server.does.max_lora_rank = 4
            with pytest.raises(AdapterError):
                await replica.add_adapter(refused)
            asked = len(server.bodies("/load_lora_adapter"))
            server.adapters.clear()
            server.does.load_gate = asyncio.Event()
            server.does.hang_ups = 2
            with pytest.raises(EngineDeadError):
                await answer(replica, request_for([5]))
            await until(lambda: len(server.bodies("/load_lora_adapter")) > asked)
            asked_for = [body["lora_name"] for body in server.bodies("/load_lora_adapter")[asked:]]
            assert asked_for == [adapter_name(lost.version)], "what it refuses is offered in its own time"
            assert replica.healthy
            server.does.is_deaf = True
            await until(lambda: not replica.healthy)
            server.does.load_gate.set()

    run(scenario())


def test_silence_is_noticed_while_a_server_that_came_back_loads_its_adapters(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url, silence_s=0.2) as replica:
            await replica.add_adapter(spec)
            await server.stop()
            await until(lambda: not replica.healthy)
            asked = len(server.bodies("/load_lora_adapter"))
            server.does.load_gate = asyncio.Event()
            await server.start()
            await until(lambda: len(server.bodies("/load_lora_adapter")) > asked)
            server.does.is_deaf = True
            await until(lambda: "did not answer" in replica.status.message)
            assert not replica.healthy
            server.does.load_gate.set()
            server.does.is_deaf = False
            await until(lambda: replica.healthy)
            assert list(server.adapters) == [adapter_name(spec.version)]

    run(scenario())


def test_an_adapter_that_is_refused_for_a_while_is_served_elsewhere_and_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            server.adapters.clear()
            server.does.max_lora_rank = 4  # it was restarted with another option
            with pytest.raises(AdapterMissingError, match=r"start it with --max-lora-rank 8"):
                await answer(replica, request_for([5], adapter=spec.version))
            assert replica.healthy
            server.does.max_lora_rank = 8
            output = await answer(replica, request_for([5], adapter=spec.version))
            assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)

    run(scenario())


def test_no_client_hears_that_one_of_the_servers_refuses_an_adapter_that_it_had(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as one, VllmDialect() as other:
            backends = Backends(urls=(one.url, other.url))
            policy = Policy.of("round-robin")
            fleet = backend_fleet(backends, base_names=[BASE], shape=SHAPE, policy=policy)
            await fleet.start()
            await fleet.add_adapter(spec)
            one.adapters.clear()
            one.does.max_lora_rank = 4
            for _ in range(4):
                output = await answer(fleet, request_for([5], adapter=spec.version))
                assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            await fleet.close()

    run(scenario())


def test_an_adapter_that_is_gone_unnoticed_is_loaded_again_for_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            server.adapters.clear()
            output = await answer(replica, request_for([5], adapter=spec.version))
            assert output.finish_reason is FinishReason.LENGTH

    run(scenario())


def test_adapters_may_be_added_while_it_starts_and_streams_end_when_it_is_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect(Behaviour(pause_after=1)) as server:
            replica = replica_of(server.url)
            await replica.start(add_adapters=replica.add_adapter(spec))
            assert list(server.adapters) == [adapter_name(spec.version)]
            stream = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            await server.paused.wait()
            await replica.close()
            await replica.close()
            with pytest.raises(EngineClosedError):
                await stream
            with pytest.raises(EngineClosedError):
                await answer(replica, request_for([5]))
            await until(lambda: server.num_cancelled == 1)
            assert list(server.adapters) == [adapter_name(spec.version)]  # the next fleet finds it

    run(scenario())


def test_a_look_at_the_server_does_not_unload_what_requests_in_flight_have(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            server.does.pause_after = 2
            asking = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            await server.paused.wait()
            removing = asyncio.create_task(replica.remove_adapter(spec.version))
            await until(lambda: spec.version in replica._adapters._unwanted)
            await replica._adapters.restore(list(server.adapters))
            assert list(server.adapters) == [adapter_name(spec.version)]
            server.does.resume.set()
            assert (await asking).finish_reason is FinishReason.LENGTH
            await removing
            assert server.adapters == {}

    run(scenario())


def test_no_more_loads_are_begun_when_the_server_has_gone_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        specs = [spec_in(tmp_path / str(seed), seed=seed) for seed in range(6)]
        async with (
            VllmDialect() as server,
            started(server.url, idle_interval_s=60.0, num_loads_at_once=2) as replica,
        ):
            for spec in specs:
                replica._adapters.note(spec)
            call, num_loads = replica._http.call, 0

            async def counted(method: str, path: str, *args: Any, **options: Any) -> Answer:
                nonlocal num_loads
                num_loads += path == "/v1/load_lora_adapter"
                return await call(method, path, *args, **options)

            monkeypatch.setattr(replica._http, "call", counted)
            await server.stop()
            with pytest.raises(UnreachableError, match="nothing answers"):
                await replica._adapters.restore([])
            assert num_loads == 2

    run(scenario())


def test_a_removal_waits_for_requests_in_flight_and_is_overtaken_by_an_addition(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect(Behaviour(pause_after=1)) as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            stream = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            await server.paused.wait()
            removal = asyncio.create_task(replica.remove_adapter(spec.version))
            await asyncio.sleep(0)
            assert server.adapters
            await replica.add_adapter(spec)
            server.does.resume.set()
            await stream
            await removal
            assert server.adapters
            assert (await answer(replica, request_for([5], adapter=spec.version))).token_ids

    run(scenario())
