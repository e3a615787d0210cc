"""Section `graphs`: a step computes the same whichever graph it replays.

The same requests run in three engines: one that has captured nothing, so that every step runs kernel by
kernel; one that is ready, whose few graphs cover steps of other sizes and with fewer groups of linears; and
one that has captured everything. Adapters of three kinds touch different groups, so that none of their
batches is what the graphs of the second were captured for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from benchmarks.correctness.check import Check, Setting, holds
from benchmarks.correctness.comparing import FLOAT32_MARGIN, NUM_TOP, text_and_logprob_checks
from benchmarks.correctness.driving import Answer, answers, greedy_request, random_prompt
from benchmarks.correctness.random_engines import build, distinct_specs
from benchmarks.device_memory import release
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape

KINDS: Final = ("q,v", "gate,up,down", "all")
_Answers = dict[str, Answer]


def graphs(setting: Setting) -> list[Check]:
    expected, _ = _answers(setting, lambda engine: None)
    covered, is_ready = _answers(setting, Engine.get_ready)
    exact, _ = _answers(setting, Engine.warm_up)
    checks = [
        check
        for name, found in (("graphs that cover a step", covered), ("graphs of its own", exact))
        for check in text_and_logprob_checks(
            name,
            "by graphs with those kernel by kernel",
            plain=found,
            scored=found,
            expected=expected,
            margin=FLOAT32_MARGIN,
        )
    ]
    return [*checks, holds("ready", "no graph is left that must be captured before requests", is_ready)]


def _answers(setting: Setting, prepare: Callable[[Engine], None]) -> tuple[_Answers, bool]:
    """Return the answers by request (alone, a few at a time, all at once), and whether the engine was
    ready."""
    engine = build(setting.large_shape, setting, dtype=torch.float32)
    num_adapters = 2 if setting.tiny else 12
    lanes: list[str | None] = [None]
    for kind in KINDS:
        for spec in distinct_specs(
            kind, setting.large_shape, num_adapters=num_adapters, ranks=(8, 64), modules=kind
        ):
            engine.add_adapter(spec)
            lanes.append(spec.version)
    prepare(engine)
    is_ready = engine.num_required == 0
    found: _Answers = {}
    for size in (1, 3, len(lanes)):
        for first in range(0, len(lanes), size):
            batch = lanes[first : first + size]
            found |= answers(engine, _requests(f"{size} at a time", batch, setting), prepared=True)
    engine.close()
    del engine
    release()
    return found, is_ready


def _requests(name: str, lanes: list[str | None], setting: Setting) -> list[EngineRequest]:
    vocab_size = config_of_shape(setting.large_shape).shape.vocab_size
    return [
        greedy_request(
            f"{name}, {index}-{version or 'base'}",
            random_prompt(3 + 29 * index % 120, vocab_size, seed=index),
            4 if setting.tiny else 12,
            version,
            logprobs=NUM_TOP,
        )
        for index, version in enumerate(lanes)
    ]
