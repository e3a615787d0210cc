"""Random histories of a name against a small model of it: the real engine, registry and application."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.registry import AdapterRegistry
from loraplex.adapters.rollout import MAX_PREVIOUS, takes_canary
from loraplex.adapters.spec import WEIGHTS_FILE, AdapterSpec
from loraplex.core.errors import AdapterError, UserError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.async_local import LocalAsyncEngine
from loraplex.engine.options import EngineOptions
from loraplex.engine.start import build_core
from loraplex.model.config import load_config
from loraplex.server.adapter_service import AdapterService
from loraplex.server.adapter_startup import start_adapters
from loraplex.server.version_use import Lease

NUM_VERSIONS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("histories")
    base = tiny.save_model(root)
    for number in range(NUM_VERSIONS):
        tiny.save_adapter(root / "adapters" / str(number), base, rank=2, seed=number + 1)
    return root


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalAsyncEngine]:
    options = EngineOptions(model=str(folder), device="cpu", kv_memory_bytes=4 << 20, num_threads=1)
    engine = LocalAsyncEngine(build_core(options))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def specs(folder: Path) -> list[AdapterSpec]:
    shape = load_config(folder).shape
    return [read_adapter(folder / "adapters" / str(number), shape) for number in range(NUM_VERSIONS)]


async def tokens(engine: LocalAsyncEngine, version: str | None, name: str) -> list[int]:
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=[5, 6, 7],
        params=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        adapter=version,
    )
    found: list[int] = []
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            assert output.error is None, output.error
            found += output.token_ids
    return found


@dataclass
class Model:
    """The expected state of a name, in numbers of versions."""

    stable: int | None = None
    canary: tuple[int, float] | None = None
    previous: list[int] = field(default_factory=list)

    def load(self, number: int) -> bool:
        if self.canary is not None:
            return False
        self._move(number)
        return True

    def try_out(self, number: int, share: float) -> bool:
        if self.stable is None or number == self.stable:
            return False
        if self.canary is not None and self.canary[0] != number:
            return False
        self.canary = (number, share)
        return True

    def promote(self) -> bool:
        if self.canary is None:
            return False
        number, self.canary = self.canary[0], None
        self._move(number)
        return True

    def abort(self) -> bool:
        if self.canary is None:
            return False
        self.canary = None
        return True

    def roll_back(self, broken: set[int]) -> bool:
        if self.canary is not None or not self.previous or self.previous[0] in broken:
            return False
        self.stable, *self.previous = self.previous
        return True

    def _move(self, number: int) -> None:
        old, self.stable = self.stable, number
        if old is not None and old != number:
            left = [each for each in self.previous if each not in (old, number)]
            self.previous = [old, *left][:MAX_PREVIOUS]


class World:
    """A service with its registry, the model of it, and requests in flight."""

    def __init__(
        self, root: Path, engine: LocalAsyncEngine, model_folder: Path, expected: dict[str, list[int]]
    ):
        self._root, self._engine, self._model_folder = root, engine, model_folder
        self._texts, self._versions = expected, list(expected)
        self._adapters = root / "adapters"
        shutil.copytree(model_folder / "adapters", self._adapters)
        self.model = Model()
        self.broken: set[int] = set()
        self._held: list[tuple[Lease, str]] = []
        self._num_asked = 0
        self.service = self._open()

    def _open(self) -> AdapterService:
        return AdapterService(
            base_model="base",
            engine=self._engine,
            registry=AdapterRegistry(self._root / "state", "base"),
            shape=load_config(self._model_folder).shape,
            allowed=AllowedPaths([self._adapters]),
        )

    async def close(self) -> None:
        for lease, _ in self._held:
            lease.release()
        self._held.clear()
        if self.service.served():
            await self.service.unload("bot", drain_timeout_s=60.0)
        await self.service.close()
        self.service.registry.close()

    async def _outcome(self, change: Any) -> bool:
        try:
            await change
        except UserError:
            return False
        return True

    async def load(self, number: int) -> None:
        change = self.service.load("bot", str(number), replace=True)
        expected = number not in self.broken and self.model.load(number)
        assert await self._outcome(change) == expected

    async def try_out(self, number: int, share: float) -> None:
        change = self.service.load("bot", str(number), replace=False, canary_share=share)
        expected = number not in self.broken and self.model.try_out(number, share)
        assert await self._outcome(change) == expected

    async def promote(self) -> None:
        assert await self._outcome(self.service.promote("bot")) == self.model.promote()

    async def abort(self) -> None:
        assert await self._outcome(self.service.abort("bot")) == self.model.abort()

    async def roll_back(self) -> None:
        assert await self._outcome(self.service.roll_back("bot")) == self.model.roll_back(self.broken)

    async def break_files(self, number: int) -> None:
        weights = self._adapters / str(number) / WEIGHTS_FILE
        weights.write_bytes(weights.read_bytes()[:-8])
        self.broken.add(number)

    async def mend_files(self) -> None:
        for number in self.broken:
            shutil.copytree(
                self._model_folder / "adapters" / str(number),
                self._adapters / str(number),
                dirs_exist_ok=True,
            )
        self.broken.clear()

    async def restart(self) -> None:
        await self.mend_files()
        for lease, _ in self._held:
            lease.release()
        self._held.clear()
        versions = set().union(*(adapter.versions for adapter in self.service.served()))
        await self.service.close()
        self.service.registry.close()
        for version in versions:
            await self._engine.remove_adapter(version)
        self.service = self._open()
        report = await start_adapters(self.service, [])
        assert report.notes == ()
        await self.ask_all()

    async def ask_all(self) -> None:
        """Load all versions of the name into memory: those on disk still need their files."""
        versions = set().union(*(adapter.versions for adapter in self.service.served()))
        for number, version in enumerate(versions):
            found = await tokens(self._engine, version, f"{self._root.name}-all-{number}")
            assert found == self._texts[version]

    async def ask(self, key: str) -> None:
        if self.model.stable is None:
            return
        await self._answer(self.service.lease("bot", key=key), self._promised(key))

    async def begin(self, key: str) -> None:
        """Begin a request that is answered later, whatever happens to its name until then."""
        if self.model.stable is not None:
            self._held.append((self.service.lease("bot", key=key), self._promised(key)))

    async def end(self) -> None:
        if self._held:
            await self._answer(*self._held.pop(0))

    async def _answer(self, lease: Lease, promised: str) -> None:
        self._num_asked += 1
        try:
            assert lease.version == promised
            found = await tokens(self._engine, lease.version, f"{self._root.name}-{self._num_asked}")
            assert found == self._texts[promised]
        finally:
            lease.release()

    def _promised(self, key: str) -> str:
        model = self.model
        assert model.stable is not None
        if model.canary is not None:
            version = self._versions[model.canary[0]]
            if takes_canary("bot", version, model.canary[1], key):
                return version
        return self._versions[model.stable]

    def check(self) -> None:
        """Check that memory and registry match the model."""
        entry = self.service.registry.get("bot")
        if self.model.stable is None:
            assert self.service.served() == []
            assert entry is None
            return
        [adapter] = self.service.served()
        assert entry is not None
        for version, rollout in ((adapter.version, adapter.rollout), (entry.spec.version, entry.rollout)):
            assert self._versions.index(version) == self.model.stable
            assert [self._versions.index(ref.version) for ref in rollout.previous] == self.model.previous
            canary = rollout.canary
            assert self.model.canary == (
                None if canary is None else (self._versions.index(canary.ref.version), canary.share)
            )


NUMBERS = st.integers(0, NUM_VERSIONS - 1)
KEYS = st.sampled_from([f"user-{number}" for number in range(6)])
LOADS = st.tuples(st.just("load"), NUMBERS)
TRIALS = st.tuples(st.just("try_out"), NUMBERS, st.sampled_from([0.2, 0.5, 0.8]))
STEPS = st.one_of(
    LOADS,
    LOADS,
    TRIALS,
    st.tuples(st.sampled_from(["promote", "abort"])),
    st.tuples(st.just("roll_back")),
    st.tuples(st.just("roll_back")),
    st.tuples(st.sampled_from(["end", "restart", "mend_files"])),
    st.tuples(st.just("break_files"), NUMBERS),
    st.tuples(st.just("begin"), KEYS),
)


@settings(max_examples=examples(5, 12), deadline=None, derandomize=True)
@given(first=NUMBERS, steps=st.lists(STEPS, min_size=12, max_size=20))
def test_an_answer_is_of_the_version_that_was_promised(
    folder: Path, engine: LocalAsyncEngine, specs: list[AdapterSpec], first: int, steps: list[tuple[Any, ...]]
) -> None:
    async def scenario(root: Path) -> None:
        world = World(root, engine, folder, expected)
        try:
            await world.load(first)
            await world.ask_all()
            for name, *arguments in steps:
                await getattr(world, name)(*arguments)
                world.check()
                for number in range(3):
                    await world.ask(f"user-{number}")
        finally:
            await world.close()

    expected = asyncio.run(_expected(engine, specs))
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(scenario(Path(root)))


async def _expected(engine: LocalAsyncEngine, specs: list[AdapterSpec]) -> dict[str, list[int]]:
    """Return what each version answers, in the order of their numbers."""
    if not _answers:
        for spec in specs:
            await engine.add_adapter(spec)
            _answers[spec.version] = await tokens(engine, spec.version, f"expected-{spec.version}")
            await engine.remove_adapter(spec.version)
        assert len({tuple(each) for each in _answers.values()}) == NUM_VERSIONS
    return _answers


_answers: dict[str, list[int]] = {}


class Meddler(LocalAsyncEngine):
    """Changes an adapter's files right after they were hashed and added."""

    harm = ""

    async def add_adapter(self, spec: AdapterSpec) -> None:
        await super().add_adapter(spec)
        weights = spec.path / WEIGHTS_FILE
        if self.harm == "cut short":
            weights.write_bytes(weights.read_bytes()[:-8])
        elif self.harm == "other bytes":
            weights.write_bytes(weights.read_bytes()[:-8] + b"12345678")
        elif self.harm == "gone":
            weights.unlink()


@pytest.mark.parametrize("harm", ["cut short", "other bytes", "gone"])
@pytest.mark.parametrize("share", [None, 0.5])
def test_files_that_change_between_their_check_and_their_read_fail_the_stage(
    folder: Path, tmp_path: Path, harm: str, share: float | None
) -> None:
    shutil.copytree(folder / "adapters", tmp_path / "adapters")
    options = EngineOptions(model=str(folder), device="cpu", kv_memory_bytes=4 << 20, num_threads=1)
    engine = Meddler(build_core(options))

    async def scenario() -> None:
        registry = AdapterRegistry(tmp_path / "state", "base")
        service = AdapterService(
            base_model="base",
            engine=engine,
            registry=registry,
            shape=load_config(folder).shape,
            allowed=AllowedPaths([tmp_path / "adapters"]),
        )
        old = await service.load("bot", "0", replace=False)
        before = await tokens(engine, old.version, "before")
        engine.harm = harm
        with pytest.raises(
            AdapterError, match=f"'bot' stays with version {old.version[:12]}: .*not available"
        ):
            await service.load("bot", "1", replace=True, canary_share=share)
        engine.harm = ""
        entry = registry.get("bot")
        assert entry is not None
        assert service.served() == [old]
        assert (entry.spec.version, entry.rollout.canary) == (old.version, None)
        assert await tokens(engine, service.lease("bot", key="k").version, "after") == before
        while len((await engine.stats()).adapters) > 1:  # the refused version is removed
            await asyncio.sleep(0)
        await service.close()
        registry.close()

    try:
        asyncio.run(scenario())
    finally:
        engine.close()
