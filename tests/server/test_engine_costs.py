"""The costs that an engine process reports: the engine's own limits, and its known profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fake_core
import pytest
import tiny
import torch

from loraplex.engine import profile_subject
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.engine.profile_subject import profile_path
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.profile_json import profile_from_json, write_profile
from loraplex.perf.subject import shape_of_key
from loraplex.server.engine_costs import costs_of


def costs(options: EngineOptions, core: Engine) -> CostModel:
    found = costs_of(options, core)
    assert found is not None
    return profile_from_json(found)


def test_an_engine_says_its_limits_and_the_profile_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path / "cache"))
    tiny.save_model(tmp_path / "model", vocab_size=400, max_position_embeddings=512)
    options = EngineOptions(
        model=str(tmp_path / "model"), device="cpu", kv_memory_bytes=1 << 20, max_step_tokens=48
    )
    core = build_core(options)
    try:
        guess = costs(options, core)
        assert not guess.measured
        assert guess.subject.dtype == str(torch.float32).removeprefix("torch.")
        assert guess.memory is not None
        assert guess.memory.kv_tokens == core.stats().num_kv_blocks * options.block_size
        assert (guess.memory.max_context, guess.memory.step_tokens) == (core.max_model_len, 48)
        faster = replace(guess, measured=True, corrections=replace(guess.corrections, step=0.5), memory=None)
        write_profile(profile_path(guess.subject), faster)
        measured = costs(options, core)
        assert measured.measured
        assert measured.corrections.step == 0.5
        assert measured.memory == guess.memory, "of this engine, not of the one that was measured"
    finally:
        core.close()


def test_nothing_is_said_of_other_cores() -> None:
    options = fake_core.FakeOptions()
    assert costs_of(options, fake_core.build_without_progress(options)) is None
    assert costs_of(EngineOptions(model="x"), fake_core.build_without_progress(options)) is None


def test_an_engine_without_a_profile_takes_the_packages_of_such_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(shipped, CostModel)
    shape = shape_of_key(shipped.subject.model)
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path))
    for machine, expected in ((shipped.subject.machine, True), ("another machine", False)):
        subject = replace(shipped.subject, machine=machine)
        monkeypatch.setattr(profile_subject, "subject_of", lambda *_, subject=subject: subject)
        known = profile_subject.known_costs(shape, "cuda", torch.bfloat16)
        assert (known == shipped) is expected
        assert known.measured is expected
