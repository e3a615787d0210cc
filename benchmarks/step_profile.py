"""Profile steps on the GPU: the time of kernels by kind, and the time in which none runs.

    python -m benchmarks.step_profile             # two minutes on an H200

Writes results/step_profile.json. Kernels are timed by torch's profiler (CUPTI), including those of captured
graphs, over steps that an engine runs as in serving; kernels that run concurrently both count, so that
kinds may add up to more than the time of the step.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import sources
from benchmarks.gpu_engine import ALL, GQA_SHAPE, QKV, SHAPE, VOCAB_SIZE, build, here, in_process, register
from loraplex.core.whole_file import write_whole
from loraplex.engine.core import Engine

FILE: Final = "step_profile.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
KINDS: Final = (
    # (part of a kernel's name, its kind); the first match counts
    ("_shrink", "LoRA shrink"),
    ("_expand", "LoRA expand"),
    ("_gather", "LoRA, other"),
    ("_decode_kernel", "attention, decode"),
    ("_combine_kernel", "attention, decode"),
    ("_prefill_kernel", "attention, prompts"),
    ("greedy", "tokens"),
    ("pick", "tokens"),
    ("rope", "rope and cache"),
    ("norm", "norms"),
    ("silu", "silu"),
    ("nvjet", "matrix products"),
    ("gemm", "matrix products"),
    ("cutlass", "matrix products"),
    ("splitK", "matrix products"),
    ("Memcpy", "copies"),
    ("Memset", "copies"),
)
NUM_STEPS: Final = 40
NUM_PROMPTS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A profiled case: `batch` requests of `prompt_tokens` each, on this many adapters of a rank and on these
    linears. `is_prompt`: the steps that compute the prompts; otherwise those that decode. `joins`: in each of
    those, a new request's prompt is computed as well."""

    name: str
    shape: str
    batch: int
    prompt_tokens: int
    num_adapters: int = 0
    rank: int = 64
    modules: str = QKV
    is_prompt: bool = False
    joins: bool = False


SCENES: Final = (
    Scene(name="decode, base", shape=GQA_SHAPE, batch=256, prompt_tokens=128),
    Scene(
        name="decode, 256 of rank 16 on all linears", shape=GQA_SHAPE, batch=256, prompt_tokens=128,
        num_adapters=256, rank=16, modules=ALL,
    ),
    Scene(name="prompt, base", shape=GQA_SHAPE, batch=1, prompt_tokens=8000, is_prompt=True),
    Scene(name="decode, base", shape=SHAPE, batch=256, prompt_tokens=128),
    Scene(name="decode, 32 of rank 64", shape=SHAPE, batch=32, prompt_tokens=128, num_adapters=32),
    Scene(name="decode, base", shape=SHAPE, batch=144, prompt_tokens=128),
    Scene(name="decode, 100 of rank 64", shape=SHAPE, batch=144, prompt_tokens=128, num_adapters=100),
    Scene(name="decode and a prompt, base", shape=SHAPE, batch=144, prompt_tokens=128, joins=True),
    Scene(
        name="decode and a prompt, 100 of rank 64", shape=SHAPE, batch=144, prompt_tokens=128,
        num_adapters=100, joins=True,
    ),
    Scene(name="prompt, base", shape=SHAPE, batch=1, prompt_tokens=2048, is_prompt=True),
    Scene(name="prompt, rank 64", shape=SHAPE, batch=1, prompt_tokens=2048, num_adapters=1, is_prompt=True),
)  # fmt: skip


def measure(shape: str) -> list[dict[str, Any]]:
    engine = build(shape)
    return [_measure(engine, scene) for scene in SCENES if scene.shape == shape]


def _measure(engine: Engine, scene: Scene) -> dict[str, Any]:
    from loraplex.bench.engine_scenarios import bring_in, new_request, run_dry

    modules = f"{scene.rank}-{scene.modules}"
    versions = register(engine, modules, scene.num_adapters, (scene.rank,), scene.modules, shape=scene.shape)
    bring_in(engine, versions, VOCAB_SIZE)
    engine.warm_up()

    def add(seed: int, output_tokens: int, count: int = scene.batch) -> None:
        for index in range(count):
            engine.add_request(
                new_request(
                    f"{scene.name}-{seed}-{index}", scene.prompt_tokens, output_tokens,
                    versions[index % len(versions)] if versions else None,
                    vocab_size=VOCAB_SIZE, seed=seed * scene.batch + index + scene.prompt_tokens * 1000,
                )
            )  # fmt: skip

    if scene.is_prompt:
        add(0, 1)
        run_dry(engine)

        def prompts() -> int:
            for seed in range(1, NUM_PROMPTS + 1):
                add(seed, 1)
                run_dry(engine)
            return NUM_PROMPTS

        row = _profiled(prompts)
    else:
        add(0, 3 * NUM_STEPS)
        decoded = 0
        while decoded < NUM_STEPS:
            decoded += len(engine.step()) == scene.batch

        def decodes() -> int:
            for number in range(1, NUM_STEPS + 1):
                if scene.joins:
                    add(number, 1, count=1)
                engine.step()
            return NUM_STEPS

        row = _profiled(decodes)
        run_dry(engine)
    found = {"shape": scene.shape, "name": scene.name, "batch": scene.batch, "tokens": scene.prompt_tokens}
    print(
        json.dumps({**found, **{key: row[key] for key in ("step_ms", "idle_ms", "by_kind_ms")}}), flush=True
    )
    return found | row


def _profiled(run: Callable[[], int]) -> dict[str, Any]:
    """Run something that returns how often it was done, and return the figures of one repetition."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        count = run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    busy_us, until_us = 0.0, spans[0][0]
    for start_us, end_us, name in spans:
        by_kind[_kind(name)] += end_us - start_us
        by_name[name] += end_us - start_us
        calls[name] += 1
        busy_us += max(0.0, end_us - max(start_us, until_us))
        until_us = max(until_us, end_us)
    whole_us = until_us - spans[0][0]

    def per_one(us: float) -> float:
        return round(us / count / 1e3, 4)

    return {
        "step_ms": per_one(whole_us),
        "idle_ms": per_one(whole_us - busy_us),
        "by_kind_ms": {kind: per_one(us) for kind, us in by_kind.most_common()},
        "kernels": [
            {"name": name[:100], "ms": per_one(us), "calls": round(calls[name] / count, 2)}
            for name, us in by_name.most_common(14)
        ],
    }


def _kind(name: str) -> str:
    return next((kind for part, kind in KINDS if part in name), "other")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    rows = [
        row for shape in dict.fromkeys(scene.shape for scene in SCENES) for row in in_process(measure, shape)
    ]
    document = in_process(here) | {"sources": sources.fingerprints(FILE), "results": rows}
    write_whole(args.out, json.dumps(document, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
