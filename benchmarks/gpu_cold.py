"""Every published figure of cold starts on a GPU.

    python -m benchmarks.gpu_cold SECTION... --workloads DIR

SECTION: profile, idle, idle_assist, large, burst, setups, syncs, signal, timeline. Writes
results/gpu_cold.json; sections that are not named keep what they hold. `profile` comes first on a
machine that has none: `auto` decides by it. Each section runs in a process of its own. `--tiny` tries the
script itself on a CPU, where what needs a GPU is left out, and writes nothing unless --out says where.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import sources
from benchmarks.trace_lanes import calls_within
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.cold_scenarios import MakeSpecs, burst, compare_policies, forget, measure_idle
from loraplex.bench.distribution import Distribution
from loraplex.bench.engine_scenarios import run_dry
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine
from loraplex.workload.jsonl import WorkloadRequest, read_workload

RESULTS = Path(__file__).parent / "results"
QKV, ALL = "q,k,v", "all"
BURST: Final = 32
ROUND_TRIPS: Final = 1000
STEP: Final = "the step that is looked at"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device, the model, and the sizes of requests and adapters."""

    device: str = "cuda"
    shape: str = "llama-2-7b"
    vocab_size: int = 32000
    prompt_tokens: int = 128
    num_adapters: int = 20
    large_rank: int = 256
    workloads: Path = Path("workloads")

    @property
    def policies(self) -> list[ColdStart]:
        """The policies that need no adapter files."""
        if self.device == "cuda":
            return [policy for policy in ColdStart if policy is not ColdStart.CPU_ASSIST]
        return [ColdStart.CACHED, ColdStart.ON_DEMAND, ColdStart.OVERLAP]


TINY: Final = Setting(
    device="cpu", shape="tiny", vocab_size=256, prompt_tokens=8, num_adapters=2, large_rank=16
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A setup of the paper's evaluation: 200 adapters and a rate, every request on a cold adapter.
    `policies`: those compared with `cached`; None for all."""

    name: str
    rank: int
    requests_per_s: float
    policies: tuple[ColdStart, ...] | None = None


NUM_ADAPTERS: Final = 200
NUM_WARM_UP: Final = 20
"""Requests before those that count: the first ones of an engine may take longer."""
SETUPS: Final = (
    Setup(name="S1", rank=32, requests_per_s=9, policies=(ColdStart.AUTO,)),
    Setup(name="S2", rank=64, requests_per_s=6, policies=(ColdStart.AUTO,)),
    Setup(name="S3", rank=64, requests_per_s=9),
)
WORKLOAD: Final = ("poisson-9rps-30s", 9.0)
"""The file that all setups are made from, and its rate in requests per second."""


def profile(setting: Setting) -> dict[str, Any]:
    """Run `loraplex profile`, and store the profile where engines look for it."""
    from loraplex.bench.profile_scenarios import ProfileOptions, profile_machine
    from loraplex.engine.profile_subject import profile_path
    from loraplex.model.shapes import config_of_shape
    from loraplex.perf.profile_json import profile_to_json, write_profile

    options = ProfileOptions(
        config=config_of_shape(setting.shape), device=setting.device, dtype=dtype_of(setting)
    )
    found = profile_machine(options, lambda phase, done: None)
    if setting.device == "cuda":
        write_profile(profile_path(found.subject), found)
    document: dict[str, Any] = json.loads(profile_to_json(found))
    return document


def idle(setting: Setting) -> dict[str, Any]:
    """Measure the first token of one request, with its adapter on disk (in the page cache), in host memory
    and on the device."""
    return first_tokens(setting, setting.policies)


def idle_assist(setting: Setting) -> dict[str, Any]:
    """Measure the same with the policy that needs CPU workers."""
    return first_tokens(setting, [ColdStart.CPU_ASSIST], cpu_workers=workers())


def first_tokens(setting: Setting, policies: Sequence[ColdStart], **options: Any) -> dict[str, Any]:
    engine = build(setting, from_files=True, **options)
    with saved_adapters(setting, setting.num_adapters + 1) as saved:
        found = measure_idle(
            engine,
            policies,
            lambda name, count: saved[:count],
            starts=("disk", "host") if setting.device == "cuda" else ("disk",),
            num_adapters=setting.num_adapters,
            prompt_tokens=setting.prompt_tokens,
            vocab_size=setting.vocab_size,
        )
    engine.close()
    return {str(policy): figures(times) for policy, times in found.items()}


def large(setting: Setting) -> dict[str, Any]:
    """Measure the same with adapters of a gigabyte and more, in host memory."""
    engine = build(setting)
    found = measure_idle(
        engine,
        setting.policies,
        maker(setting, setting.large_rank, ALL),
        starts=("host",) if setting.device == "cuda" else ("disk",),
        num_adapters=max(setting.num_adapters // 4, 1),
        prompt_tokens=setting.prompt_tokens,
        vocab_size=setting.vocab_size,
    )
    engine.close()
    return {str(policy): figures(times) for policy, times in found.items()}


def burst_of_32(setting: Setting) -> dict[str, Any]:
    engine = build(setting)
    found = burst(
        engine,
        setting.policies,
        maker(setting, 64, QKV),
        size=BURST,
        prompt_tokens=setting.prompt_tokens,
        vocab_size=setting.vocab_size,
    )
    engine.close()
    return {str(policy): rounded(times) for policy, times in found.items()}


def setups(setting: Setting) -> dict[str, Any]:
    engine, found = build(setting), {}
    first = SETUPS[0]
    few = requests_of(setting, first)[:NUM_WARM_UP]
    compare_policies(engine, [], few, maker(setting, first.rank, QKV), setting.vocab_size)  # not counted
    for setup in SETUPS:
        compared = compare_policies(
            engine,
            [policy for policy in setting.policies if setup.policies is None or policy in setup.policies],
            requests_of(setting, setup),
            maker(setting, setup.rank, QKV),
            setting.vocab_size,
        )
        found[setup.name] = {
            "rank": setup.rank,
            "requests_per_s": setup.requests_per_s,
            "policies": {str(policy): one.as_json() for policy, one in compared.items()},
        }
        print(setup.name, {str(policy): one.overheads for policy, one in compared.items()}, flush=True)
    engine.close()
    return found


def requests_of(setting: Setting, setup: Setup) -> list[WorkloadRequest]:
    """Return the first of the published arrivals, one on every adapter, stretched to the setup's rate."""
    name, rate = WORKLOAD
    requests = read_workload(setting.workloads / f"{name}.jsonl")
    return [
        replace(request, arrival_s=request.arrival_s * rate / setup.requests_per_s)
        for request in requests[:NUM_ADAPTERS]
    ]


def syncs(setting: Setting) -> dict[str, Any]:
    """Count how often the host waits for the device in the step that runs a prompt on a cold adapter, from
    the start of its load to the end of the launch."""
    from loraplex.bench.random_engine import register

    engine, found = build(setting, from_files=True, cpu_workers=workers()), {}
    with saved_adapters(setting, 3, setting.large_rank) as saved:
        for policy, temperature in (
            (ColdStart.PIPELINED, 0.0),
            (ColdStart.PIPELINED, 1.0),
            (ColdStart.CPU_ASSIST, 0.0),
        ):
            engine.choose_cold_start(policy)
            versions = register(engine, saved)
            found[f"{policy}, sampled" if temperature > 0 else str(policy)] = watched_calls(
                engine, versions, setting, temperature
            )
            forget(engine, versions)
    engine.close()
    assert found[str(ColdStart.CPU_ASSIST)]["assisted_products"] > 0, "workers had no part in the step"
    return found


def watched_calls(
    engine: Engine, versions: Sequence[str], setting: Setting, temperature: float
) -> dict[str, Any]:
    """Return the CUDA calls of the first step on the last of these versions, after requests on the others
    have compiled everything."""
    import torch
    from torch.profiler import record_function

    from loraplex.bench.engine_scenarios import new_request
    from loraplex.engine.cuda.cpu_assist import AssistedSpan, AssistedTasks, CpuAssist

    def request(number: int, version: str) -> EngineRequest:
        made = new_request(
            f"{number}", setting.prompt_tokens, 1, version, vocab_size=setting.vocab_size, seed=number
        )
        return replace(made, params=replace(made.params, temperature=temperature))

    for number, version in enumerate(versions[:-1]):
        engine.add_request(request(number, version))
        run_dry(engine)
    submitted, submit = list[AssistedTasks](), CpuAssist.submit

    def noted(assist: CpuAssist, spans: Sequence[AssistedSpan]) -> AssistedTasks | None:
        tasks = submit(assist, spans)
        submitted.extend([] if tasks is None else [tasks])
        return tasks

    CpuAssist.submit = noted  # type: ignore[method-assign,assignment]
    engine.add_request(request(len(versions), versions[-1]))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler, record_function(STEP):
        engine.step()
    CpuAssist.submit = submit  # type: ignore[method-assign]
    assert engine.stats().num_running == 1, "the step that was looked at did not run the prompt"
    run_dry(engine)
    num_products = sum(tasks.last_ticket - tasks.first_ticket + 1 for tasks in submitted)
    names = calls_within(STEP, profiler.events())
    calls = {name: names.count(name) for name in sorted(set(names))}
    waits = sum(count for name, count in calls.items() if "Synchronize" in name)
    return {"host_synchronisations": waits, "assisted_products": num_products, "calls": calls}


def signal(setting: Setting) -> dict[str, Any]:
    """Return the time of a step's signal to CPU workers and back, with next to nothing to compute."""
    from benchmarks.assist_signal import round_trips_us

    times_us = round_trips_us(workers(), ROUND_TRIPS)
    found = Distribution.of(times_us[ROUND_TRIPS // 10 :])
    assert found is not None
    return {"workers": workers(), "round_trip_us": rounded(found)}


def timeline(setting: Setting) -> dict[str, Any]:
    """Trace the device from the arrival of a request on a cold adapter to its first token while others
    decode, policy by policy; `benchmarks.draw_timelines` draws it. On a CPU there is no device to trace."""
    from benchmarks.cold_timeline import NUM_ROUNDS, Scene, record_policies

    on_gpu, rank = setting.device == "cuda", setting.large_rank
    engine = build(setting, from_files=True, cpu_workers=workers() if on_gpu else None)
    scene = Scene(prompt_tokens=setting.prompt_tokens, vocab_size=setting.vocab_size)
    with saved_adapters(setting, 1) as resident, saved_adapters(setting, NUM_ROUNDS, rank) as cold:
        policies = list(ColdStart) if on_gpu else setting.policies
        found = record_policies(engine, policies, resident[0], cold, scene)
    engine.close()
    return {"rank": rank, "modules": QKV} | asdict(scene) | {"policies": found}


SECTIONS: Final[dict[str, Callable[[Setting], dict[str, Any]]]] = {
    "profile": profile,
    "idle": idle,
    "idle_assist": idle_assist,
    "large": large,
    "burst": burst_of_32,
    "setups": setups,
    "syncs": syncs,
    "signal": signal,
    "timeline": timeline,
}
ON_A_GPU_ALONE: Final = ("idle_assist", "syncs", "signal")


@contextmanager
def saved_adapters(setting: Setting, count: int, rank: int | None = None) -> Iterator[list[AdapterSpec]]:
    """Save random adapters in a temporary folder, which is deleted afterwards."""
    from loraplex.bench.adapter_files import save_random_adapters
    from loraplex.core.modules import module_names
    from loraplex.model.shapes import config_of_shape

    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        yield save_random_adapters(
            Path(folder),
            config_of_shape(setting.shape).shape,
            dtype_of(setting),
            count=count,
            rank=rank or (64 if setting.device == "cuda" else 4),
            modules=module_names(QKV),
        )


def workers() -> int:
    from loraplex.engine.machine import max_threads
    from loraplex.perf.assist_split import default_num_workers

    return default_num_workers(max_threads())


def build(setting: Setting, **options: Any) -> Engine:
    from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine

    engine = build_random_engine(
        RandomEngineOptions(shape=setting.shape, device=setting.device, dtype=dtype_of(setting), **options)
    )
    engine.add_adapter(maker(setting, 64 if setting.device == "cuda" else 4, QKV)("graphs", 1)[0])
    engine.warm_up()
    return engine


def dtype_of(setting: Setting) -> Any:
    import torch

    return torch.bfloat16 if setting.device == "cuda" else torch.float32


def maker(setting: Setting, rank: int, modules: str) -> MakeSpecs:
    from loraplex.bench.random_engine import random_specs

    return lambda name, count: random_specs(
        name, setting.shape, num_adapters=count, ranks=[rank], modules=modules
    )


def figures(times: dict[str, Distribution]) -> dict[str, dict[str, float]]:
    return {where: rounded(distribution) for where, distribution in times.items()}


def rounded(distribution: Distribution) -> dict[str, float]:
    return {key: round(value, 3) for key, value in asdict(distribution).items()}


def in_process(function: Callable[[], Any]) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=tuple(SECTIONS))
    parser.add_argument("--workloads", type=Path, default=Path("workloads"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    setting = replace(TINY if args.tiny else Setting(), workloads=args.workloads)
    if args.tiny and (beyond := [name for name in args.sections if name in ON_A_GPU_ALONE]):
        parser.error(f"{', '.join(beyond)}: only on a GPU")
    if not args.tiny:
        import torch

        if not torch.cuda.is_available():
            parser.error("this benchmark needs a GPU; --tiny tries it on a CPU")
    out = args.out or (None if args.tiny else RESULTS / "gpu_cold.json")
    document = json.loads(out.read_text()) if out is not None and out.is_file() else {}
    for name in args.sections:
        started = time.perf_counter()
        found = in_process(partial(SECTIONS[name], setting))
        here = in_process(partial(environment, ENGINE_PACKAGES))
        document[name] = here | {
            "sources": sources.fingerprints("gpu_cold.json", name),
            "shape": setting.shape,
            "results": found,
        }
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - started:.0f} s {json.dumps(found)[:400]}", flush=True)


if __name__ == "__main__":
    main()
