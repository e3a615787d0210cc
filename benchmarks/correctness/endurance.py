"""Section `endurance`: thousands of steps while adapters are loaded, evicted, removed and added anew."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from benchmarks.correctness.check import Check, Setting, holds, within
from benchmarks.correctness.comparing import alone_check
from benchmarks.correctness.driving import TIME_LIMIT_S
from benchmarks.correctness.random_engines import build, distinct_specs
from benchmarks.device_memory import release
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape

SHAPE: Final = "tiny"
RANKS: Final = (8, 64, 128, 256, 512)
ROOM: Final = 0.25
"""The engine's memory, as a part of what all adapters would take."""
ALONE_KV_BYTES: Final = 1 << 28
IN_FLIGHT: Final = 24
CANCEL_CHANCE, REPLACE_CHANCE = 0.01, 0.02
"""At every step: that a request is cancelled, that an adapter is removed and another added."""
GREEDY: Final = {"temperature": 0.0}
WATCH_EVERY: Final = 60
"""The number of requests from one that is watched to the next: the first of every second round of settings,
which is a greedy one."""
TIE: Final = 1e-3
SETTINGS: Final[Sequence[dict[str, Any]]] = (
    GREEDY,
    GREEDY,
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    num_adapters: int
    ranks: tuple[int, ...]
    first_steps: int
    num_steps: int
    check_every: int


def endurance(setting: Setting) -> list[Check]:
    plan = (
        _Plan(num_adapters=12, ranks=(1, 8, 64), first_steps=30, num_steps=150, check_every=10)
        if setting.tiny
        else _Plan(num_adapters=256, ranks=RANKS, first_steps=500, num_steps=10_000, check_every=50)
    )
    specs = distinct_specs("first", SHAPE, num_adapters=plan.num_adapters, ranks=plan.ranks, modules="all")
    num_bytes = sum(spec.num_params for spec in specs) * torch.float32.itemsize
    engine = build(SHAPE, setting, int(num_bytes * ROOM), torch.float32, distinct=True)
    for spec in specs:
        engine.add_adapter(spec)
    engine.warm_up()  # graphs captured on the way would look like a leak
    traffic = _Traffic(engine=engine, specs=specs, check_every=plan.check_every)
    traffic.run(plan.first_steps)
    before = traffic.settle()
    traffic.run(plan.num_steps - plan.first_steps)
    after = traffic.settle()
    stats = engine.stats()
    engine.close()
    del engine, traffic.engine
    release()
    kept_specs = {one.spec.version: one.spec for one in traffic.kept if one.spec is not None}
    kept_bytes = sum(spec.num_params for spec in kept_specs.values()) * torch.float32.itemsize
    return [
        # With memory for everything, nothing is moved or evicted. All of a GPU's would be millions of pages
        # of this small shape, and every check of the books a minute.
        alone_check(
            build(SHAPE, setting, kept_bytes + ALONE_KV_BYTES, torch.float32, distinct=True),
            "greedy requests of those",
            [(one.request, one.spec, one.token_ids) for one in traffic.kept],
            TIE,
        ),
        holds(
            "answers",
            "every request ends: by its length, or because it was cancelled",
            traffic.num_bad == 0 and not traffic.live,
            requests=traffic.num_requests,
            cancelled=traffic.num_cancelled,
            failed=traffic.num_bad,
            errors=sorted(traffic.errors)[:3],
            steps=traffic.num_steps,
            integrity_checks=traffic.num_checks,
        ),
        holds(
            "adapters",
            "come and go all the time: more loads than versions",
            traffic.num_loads > plan.num_adapters,
            registered=plan.num_adapters,
            replaced=traffic.num_replaced,
            loads=traffic.num_loads,
            registered_bytes=num_bytes,
            budget_bytes=stats.device_arena_bytes or stats.host_adapter_budget_bytes,
        ),
        within(
            "device memory",
            f"bytes allocated after {plan.num_steps} steps beyond those after {plan.first_steps}, "
            "idle and without adapters both times",
            max(0, after - before),
            0,
            allocated_bytes=after,
        ),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A greedy request and what came of it, to be looked at again."""

    request: EngineRequest
    spec: AdapterSpec | None
    token_ids: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Traffic:
    """A constant number of requests of all kinds, and the counts of what became of them."""

    engine: Engine
    specs: list[AdapterSpec]
    check_every: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    live: set[str] = field(default_factory=set)
    kept: list[_Kept] = field(default_factory=list)
    watched: dict[str, _Kept] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)
    num_steps: int = 0
    num_checks: int = 0
    num_requests: int = 0
    num_cancelled: int = 0
    num_replaced: int = 0
    num_loads: int = 0
    num_bad: int = 0

    def run(self, num_steps: int) -> None:
        """Steps in which something was computed; waiting for a load is none."""
        computed = self.engine.stats().num_steps
        while self.engine.stats().num_steps - computed < num_steps:
            for _ in range(min(self.check_every, num_steps)):
                while len(self.live) < IN_FLIGHT:
                    self._add_request()
                if self.rng.random() < REPLACE_CHANCE:
                    self._replace_adapter()
                if self.rng.random() < CANCEL_CHANCE:
                    self._cancel()
                self._step()
            self._check()
        self.num_steps += self.engine.stats().num_steps - computed

    def settle(self) -> int:
        """Let all requests end, take all adapters out and put them back; what was allocated in between."""
        started = time.monotonic()
        while self.engine.has_work():
            assert time.monotonic() - started < TIME_LIMIT_S, f"{len(self.live)} requests do not end"
            self._step()
        self._check()
        self.num_loads += self._loads()
        for spec in self.specs:
            self.engine.remove_adapter(spec.version)
        self._check()
        release()
        allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        for spec in self.specs:
            self.engine.add_adapter(spec)
        return allocated

    def _loads(self) -> int:
        return sum(adapter.loads for adapter in self.engine.stats().adapters)

    def _step(self) -> None:
        for output in self.engine.step():
            self._land(output)
        self.engine.take_removed_adapters()

    def _land(self, output: EngineOutput) -> None:
        watched = self.watched.get(output.request_id)
        if watched is not None:
            watched.token_ids.extend(output.token_ids)
        if output.finish_reason is None:
            return
        if watched is not None and output.finish_reason is FinishReason.LENGTH:
            self.kept.append(self.watched.pop(output.request_id))
        if output.request_id not in self.live or output.finish_reason is not FinishReason.LENGTH:
            self.num_bad += 1
            self.errors.add(output.error or f"ended by {output.finish_reason}")
        self.live.discard(output.request_id)

    def _check(self) -> None:
        self.engine.take_removed_adapters()
        self.engine.check_integrity()
        self.num_checks += 1

    def _add_request(self) -> None:
        rng, vocab_size = self.rng, config_of_shape(SHAPE).shape.vocab_size
        request_id = str(self.num_requests)
        # Some adapters are asked for all the time, most of them now and then.
        spec = self.specs[min(int(rng.paretovariate(0.5)) - 1, rng.randrange(len(self.specs)))]
        settings = SETTINGS[self.num_requests % len(SETTINGS)]
        adapted = rng.random() >= 0.1
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 100))],
            params=SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **settings),
            adapter=spec.version if adapted else None,
        )
        self.engine.add_request(request)
        self.live.add(request_id)
        if settings == GREEDY and self.num_requests % WATCH_EVERY == 0:
            self.watched[request_id] = _Kept(request=request, spec=spec if adapted else None)
        self.num_requests += 1

    def _cancel(self) -> None:
        request_id = self.rng.choice(sorted(self.live))
        self.engine.cancel(request_id)
        self.live.discard(request_id)
        self.watched.pop(request_id, None)
        self.num_cancelled += 1

    def _replace_adapter(self) -> None:
        """Requests in flight keep the old version; it goes with the last of them."""
        place = self.rng.randrange(len(self.specs))
        old = self.specs[place]
        self.num_replaced += 1
        self.specs[place] = replace(old, version=f"new-{self.num_replaced:06d}")
        self.engine.remove_adapter(old.version)
        self.engine.add_adapter(self.specs[place])
