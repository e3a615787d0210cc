"""Measure the parts of the CPU's decode step, and the memory bandwidth that bounds it.

    python -m benchmarks.cpu_kernels --work-dir build/benchmarks [--shape 0.5b]

Writes results/cpu_kernels.json, or cpu_kernels_05b.json. Runs in-process, on the checkpoint of cpu_serve. Run
it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numba import carray
from safetensors.torch import load_file

from benchmarks import sources
from benchmarks.cpu_models import MODELS
from benchmarks.cpu_serve import NUM_ADAPTERS, PACKAGES, RESULTS, checkpoint
from benchmarks.make_checkpoint import Checkpoint
from loraplex.adapters.peft_reader import read_adapter
from loraplex.bench.environment import environment
from loraplex.engine.adapter_loader import read_weights
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.slab_reader import read_slab
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import claim
from loraplex.kernels.cpu.numba_kernels import NumbaKernels
from loraplex.kernels.lora import LoraWeights
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.weights import load_weights
from loraplex.scheduling.plan import Chunk

CONTEXT = 80
BLOCK_SIZE = 16
BANDWIDTH_MB = (50, 100, 200, 1000)
LINEAR_ROWS = (1, 16, 64, 1024)
TIMED = ("add_lora", "attention", "rms_norm", "add_rms_norm", "rope_and_cache", "silu_mul")


def median_ms(work: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def read_bandwidth() -> dict[str, float]:
    """Return GB/s of summing an array: small ones are read from the last-level cache, large ones from
    DRAM."""
    found = {}
    for megabytes in BANDWIDTH_MB:
        array = torch.ones(megabytes * 250_000)
        found[f"{megabytes} MB"] = round(megabytes / median_ms(array.sum, 15), 1)
    return found


def launch_us() -> float:
    """Return the microseconds of an empty parallel region."""

    def nothing(block: Any) -> None:
        args = carray(block, 2)
        while claim(block) < args[1]:
            pass

    kernel = team.kernel(nothing)
    return round(1e3 * median_ms(lambda: team.run(kernel, (0,)), 2000), 2)


def linears(config: ModelConfig) -> dict[str, dict[str, float]]:
    """Time all linears of the model once, in ms: repacked on every call by torch, and packed once."""
    shape = config.shape
    sizes = [
        (shape.q_size + 2 * shape.kv_size, shape.hidden_size),
        (shape.hidden_size, shape.q_size),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ] * shape.num_layers
    plain = [torch.randn(size) for size in sizes]
    kernels = NumbaKernels(shape.head_dim)
    packed = [kernels.pack_linear(weight, None) for weight in plain]
    found = {}
    for num_rows in LINEAR_ROWS:
        inputs = {size[1]: torch.randn(num_rows, size[1]) for size in sizes}
        repeats = 5 if num_rows > 100 else 20
        found[f"{num_rows} rows"] = {
            "F.linear": round(median_ms(lambda: _plain(plain, inputs), repeats), 2),  # noqa: B023
            "packed": round(median_ms(lambda: _packed(packed, sizes, inputs), repeats), 2),  # noqa: B023
        }
    return found


def _plain(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


def _packed(weights: list[Any], sizes: list[tuple[int, int]], inputs: dict[int, torch.Tensor]) -> None:
    for weight, size in zip(weights, sizes, strict=True):
        weight(inputs[size[1]])


class Stopwatch(NumbaKernels):
    """The engine's kernels, with the time spent in each recorded."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim)
        self.spent_s: dict[str, float] = defaultdict(float)
        for name in TIMED:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def pack_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Any:
        packed = super().pack_linear(weight_OI, bias_O)
        return self._timed("linears", packed)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = call(*args)
            self.spent_s[name] += time.perf_counter() - started
            return result

        return timed


def steps(served: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """Time a decode step of 16 rows and a prefill step of 16 x 64, without adapters and with one each."""
    kernels = Stopwatch(config.shape.head_dim)
    weights = load_weights(served.base, config, torch.float32)
    decoder = Decoder(config, weights, kernels, config.shape.max_position)
    blocks_each = -(-CONTEXT // BLOCK_SIZE)
    caches = [
        KVCache.zeros(config.shape, NUM_ADAPTERS * blocks_each, BLOCK_SIZE, torch.float32)
        for _ in range(config.shape.num_layers)
    ]
    adapters: dict[str, LoraWeights] = {}
    adapter_bytes = 0
    for name in served.adapter_names:
        spec = read_adapter(served.adapters / name, config.shape)
        adapters[name] = read_weights(spec, config.shape, torch.float32, read_slab)
        adapter_bytes += spec.num_params * 4

    def batch(kind: str, with_adapters: bool) -> KernelBatch:
        chunks = [
            Chunk(
                request_id=name,
                adapter=name if with_adapters else None,
                start=0 if kind == "prefill" else CONTEXT - 1,
                token_ids=list(range(64)) if kind == "prefill" else [7],
                block_ids=list(range(index * blocks_each, (index + 1) * blocks_each)),
                samples=True,
            )
            for index, name in enumerate(served.adapter_names)
        ]
        return BatchBuilder(kernels, BLOCK_SIZE).build(chunks, adapters).batch

    found: dict[str, Any] = {"adapter_mb": round(adapter_bytes / 1e6, 1)}
    for kind, repeats in (("prefill", 8), ("decode", 40)):
        batches = {"base": batch(kind, False), "adapters": batch(kind, True)}
        parts: dict[str, dict[str, float]] = {}
        totals: dict[str, list[float]] = {name: [] for name in batches}
        for name in batches:
            parts[name] = defaultdict(float)
        for _ in range(repeats):  # in turn, so that noise of the machine affects both
            for name, built in batches.items():
                kernels.spent_s.clear()
                started = time.perf_counter()
                decoder.logits(decoder.forward(built, caches))
                totals[name].append((time.perf_counter() - started) * 1e3)
                for part, seconds in kernels.spent_s.items():
                    parts[name][part] += seconds * 1e3 / repeats
        found[kind] = {
            name: {
                "total_ms": round(statistics.median(totals[name]), 2),
                "parts_ms": {part: round(value, 2) for part, value in parts[name].items()},
            }
            for name in batches
        }
    return found


def _weight_bytes(base: Path) -> int:
    """Return the bytes of all weights but the embeddings, of which a step reads a row for each token."""
    weights = load_file(base / "model.safetensors")
    return sum(tensor.nbytes for name, tensor in weights.items() if "embed_tokens" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--shape", choices=MODELS, default="28m", help="the model (28m)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = MODELS[args.shape]
    file = f"cpu_kernels{model.suffix}.json"
    out = args.out or RESULTS / file
    folder = args.work_dir.resolve() / f"checkpoint-{NUM_ADAPTERS}{model.suffix}"
    served = checkpoint(folder, num_adapters=NUM_ADAPTERS, size=model.size)
    config = load_config(served.base)
    result = environment(PACKAGES) | {
        "sources": sources.fingerprints(file),
        "threads": torch.get_num_threads(),
        "read_gb_per_s": read_bandwidth(),
        "launch_us": launch_us(),
        "linears_ms": linears(config),
        "weights_mb": round(_weight_bytes(served.base) / 1e6, 1),
        "steps": steps(served, config),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
