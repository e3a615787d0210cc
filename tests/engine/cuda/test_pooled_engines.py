"""Engines that copy adapters from each other's host memory: who reads files, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from cuda_engines import CONFIG, greedy, interpreted, save_base
from driving import Finished, run_to_end, step
from pools import joined
from tiny import save_adapter

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.cold_start import ColdStart
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.engine.peers import Peers
from loraplex.server.pool.directory import PoolDirectory
from loraplex.server.pool.messages import Holder

MAX_STEPS = 20_000
Build = Callable[[Path, Peers | None], Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pooled")
    base = save_base(root / "base")
    for name, rank in (("one", 4), ("two", 3)):
        save_adapter(root / name, base, rank=rank, targets=["q_proj", "v_proj"], seed=rank)
    return root


def on_a_cpu(folder: Path, peers: Peers | None) -> Engine:
    options = EngineOptions(model=str(folder / "base"), device="cpu", kv_memory_bytes=1 << 20, num_threads=1)
    return build_core(options, peers=peers)


def on_a_gpu(folder: Path, peers: Peers | None) -> Engine:
    return interpreted(cold_start=ColdStart.PIPELINED, read=None, peers=peers)


def spec_of(folder: Path, name: str) -> AdapterSpec:
    return read_adapter(folder / name, CONFIG.shape)


def run_all(engines: list[Engine]) -> list[dict[str, Finished]]:
    """Step all engines in turn to their ends."""
    done: list[dict[str, Finished]] = [{} for _ in engines]
    for _ in range(MAX_STEPS):
        if not any(engine.has_work() for engine in engines):
            return done
        for engine, finished in zip(engines, done, strict=True):
            if engine.has_work():
                step(engine, finished)
    raise AssertionError("the engines do not come to an end")


def request_id(number: int) -> str:
    return f"r{number:03}"  # as long as any other: prompts are made of it


@pytest.mark.parametrize(
    ("build", "names", "num_replicas", "num_requests"),
    [(on_a_cpu, ("one", "two"), 3, 100), (on_a_gpu, ("two",), 2, 2)],
)
def test_one_replica_reads_the_files_and_the_others_copy_from_it(
    build: Build, names: tuple[str, ...], num_replicas: int, num_requests: int, folder: Path
) -> None:
    specs = [spec_of(folder, name) for name in names]
    directory = PoolDirectory()
    with joined(num_replicas) as members:
        engines = [build(folder, pool) for pool, _ in members]
        for number, (_, address) in enumerate(members):
            directory.opened(number, address)
            for spec in specs:
                engines[number].add_adapter(spec)
        asked: dict[str, str] = {}
        for index in range(num_requests):
            number = -index % num_replicas
            for spec in specs:
                name = request_id(len(asked))
                members[number][0].locate(spec.version, directory.begin(number, spec.version))
                engines[number].add_request(greedy(name, spec.version, tokens=len(specs)))
                asked[name] = spec.version
        done = run_all(engines)
        expected = {asked[name]: found.token_ids for name, found in done[0].items()}
        assert len({tuple(tokens) for tokens in expected.values()}) == len(specs)
        for finished in done:
            assert len(finished) >= num_requests // num_replicas
            for name, found in finished.items():
                assert found.token_ids == expected[asked[name]], found.error
        first, *others = [engine.stats() for engine in engines]
        assert (first.adapter_file_reads, first.adapter_fetches) == (len(specs), 0)
        for stats in others:
            assert (stats.adapter_file_reads, stats.adapter_fetches) == (0, len(specs))
            assert stats.adapter_fetch_failures == 0
            assert stats.adapter_bytes_fetched > 0
        for (pool, _), engine in zip(members, engines, strict=True):
            pool.close()
            engine.close()


def test_an_adapter_whose_files_are_gone_is_copied_from_a_replica_that_has_it(
    folder: Path, tmp_path: Path
) -> None:
    copytree(folder / "one", tmp_path / "one")
    spec = spec_of(tmp_path, "one")
    directory, answers = PoolDirectory(), []
    with joined(2) as members:
        engines = [on_a_cpu(folder, pool) for pool, _ in members]
        for number, ((pool, address), engine) in enumerate(zip(members, engines, strict=True)):
            directory.opened(number, address)
            pool.locate(spec.version, directory.begin(number, spec.version))
            engine.add_adapter(spec)
            engine.add_request(greedy(request_id(0), spec.version))
            answers.append(run_to_end(engine)[request_id(0)])
            rmtree(tmp_path / "one", ignore_errors=True)
            directory.end(number, spec.version)
            directory.saw(number, engine.stats())
        assert answers[0].token_ids == answers[1].token_ids != []
        for (pool, _), engine in zip(members, engines, strict=True):
            pool.close()
            engine.close()


def test_what_a_replica_has_evicted_is_not_copied_from_it(folder: Path) -> None:
    spec = spec_of(folder, "one")
    with joined(2) as ((first, address), (second, _)):
        engines = [on_a_cpu(folder, pool) for pool in (first, second)]
        for engine in engines:
            engine.add_adapter(spec)
        engines[0].add_request(greedy(request_id(0), spec.version))
        run_to_end(engines[0])
        engines[0].remove_adapter(spec.version)
        engines[0].take_removed_adapters()
        second.locate(spec.version, [Holder(address)])
        engines[1].add_request(greedy(request_id(0), spec.version))
        run_to_end(engines[1])
        stats = engines[1].stats()
        assert (stats.adapter_file_reads, stats.adapter_fetches, stats.adapter_fetch_failures) == (1, 0, 0)
        for pool, engine in zip((first, second), engines, strict=True):
            pool.close()
            engine.close()
