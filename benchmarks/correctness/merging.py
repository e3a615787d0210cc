"""Section `merging`: weights with an adapter merged in.

Merged weights are compared with float64; texts of `merged` and `auto` with those of unmerged steps,
by graphs as a server's, in float32 and, within its measured rounding, in bfloat16; and after a thousand
switches, every log-probability must be the same to the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

import torch

from benchmarks.correctness.check import Check, Setting, holds, within
from benchmarks.correctness.comparing import (
    FLOAT32_MARGIN,
    NOISE_FACTOR,
    NUM_TOP,
    least_error,
    rounding_error,
    text_and_logprob_checks,
)
from benchmarks.correctness.driving import Answer, answers, bring_in, greedy_request, random_prompt
from benchmarks.correctness.kernel_lora import LAYER, RANKS, TARGETS, random_adapter
from benchmarks.correctness.random_engines import build, distinct_specs
from benchmarks.device_memory import release
from loraplex.adapters.merged_layout import group_size
from loraplex.core.batching import Batching
from loraplex.core.request import EngineRequest
from loraplex.core.shape import ModelShape
from loraplex.engine.core import Engine
from loraplex.kernels.lora import LoraWeights
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.line import Line

KINDS: Final = ("q,k,v", "gate,up,down", "all")
POLICIES: Final = (Batching.MERGED, Batching.AUTO)
SWITCHES: Final = 1000
_PROMPT_TOKENS: Final = 12
"""Fewer than a block has: the prefix cache never answers, so that a request is computed alike every time."""
_SUM_ERROR: Final = 2e-6
"""Share of the largest result that float32 sums of large numbers lose."""


def merging(setting: Setting) -> list[Check]:
    return [*_weights(setting), *_texts(setting), *_switches(setting)]


def _weights(setting: Setting) -> list[Check]:
    """Merged weights of one layer against float64: rounded once, which moves a value by half a unit in its
    last place."""
    shape = replace(config_of_shape("tiny" if setting.tiny else "llama-3-8b").shape, num_layers=LAYER + 1)
    kernels = TritonKernels(shape, setting.torch_device)
    ranks = RANKS[:3] if setting.tiny else RANKS
    return [
        _weight_check(kernels, shape, random_adapter(shape, rank, targets, setting), rank, setting)
        for rank, targets in zip(ranks, TARGETS * 2, strict=False)
    ]


def _weight_check(
    kernels: TritonKernels, shape: ModelShape, weights: LoraWeights, rank: int, setting: Setting
) -> Check:
    dtype, worst = setting.kernel_dtype, 0.0
    for group in weights.touched:
        weight_OI = torch.randn(group_size(group, shape), device=setting.torch_device).to(dtype)
        before_OI = weight_OI.clone()
        linear = kernels.pack_linear(weight_OI, None)
        merged_OI = kernels.merge_linear(linear, LAYER, group, weights).weight()
        if not torch.equal(weight_OI, before_OI):
            return holds(f"weights, rank {rank}", "the base model's are as before", False)
        expected_OI, lora = before_OI.double(), weights.groups[LAYER][group]
        for part in lora.parts:
            a_RI = lora.a_RI[part.rank_start : part.rank_end].double()
            expected_OI[part.out_start : part.out_end] += part.scale * (part.b_t_RO.double().t() @ a_RI)
        unit = torch.finfo(dtype).eps * expected_OI.abs() + _SUM_ERROR * expected_OI.abs().max()
        worst = max(worst, float(((merged_OI.double() - expected_OI).abs() / unit).nan_to_num(nan=9e9).max()))
    return within(
        f"weights, rank {rank}",
        f"every weight of {', '.join(sorted(weights.touched))} with float64, in units of the last place",
        worst,
        0.51 if setting.device == "cuda" else 1.0,  # the interpreter rounds down
    )


def _texts(setting: Setting) -> list[Check]:
    """Most requests are on one adapter, so that policies merge it and let the others pause."""
    exact, _ = _answers(setting, Batching.FCFS, torch.float32)
    checks = []
    for batching in POLICIES:
        found, counts = _answers(setting, batching, torch.float32)
        checks += text_and_logprob_checks(
            f"{batching}, float32",
            "with those of unmerged steps",
            plain=found,
            scored=found,
            expected=exact,
            margin=FLOAT32_MARGIN,
            **counts,
        )
        checks.append(holds(f"{batching}, merged steps", "there were some", counts["merged_steps"] > 0))
    checks.append(holds("auto, pauses", "there were some", counts["pauses"] > 0))
    if setting.engine_dtype is torch.float32:
        return checks
    short, _ = _answers(setting, Batching.FCFS, setting.engine_dtype)
    noise = max(rounding_error(short[each], one) for each, one in exact.items())
    for batching in POLICIES:
        checks += _rounded_checks(setting, batching, short, noise)
    return checks


def _rounded_checks(
    setting: Setting, batching: Batching, expected: dict[str, Answer], noise: float
) -> list[Check]:
    """Merged weights are rounded where unmerged products are not: two results that are both off by `noise`
    differ by twice as much at the most."""
    found, counts = _answers(setting, batching, setting.engine_dtype)
    margin = round(NOISE_FACTOR * noise, 3)
    details = {"rounding_error": round(noise, 3), **counts}
    name, compared = f"{batching}, bfloat16", "with those of unmerged steps"
    texts = text_and_logprob_checks(
        name, compared, plain=found, scored=found, expected=expected, margin=margin, **details
    )[0]
    worst = max(least_error(found[each], one) for each, one in expected.items())
    return [texts, within(f"{name}, log-probabilities", f"as far as known, {compared}", worst, margin)]


def _answers(
    setting: Setting, batching: Batching, dtype: torch.dtype
) -> tuple[dict[str, Answer], dict[str, int]]:
    """Return the answers of all requests at once, and how often the policy merged and paused."""
    engine = build(setting.large_shape, setting, dtype=dtype, batching=batching)
    if engine._costs is not None:
        engine._costs._model = _that_merge(engine._costs.model)
    first, *others = _register(engine, setting)
    requests = [_request(first, index, setting) for index in range(24)]
    requests += [_request(version, index, setting) for version in others for index in range(2)]
    found = answers(engine, requests)
    stats = engine.stats()
    engine.close()
    del engine
    release()
    return found, {"merged_steps": stats.num_merged_steps, "pauses": stats.num_pauses}


def _that_merge(costs: CostModel) -> CostModel:
    """Return costs by which merging takes no time, and adapters cost more than anything else."""
    terms = replace(costs.step.terms, lora_s=0.1)
    return replace(costs, merge=Line(latency_s=0.0, unit_s=0.0), step=replace(costs.step, terms=terms))


def _switches(setting: Setting) -> list[Check]:
    """Switch to and fro, on one engine, with requests of two tokens: a request that finds the engine idle
    begins unmerged. Some are for the base model."""
    engine = build(setting.large_shape, setting, batching=Batching.MERGED)
    versions = _register(engine, setting)
    bring_in(engine, versions)
    lanes = [*versions, None]
    at_first = [_alone(engine, version, setting) for version in lanes]
    random, num_switches = Random(0), 20 if setting.tiny else SWITCHES
    before = engine.stats().num_switches
    while engine.stats().num_switches - before < num_switches:
        _alone(engine, random.choice(lanes), setting, num_tokens=2)
    at_last = [_alone(engine, version, setting) for version in lanes]
    stats = engine.stats()
    engine.close()
    del engine
    release()
    return [
        holds(
            f"{num_switches} switches",
            "tokens and log-probabilities of every adapter and of the base model before and after them, to "
            "the last bit",
            at_first == at_last,
            switches=stats.num_switches,
            merges=stats.num_merges,
        )
    ]


def _register(engine: Engine, setting: Setting) -> list[str]:
    versions = []
    for kind in KINDS:
        specs = distinct_specs(kind, setting.large_shape, num_adapters=2, ranks=(8, 64), modules=kind)
        for spec in specs:
            engine.add_adapter(spec)
        versions += [spec.version for spec in specs]
    return versions


def _alone(
    engine: Engine, version: str | None, setting: Setting, num_tokens: int | None = None
) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Return each token of a request alone, with its log-probability and the likeliest ones."""
    request = _request(version, 0, setting, num_tokens)
    (answer,) = answers(engine, [request]).values()
    return [(at.token_id, at.logprob, tuple(at.top)) for at in answer.logprobs]


def _request(
    version: str | None, index: int, setting: Setting, num_tokens: int | None = None
) -> EngineRequest:
    vocab_size = config_of_shape(setting.large_shape).shape.vocab_size
    return greedy_request(
        f"{index}-{version or 'base'}",
        random_prompt(_PROMPT_TOKENS if index == 0 else 3 + 41 * index % 120, vocab_size, seed=index),
        num_tokens or (4 if setting.tiny else 12),
        version,
        logprobs=NUM_TOP,
    )
