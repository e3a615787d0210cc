"""A core without a model, for tests of everything around the core; importable by a child process.

A prompt's first token decides: a magic one misbehaves, any other is echoed as `tokens_of` defines.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import loraplex
from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.core import errors
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.options import EngineOptions

FACTORY = "fake_core:build_core"
CHILD_ENV = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(loraplex.__file__).parents[1])])
}

EXIT, KILL, RAISE, HANG, ENDLESS, SILENT, REJECT, TOO_LARGE, FAIL = range(900_001, 900_010)
UNWANTED_VERSION = "unwanted"


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
    """`start_fault` happens at a start when `fault_marker` is None or an existing file. `preparations`: how
    often the core has to prepare, each time until a file is gone."""

    num_kv_blocks: int = 77
    start_fault: str = ""
    fault_marker: Path | None = None
    phases: tuple[str, ...] = ()
    preparations: tuple[Path, ...] = ()


def tokens_of(request: EngineRequest) -> tuple[int, ...]:
    """Return the fake core's answer."""
    return tuple(_token_of(request, index) for index in range(request.params.max_tokens or 1))


def _token_of(request: EngineRequest, index: int) -> int:
    return (request.prompt_token_ids[0] * 31 + index) % 50_000


def request_of(
    request_id: str, prompt: int = 5, max_tokens: int = 3, adapter: str | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[prompt],
        params=SamplingParams(max_tokens=max_tokens),
        adapter=adapter,
    )


def spec_of(version: str) -> AdapterSpec:
    module = LoraModule(layer=0, module="q_proj", rank=4, scale=2.0, a_name="a", b_name="b")
    return AdapterSpec(version=version, path=Path("/adapters") / version, modules=(module,), num_params=64)


@dataclass
class _Running:
    request: EngineRequest
    num_done: int = 0


@dataclass
class FakeCore:
    options: FakeOptions
    max_model_len: int = 512
    running: dict[str, _Running] = field(default_factory=dict)
    adapters: dict[str, AdapterSpec] = field(default_factory=dict)
    removing: set[str] = field(default_factory=set)
    overtaken: list[str] = field(default_factory=list)
    to_prepare: list[Path] = field(default_factory=list)
    tenants: tuple[TenantPolicy, ...] = ()
    num_steps: int = 0

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[0] == REJECT:
            raise errors.InvalidRequestError("this prompt is not liked", param="prompt")
        if request.prompt_token_ids[0] == TOO_LARGE:
            raise errors.CapacityError("this prompt never fits")
        if request.adapter is not None and request.adapter not in self.adapters.keys() - self.removing:
            raise errors.UnknownModelError(f"no adapter {request.adapter}")
        self.running[request.request_id] = _Running(request, len(request.output_token_ids))

    def cancel(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def add_adapter(self, spec: AdapterSpec) -> None:
        if spec.version == UNWANTED_VERSION:
            raise errors.AdapterFormatError("rank must be positive", field="r")
        assert isinstance(spec.path, Path)
        self.adapters[spec.version] = spec
        if spec.version in self.removing:
            self.removing.remove(spec.version)
            self.overtaken.append(spec.version)

    def remove_adapter(self, version: str) -> None:
        if version not in self.adapters:
            raise errors.UnknownModelError(f"no adapter {version}")
        self.removing.add(version)

    @property
    def num_required(self) -> int:
        return len(self.to_prepare)

    def prepare(self) -> bool:
        """Prepare, slowly if configured: each preparation waits until the file that it names is removed."""
        if not self.to_prepare:
            return False
        while self.to_prepare[0].exists():
            time.sleep(0.005)
        del self.to_prepare[0]
        return True

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        self.tenants = tuple(policies)

    def stage_adapter(self, version: str) -> None:
        assert version in self.adapters

    def take_removed_adapters(self) -> list[str]:
        in_use = {one.request.adapter for one in self.running.values()}
        removed = sorted(self.removing - in_use)
        for version in removed:
            self.removing.remove(version)
            del self.adapters[version]
        overtaken, self.overtaken = self.overtaken, []
        return overtaken + removed

    def has_work(self) -> bool:
        return any(one.request.prompt_token_ids[0] != SILENT for one in self.running.values())

    def step(self) -> list[EngineOutput]:
        self.num_steps += 1
        outputs = []
        for request_id, one in list(self.running.items()):
            prompt = one.request.prompt_token_ids[0]
            _misbehave(prompt)
            if prompt == SILENT:
                continue
            output = self._next_output(request_id, one)
            outputs.append(output)
            if output.finish_reason is not None:
                del self.running[request_id]
        return outputs

    def _next_output(self, request_id: str, one: _Running) -> EngineOutput:
        if one.request.prompt_token_ids[0] == FAIL:
            return EngineOutput(
                request_id=request_id, finish_reason=FinishReason.ERROR, error="lost its adapter"
            )
        if one.request.prompt_token_ids[0] == ENDLESS:
            return EngineOutput(request_id=request_id, token_ids=(7,))
        token_id = _token_of(one.request, one.num_done)
        one.num_done += 1
        reason = FinishReason.LENGTH if one.num_done == (one.request.params.max_tokens or 1) else None
        return EngineOutput(request_id=request_id, token_ids=(token_id,), finish_reason=reason)

    def stats(self) -> EngineStats:
        users = [one.request.adapter for one in self.running.values()]
        return EngineStats(
            num_running=len(self.running),
            num_waiting=round(sum(each.share for each in self.tenants)),  # for tests to see
            num_kv_blocks=self.options.num_kv_blocks,
            num_steps=self.num_steps,
            adapters=tuple(
                AdapterStats(
                    version=version, tier="disk", num_bytes=0, in_flight=users.count(version), loads=0
                )
                for version in sorted(self.adapters)
            ),
        )

    def close(self) -> None:
        pass


def _misbehave(prompt: int) -> None:
    if prompt == EXIT:
        os._exit(9)
    if prompt == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if prompt == RAISE:
        raise RuntimeError("the device fell off\nand more lines")
    if prompt == HANG:
        threading.Event().wait()


def build_core(options: FakeOptions, progress: Callable[[str, float | None], None]) -> FakeCore:
    for phase in options.phases:
        progress(phase, 0.5)
    fault = options.start_fault
    if options.fault_marker is not None and not options.fault_marker.exists():
        fault = ""
    if fault == "model":
        raise errors.ModelError("this model has no layers")
    if fault == "bug":
        raise KeyError("lm_head")
    if fault == "exit":
        os._exit(7)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    return FakeCore(options, to_prepare=list(options.preparations))


def build_without_progress(options: FakeOptions) -> FakeCore:
    return FakeCore(options)


LOADING, CAPTURING, BEGUN = "loading", "capturing", "begun-"


def build_gated(options: EngineOptions, progress: Callable[[str, float | None], None]) -> FakeCore:
    """A core whose start is controlled by tests, with files in the model's folder: it loads until one is
    removed, and captures until the other is. Fails if there is none to begin with."""
    folder = Path(options.model)
    if not (folder / LOADING).exists():
        raise errors.ModelError("this model has no layers")
    progress("reading weights", 0.25)
    while (folder / LOADING).exists():
        time.sleep(0.005)
    return FakeCore(FakeOptions(), to_prepare=[folder / CAPTURING])


def build_held(options: EngineOptions, progress: Callable[[str, float | None], None]) -> FakeCore:
    """A core that loads while a file in the model's folder exists. It leaves its process id there."""
    folder = Path(options.model)
    (folder / f"{BEGUN}{os.getpid()}").touch()
    while (folder / LOADING).exists():
        time.sleep(0.005)
    return FakeCore(FakeOptions())
