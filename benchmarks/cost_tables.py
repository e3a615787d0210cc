"""The tables of the cost model: fits and their quality, predictions beside measurements, and targets;
`benchmarks.make_tables` inserts them into the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks import cold_tables
from benchmarks.cold_tables import AIM_TOKENS, RANK, section
from benchmarks.gpu_cold import ALL, QKV, Setting
from benchmarks.markdown import Result, TableError, table
from loraplex.bench.random_engine import random_specs
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CostModel
from loraplex.perf.held_out import HeldOut
from loraplex.perf.least_squares import FitQuality
from loraplex.perf.line import Line
from loraplex.perf.profile_json import profile_from_json
from loraplex.perf.step_cost import RowCurve, StepFeatures, StepTerms

_PROMPT_TOKENS: Final = Setting().prompt_tokens
_SHORT_PROMPT: Final = StepFeatures(num_prompts=1, num_prompt_tokens=_PROMPT_TOKENS)
"""The step that groups of layers are planned for."""


def cost_model(result: Result) -> CostModel:
    """Return the model that `benchmarks.gpu_cold profile` fitted."""
    try:
        model = profile_from_json(json.dumps(section(result, "profile")))
    except (KeyError, ValueError) as error:
        raise TableError(
            f"the section 'profile' is none: {error}; run benchmarks.gpu_cold profile"
        ) from error
    if model.bus is None:
        raise TableError("the section 'profile' is of a CPU: run benchmarks.gpu_cold profile on a GPU")
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter of the benchmark, with a prompt on it, and the model's predictions for both."""

    rank: int
    modules: str
    model: CostModel

    @property
    def num_bytes(self) -> int:
        [spec] = random_specs(
            "adapter", Setting().shape, num_adapters=1, ranks=[self.rank], modules=self.modules
        )
        return spec.num_params * self.model.subject.element_bytes

    @property
    def size(self) -> str:
        megabytes = self.num_bytes / 1e6
        return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.2f} GB"

    @property
    def copy_ms(self) -> float:
        return self.model.copy_s(self.num_bytes) * 1e3

    @property
    def step_ms(self) -> float:
        step = StepFeatures(
            num_prompts=1,
            num_prompt_tokens=_PROMPT_TOKENS,
            prompt_pairs=_PROMPT_TOKENS**2 / 2,
            num_adapters=1,
            adapter_bytes=self.num_bytes,
            row_adapter_bytes=_PROMPT_TOKENS * self.num_bytes,
        )
        return self.model.step_s(step) * 1e3

    @property
    def groups(self) -> tuple[int, ...]:
        return self.model.plan_groups(self._layer_bytes, self.model.step_s(_SHORT_PROMPT))

    @property
    def pipelined_ms(self) -> float:
        """Milliseconds of a step that starts with the first copy."""
        arrivals = self.model.arrivals_s(self._layer_bytes, self.groups)
        return self.step_ms + self.model.stall_s(arrivals, self.step_ms / 1e3) * 1e3

    @property
    def _layer_bytes(self) -> list[int]:
        num_layers = self.model.subject.num_layers
        return [self.num_bytes // num_layers] * num_layers


def small_and_large(result: Result) -> tuple[Adapter, Adapter]:
    """Return the adapters of the sections `idle` and `large`."""
    model = cost_model(result)
    return (
        Adapter(rank=RANK, modules=QKV, model=model),
        Adapter(rank=Setting().large_rank, modules=ALL, model=model),
    )


def large_table(result: Result) -> str:
    _, adapter = small_and_large(result)
    lines = []
    for policy, times in section(result, "large").items():
        host = times.get("host")
        lines.append(
            (
                f"`{policy}`",
                f"{times['ready']['mean']:.2f} ms",
                "-" if host is None else f"{host['mean']:.2f} ms",
                "-" if host is None else f"{host['mean'] / adapter.copy_ms:.3f}x",
            )
        )
    lines.append(("at most", "", "", f"{cold_tables.OVER_BUS:.3f}x"))
    bus = f"over {adapter.copy_ms:.1f} ms, the bus alone for {adapter.size}"
    return table(("policy", "on the device", "in host memory", bus), lines)


def fits_table(result: Result) -> str:
    model = cost_model(result)
    assert model.bus is not None
    assist = model.assist
    lines = [
        ("copy to the device", _line(model.bus.copy), *_quality(model.bus.copy.quality)),
        ("one copy cut in two", f"{model.bus.launch_s * 1e6:.1f} µs more", *_quality(None)),
        ("read from the page cache", _line(model.read), *_quality(model.read.quality)),
        ("read from the disk, one thread", _line(model.disk), *_quality(model.disk.quality)),
        ("step: rows that decode", _curve(model.step.decodes), *_quality(model.step.quality)),
        ("step: rows with prompts", _curve(model.step.prompts), "(the same fit)", "", "", ""),
        ("step: what is in it", _terms(model.step.terms), "(the same fit)", "", "", ""),
        (
            "LoRA of q, k and v on CPU workers",
            _product(assist),
            *_quality(assist.quality),
        ),
        ("signal to CPU workers and back", f"{assist.round_trip_s * 1e6:.1f} µs", *_quality(None)),
        *_held_out(model.held_out),
    ]
    return table(("cost", "fitted", "samples", "R²", "mean error", "worst"), lines)


def _held_out(held_out: HeldOut | None) -> Iterator[tuple[str, ...]]:
    """Yield rows for samples that were not fitted to."""
    if held_out is not None:
        yield ("held out: decode", "random steps that decode", *_quality(held_out.decode))
        yield ("held out: prefill", "random prompts", *_quality(held_out.prefill))
        if held_out.serving is not None:
            yield ("held out: serving", "steps while requests come and go", *_quality(held_out.serving))
        yield ("held out: load", "copies and reads of other sizes", *_quality(held_out.load))


def _product(assist: AssistCost) -> str:
    return (
        f"{assist.call_s * 1e6:.0f} µs, {assist.weight_s * 1e9:.3f} ns a weight, "
        f"{assist.row_s * 1e12:.2f} ps a weight and row, {assist.token_s * 1e6:.2f} µs a token over the bus"
    )


def _line(line: Line) -> str:
    rate = line.units_per_s
    return f"{line.latency_s * 1e6:.0f} µs" + ("" if rate is None else f" + bytes at {rate / 1e9:.2f} GB/s")


def _curve(curve: RowCurve) -> str:
    return ", ".join(
        f"{rows:,}: {curve.seconds(rows) * 1e3:.2f} ms"
        for rows in curve.rows
        if rows in (curve.rows[0], _PROMPT_TOKENS - 1, _PROMPT_TOKENS, curve.rows[-1])
    )


def _terms(terms: StepTerms) -> str:
    found = (
        (terms.prompt_s, 1e6, "µs a prompt"),
        (terms.alone_s, 1e3, "ms if it only reads prompts"),
        (terms.beside_prompts_s, 1e6, "µs a decode beside prompts"),
        (terms.beside_prompts_position_s, 1e9, "ns a position that these attend to"),
        (terms.lora_s, 1e3, "ms if there is an adapter"),
        (terms.prompt_lora_s, 1e3, "ms more if there is a prompt, too"),
        (terms.adapter_s, 1e6, "µs an adapter"),
        (terms.adapter_byte_s, 1e15, "µs a GB of adapters"),
        (terms.row_adapter_byte_s, 1e15, "µs a GB and row"),
        (terms.decode_position_s, 1e9, "ns a position that decoding rows attend to"),
        (terms.prompt_pair_s, 1e9, "ns a pair of prompt tokens"),
    )
    return ", ".join(f"{value * scale:.2f} {unit}" for value, scale, unit in found if value > 0)


def _quality(quality: FitQuality | None) -> tuple[str, str, str, str]:
    if quality is None:
        return "-", "-", "-", "-"
    return (
        str(quality.num_samples),
        f"{quality.r_squared:.4f}",
        f"{quality.mean_error:.1%}",
        f"{quality.worst_error:.0%}",
    )


class Prediction(NamedTuple):
    """A predicted and a measured time, in milliseconds."""

    what: str
    predicted: float
    measured: float
    measured_as: str


def predictions_table(result: Result, workers: Result) -> str:
    lines = [
        (
            each.what,
            _time(each.predicted),
            _time(each.measured),
            f"{each.predicted / each.measured - 1:+.0%}",
            each.measured_as,
        )
        for each in (*_loads(result), *_on_cpus(result, workers))
    ]
    return table(("what", "predicted", "measured", "predicted is off by", "measured as"), lines)


def _loads(result: Result) -> Iterator[Prediction]:
    small, large = small_and_large(result)
    for adapter, times in ((small, section(result, "idle")), (large, section(result, "large"))):
        about = f"rank {adapter.rank} on {adapter.modules}"
        yield Prediction(
            f"step of {_PROMPT_TOKENS} tokens, {about}",
            adapter.step_ms,
            times["cached"]["ready"]["mean"],
            "first token, `cached`",
        )
        yield Prediction(
            f"copy of {adapter.size}",
            adapter.copy_ms,
            cold_tables.over_warm_ms(times["overlap"], "host"),
            "first token, `overlap`, host memory less device",
        )
        groups = ", ".join(map(str, adapter.groups))
        in_groups = "layer by layer" if set(adapter.groups) == {1} else f"in groups of {groups} layers"
        yield Prediction(
            f"that step with the copy, {in_groups}",
            adapter.pipelined_ms,
            times["pipelined"]["host"]["mean"],
            "first token, `pipelined`, host memory",
        )
    on_disk = section(result, "idle")["overlap"]
    yield Prediction(
        f"read of {small.size} from the page cache",
        small.model.read_s(small.num_bytes) * 1e3,
        on_disk["disk"]["mean"] - on_disk["host"]["mean"],
        "first token, `overlap`, disk less host memory",
    )


def _on_cpus(result: Result, workers: Result) -> Iterator[Prediction]:
    model = cost_model(result)
    yield Prediction(
        "signal to CPU workers and back",
        model.assist.round_trip_s * 1e3,
        section(result, "signal")["round_trip_us"]["mean"] / 1e3,
        "`signal`",
    )
    row = aim_products(workers)[-1]
    num_cores, num_weights = workers["workers"], 2 * RANK * workers["hidden"]
    product_s = model.assist.task_s([num_weights], num_tokens=AIM_TOKENS, num_workers=num_cores)
    for key, by in (("torch_us", "torch's threads"), ("workers_us", "CPU workers")):
        yield Prediction(
            f"product of {AIM_TOKENS} tokens, rank {RANK}, {num_cores} cores",
            product_s * 1e3,
            row[key]["p50"] / 1e3,
            f"{by}, {row['layers']} sets of weights",
        )


def aim_products(workers: Result) -> list[Result]:
    """Return the products with the target number of tokens, weights that stay in caches first."""
    rows = [row for row in cold_tables.products(workers, "bfloat16") if row["tokens"] == AIM_TOKENS]
    return sorted(rows, key=lambda row: int(row["layers"]))


def _time(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 1 else f"{ms * 1e3:.0f} µs"


class Aim(NamedTuple):
    """A target and its measurement; `is_reached` compares the figures, not their printed forms."""

    what: str
    asked: str
    found: str
    is_reached: bool


def aims_table(result: Result, workers: Result) -> str:
    lines = [
        (aim.what, aim.asked, aim.found, "yes" if aim.is_reached else "**no**")
        for aim in (*_idle_aims(result), *_setup_aims(result), *_other_aims(result, workers))
    ]
    return table(("what", "asked for", "measured", "reached"), lines)


def _idle_aims(result: Result) -> Iterator[Aim]:
    idle = section(result, "idle")["auto"]
    places = (("host memory", "host", cold_tables.HOST_MS), ("on disk", "disk", cold_tables.DISK_MS))
    for place, where, most_ms in places:
        over_ms = cold_tables.over_warm_ms(idle, where)
        yield Aim(
            f"first token, idle, rank {RANK}, {place}: over the one on the device",
            f"+{most_ms:g} ms",
            f"{over_ms:+.2f} ms",
            over_ms <= most_ms,
        )
    _, adapter = small_and_large(result)
    ratio = section(result, "large")["auto"]["host"]["mean"] / adapter.copy_ms
    yield Aim(
        f"first token, idle, {adapter.size} in host memory: over the bus alone",
        f"{cold_tables.OVER_BUS}x",
        f"{ratio:.3f}x",
        ratio <= cold_tables.OVER_BUS,
    )


def _setup_aims(result: Result) -> Iterator[Aim]:
    for name, setup in section(result, "setups").items():
        found = setup["policies"]["auto"]
        for key in ("mean", "p95"):
            over = [found["over_cached"][metric][key] for metric in cold_tables.METRICS]
            yield Aim(
                f"{name}: {key} of TTFT, TPT, E2E over `cached`",
                f"{cold_tables.OVER_CACHED:+.0%} each",
                ", ".join(f"{share:+.1%}" for share in over),
                max(over) <= cold_tables.OVER_CACHED,
            )
        gaps = found["itl_p99_over_cached"]
        yield Aim(
            f"{name}: ITL p99 over `cached`",
            f"{cold_tables.ITL_OVER_CACHED:+.0%}",
            f"{gaps:+.1%}",
            gaps <= cold_tables.ITL_OVER_CACHED,
        )


def _other_aims(result: Result, workers: Result) -> Iterator[Aim]:
    ratio = cold_tables.over_cached_p95(section(result, "burst"), "auto")
    most = cold_tables.BURST_OVER_CACHED
    yield Aim("burst of 32: p95 of TTFT over `cached`", f"{most}x", f"{ratio:.2f}x", ratio <= most)
    for key in ("mean", "p99"):
        trip_us, most_us = section(result, "signal")["round_trip_us"][key], cold_tables.ROUND_TRIP_US
        yield Aim(
            f"signal to CPU workers and back, {key}",
            f"{most_us:.0f} µs",
            f"{trip_us:.1f} µs",
            trip_us <= most_us,
        )
    waits = {policy: found["host_synchronisations"] for policy, found in section(result, "syncs").items()}
    yield Aim(
        "times that the host waits for the device in a prompt's step",
        "0",
        ", ".join(f"{count} (`{policy}`)" for policy, count in waits.items()),
        not any(waits.values()),
    )
    for row in aim_products(workers):
        weights = "one set of weights" if row["layers"] == 1 else f"{row['layers']} sets of weights in turn"
        yield Aim(
            f"{workers['workers']} CPU workers against torch's threads, {AIM_TOKENS} tokens, rank {RANK}, "
            f"bfloat16, {weights}",
            f"{cold_tables.WORKERS_SPEEDUP}x",
            f"{row['speedup']:.2f}x",
            row["speedup"] >= cold_tables.WORKERS_SPEEDUP,
        )
