"""The resources that `--ray` gives each replica, and what it refuses: nothing here starts Ray."""

from __future__ import annotations

import asyncio
import socket
from asyncio.subprocess import Process
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_client_harness import run
from server_process import run_command

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import UserError
from loraplex.engine.options import EngineOptions
from loraplex.server.fleet import ray_cluster
from loraplex.server.fleet.ray_cluster import RayCluster, RayPlace
from loraplex.server.fleet.ray_messages import Connected, Node
from loraplex.server.fleet.ray_shares import share_of

SMALL, LARGE = Node(host="10.0.0.1", cpus=4, gpus=0), Node(host="10.0.0.2", cpus=16, gpus=0)
TWO_GPUS, ONE_GPU = Node(host="10.0.0.3", cpus=8, gpus=2), Node(host="10.0.0.4", cpus=8, gpus=1)


def cluster_of(*nodes: Node, held: float = 0) -> Connected:
    free = Node(
        host="", cpus=sum(node.cpus for node in nodes) - held, gpus=sum(node.gpus for node in nodes) - held
    )
    return Connected(host=nodes[0].host, nodes=list(nodes), free=free)


@pytest.mark.parametrize(
    ("nodes", "num_replicas", "options", "device", "resources"),
    [
        ((SMALL, LARGE), 2, {}, "cpu", {"CPU": 8.0}),
        ((SMALL, LARGE), 5, {}, "cpu", {"CPU": 4.0}),
        ((SMALL, LARGE), 5, {"num_threads": 2}, "cpu", {"CPU": 2.0}),
        ((SMALL, TWO_GPUS, ONE_GPU), 3, {}, "cuda", {"GPU": 1.0, "CPU": 1.0}),
        ((TWO_GPUS,), 1, {"tensor_parallel": 2, "cpu_workers": 3}, "cuda", {"GPU": 2.0, "CPU": 4.0}),
        ((TWO_GPUS,), 2, {"device": "cpu"}, "cpu", {"CPU": 4.0}),
        ((TWO_GPUS,), 1, {"cold_start": ColdStart.CPU_ASSIST}, "cuda", {"GPU": 1.0, "CPU": 3.0}),
        ((ONE_GPU,), 1, {"cold_start": ColdStart.CPU_ASSIST}, "cuda", {"GPU": 1.0, "CPU": 5.0}),
        ((ONE_GPU,), 1, {"cold_start": ColdStart.PIPELINED}, "cuda", {"GPU": 1.0, "CPU": 1.0}),
    ],
)
def test_replicas_share_the_cluster(
    nodes: tuple[Node, ...],
    num_replicas: int,
    options: dict[str, Any],
    device: str,
    resources: dict[str, float],
) -> None:
    engine, held = share_of(EngineOptions(model="m", **options), cluster_of(*nodes), num_replicas)
    assert (engine.device, held) == (device, resources)
    assert device == "cpu" or (engine.cpu_workers or 0) == held["CPU"] - 1, "as many start as are reserved"
    assert device == "cuda" or engine.num_threads == held["CPU"]


@pytest.mark.parametrize(
    ("nodes", "num_replicas", "options", "most_on_one"),
    [
        ((SMALL, LARGE), 1, {}, 1),
        ((SMALL, LARGE), 2, {}, 2),  # eight cores each, of which one node has sixteen
        ((SMALL, LARGE), 5, {}, 4),
        ((SMALL, LARGE), 5, {"num_threads": 2}, 5),
        ((TWO_GPUS, ONE_GPU), 3, {}, 2),
        ((TWO_GPUS, TWO_GPUS), 2, {"tensor_parallel": 2}, 1),
        ((TWO_GPUS, ONE_GPU), 2, {"cpu_workers": 6}, 1),  # cores for one of them
    ],
)
def test_replicas_share_the_memory_of_the_node_that_they_may_be_on_together(
    nodes: tuple[Node, ...], num_replicas: int, options: dict[str, Any], most_on_one: int
) -> None:
    engine, _ = share_of(EngineOptions(model="m", **options), cluster_of(*nodes), num_replicas)
    assert engine.memory_share == pytest.approx(1 / most_on_one)


@pytest.mark.parametrize(
    ("about", "num_replicas", "options", "words"),
    [
        (
            cluster_of(TWO_GPUS, ONE_GPU),
            4,
            {},
            "4 replicas with 1 GPU each want 4 GPUs, and Ray has 2 on 10.0.0.3, 1 on 10.0.0.4; lower ",
        ),
        (cluster_of(TWO_GPUS, ONE_GPU), 2, {"tensor_parallel": 2}, "2 replicas with 2 GPUs each want 4 GPUs"),
        (cluster_of(SMALL), 1, {"device": "cuda"}, "want 1 GPU, and Ray has 0 on 10.0.0.1"),
        (cluster_of(TWO_GPUS, held=1), 2, {}, "and Ray has 1 that nobody holds; lower"),
        (
            cluster_of(SMALL),
            5,
            {},
            "5 replicas with 1 core each want 5 cores, and Ray has 4 on 10.0.0.1; lower --replicas or",
        ),
        (cluster_of(SMALL, LARGE), 2, {"num_threads": 12}, "2 replicas with 12 cores each want 24 cores"),
    ],
)
def test_too_few_of_anything_is_told_with_how_many_there_are(
    about: Connected, num_replicas: int, options: dict[str, int], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        share_of(EngineOptions(model="m", **options), about, num_replicas)
    assert words in str(caught.value)


def test_ray_and_backends_are_two_things() -> None:
    both = ("--ray", "--backend", "http://127.0.0.1:1")
    done = run_command("fleet", "serve", "--port", "0", "--model", "m", *both)
    assert done.returncode in (1, 2)
    told = " ".join(done.stderr.split())
    assert "Ray places replicas that are started, backends run already; give one of both" in told


def connecting_fails(address: str | None) -> str:
    found: list[str] = []

    async def scenario() -> None:
        with pytest.raises(UserError) as caught:
            await RayCluster.connect(RayPlace(address=address))
        found.append(str(caught.value))

    run(scenario())
    return found[0]


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", ":6379", "host:port", "host:0"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    assert "give the head's HOST:PORT (6379 unless" in connecting_fails(address)


def test_nobody_at_the_address_is_told() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        told = connecting_fails(f"127.0.0.1:{closed.getsockname()[1]}")
    assert "(Connection refused); give the address of its head as HOST:PORT, run this on a machine" in told


def test_who_listens_but_is_no_ray_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_CONNECT_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = connecting_fails(f"127.0.0.1:{silent.getsockname()[1]}")
    assert "(nothing for 3 s); give the address of its head" in told


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        assert name == "ray"
        return None

    monkeypatch.setattr(ray_cluster, "find_spec", find)
    assert "pip install 'loraplex[ray]'" in connecting_fails(None)


def test_a_driver_that_ends_leaves_the_one_that_was_started_after_it() -> None:
    async def scenario() -> None:
        cluster, loop = RayCluster(RayPlace()), asyncio.get_running_loop()
        before, now = loop.create_future(), loop.create_future()
        cluster._connected = now
        ended = SimpleNamespace(stdout=asyncio.StreamReader())
        ended.stdout.feed_eof()
        await cluster._read_reports(cast("Process", ended), before)
        assert cluster._connected is now
        await cluster._read_reports(cast("Process", ended), now)
        assert cluster._connected is None

    run(scenario())
