"""Measure what structured output costs a decode step on a GPU.

    python -m benchmarks.structured_gpu                          # a minute on an H200
    python -m benchmarks.structured_gpu --shape tiny --device cpu --steps 60 --out FILE    # tries the script

Writes results/structured_gpu.json. One engine with random weights decodes 32 requests at a time, without
and with JSON schemas in turn; the vocabulary and the schemas are those of `benchmarks.structured_output`. A
time is that from one step's tokens to the next step's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch

from benchmarks.gpu_engine import SHAPE
from benchmarks.sources import fingerprints
from benchmarks.structured_output import BATCH, EOS, RESULTS, Vocabulary, batch_of_requests
from loraplex.bench.alternating import quiet_collector
from loraplex.bench.environment import environment
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine
from loraplex.engine.compilation import GrammarCompilation
from loraplex.engine.core import Engine
from loraplex.engine.grammars import Grammars
from loraplex.model.shapes import config_of_shape

FILE: Final = "structured_gpu.json"
PACKAGES: Final = ("loraplex", "llguidance", "numpy", "torch", "triton")
ROUNDS: Final = 4
SETTLE_STEPS, STEPS = 16, 240
KINDS: Final = {"likeliest": 0.0, "drawn": 1.0}
"""The way to choose tokens -> the temperature."""


def measure(shape: str, device: str, num_steps: int) -> dict[str, Any]:
    """Return the milliseconds of steps for each way to choose tokens, without and with schemas."""
    vocabulary = Vocabulary(config_of_shape(shape).shape.vocab_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    engine = build_random_engine(RandomEngineOptions(shape=shape, device=device, dtype=dtype))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        vocabulary.write(path)
        grammars = Grammars(path, len(vocabulary.tokens), (EOS,))
        grammars.prepare().result()
        # Random engines have no tokenizer, and so no grammars.
        engine._compilation = GrammarCompilation(grammars)
        engine.warm_up()
        found: dict[str, Any] = {}
        for name, temperature in KINDS.items():
            took: dict[str, list[float]] = {"plain": [], "structured": []}
            for number in range(2 * (ROUNDS + 1)):
                side = "structured" if number % 2 else "plain"
                with quiet_collector():
                    step_ms = _decode(
                        engine, f"{name}-{number}", temperature, num_steps, is_structured=number % 2 == 1
                    )
                if number >= 2:  # the first of both only warms up
                    took[side] += step_ms
            found[name] = {
                side: {
                    "median_ms": round(median(each), 3),
                    "mean_ms": round(fmean(each), 3),
                    "steps": len(each),
                }
                for side, each in took.items()
            }
            print(name, found[name], flush=True)
    engine.close()
    return {"shape": shape, "batch": BATCH, "vocabulary": len(vocabulary.tokens), "kinds": found}


def _decode(
    engine: Engine, name: str, temperature: float, num_steps: int, *, is_structured: bool
) -> list[float]:
    """Return the milliseconds between steps in which all requests decode."""
    for request in batch_of_requests(
        f"{name}-",
        is_structured=is_structured,
        prompt_tokens=91,
        max_tokens=SETTLE_STEPS + num_steps,
        temperature=temperature,
        eos=EOS,
    ):
        engine.add_request(request)
    times_s = []
    while engine.has_work():
        outputs = engine.step()
        if errors := [each.error for each in outputs if each.error]:
            raise RuntimeError(errors[0])
        if len(outputs) == BATCH:
            times_s.append(time.perf_counter())
    assert len(times_s) >= num_steps, "answers ended while they were timed"
    return [(later - sooner) * 1e3 for sooner, later in pairwise(times_s)][SETTLE_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed each round ({STEPS})")
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    found = measure(args.shape, args.device, args.steps)
    result = environment(PACKAGES) | {"sources": fingerprints(FILE), "results": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
