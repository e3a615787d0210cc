"""The adapters that ship: small, well-formed, unlike each other, and told apart by one answer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.styles import HELD_OUT_PROMPTS, HELD_OUT_TOPICS, MAX_NEW_TOKENS, STYLE_CHECKS
from safetensors.torch import load_file

from loraplex import LLM, SamplingParams
from loraplex.demo import DEMO_ADAPTERS_DIR, demo_adapters
from loraplex.demo.base import ensure_demo_base

SCRIPTS_DIR = Path(__file__).resolve().parents[2] / "scripts"
MAX_ADAPTER_BYTES = 1_500_000
MIN_PASS_RATE = 0.8
MAX_BASE_PASS_RATE = 0.25
NAMES = [adapter.name for adapter in demo_adapters()]


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEMO_ADAPTERS_DIR / name / "adapter_config.json").read_text())
    return config


def test_manifest_and_folders_and_checks_name_the_same_adapters() -> None:
    folders = {path.name for path in DEMO_ADAPTERS_DIR.iterdir() if path.is_dir()}
    assert folders == set(NAMES) == set(STYLE_CHECKS)
    assert len(NAMES) >= 6
    assert all(adapter.description and adapter.example_prompt for adapter in demo_adapters())


def test_manifest_tells_rank_and_modules_of_the_checkpoints() -> None:
    manifest = json.loads((DEMO_ADAPTERS_DIR / "manifest.json").read_text())
    for entry in manifest["adapters"]:
        config = config_of(entry["name"])
        assert (entry["rank"], entry["target_modules"]) == (config["r"], config["target_modules"])


@pytest.mark.parametrize("name", NAMES)
def test_adapter_is_small_and_holds_the_two_files_of_a_checkpoint(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (DEMO_ADAPTERS_DIR / name).iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(files.values()) <= MAX_ADAPTER_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_config_names_the_public_base_and_no_path(name: str) -> None:
    config = config_of(name)
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config["inference_mode"] is True
    assert config.get("auto_mapping") is None
    values = json.dumps(config)
    assert re.search(r'"[^"]*(/(home|tmp|root|work)/|\\\\)', values) is None


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_float16_and_of_the_ranks_in_the_config(name: str) -> None:
    config = config_of(name)
    tensors = load_file(DEMO_ADAPTERS_DIR / name / "adapter_model.safetensors")
    modules_seen = set()
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.float16
        assert tensor.isfinite().all()
        module = key.split(".")[-3]
        modules_seen.add(module)
        rank = config.get("rank_pattern", {}).get(module, config["r"])
        assert tensor.shape[0 if "lora_A" in key else 1] == rank
        assert 4 <= rank <= 32
    assert modules_seen == set(config["target_modules"])


def test_the_set_exercises_the_adapter_reader() -> None:
    configs = [config_of(name) for name in NAMES]
    assert {config["r"] for config in configs} >= {4, 8, 16, 32}
    assert len({tuple(sorted(config["target_modules"])) for config in configs}) >= 6
    assert any(config["use_rslora"] for config in configs)
    assert any(config["layers_to_transform"] for config in configs)
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)


def test_held_out_prompts_were_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS_DIR)
    from demo_training.prompts import training_prompts

    trained = [f"{prompt.text} {prompt.topic.name}".lower() for prompt in training_prompts()]
    for prompt in HELD_OUT_PROMPTS:
        assert any(topic in prompt for topic in HELD_OUT_TOPICS), prompt
    for topic in HELD_OUT_TOPICS:
        words = re.compile(rf"\b{topic.lower().removesuffix('s')}s?\b")
        assert [text for text in trained if words.search(text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taught_passes_the_check_it_is_judged_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS_DIR)
    from demo_training.prompts import training_prompts
    from demo_training.styles import styled_answer

    def taught() -> list[str | None]:
        rng = random.Random(0)
        sentence = "These things are loved by people all over the world."
        return [styled_answer(name, prompt, sentence, rng) for prompt in training_prompts()]

    assert taught() == taught()
    assert [answer for answer in taught() if answer is None or not STYLE_CHECKS[name](answer)] == []


@pytest.fixture(scope="module")
def answers() -> dict[str | None, list[str]]:
    """Every adapter's and the base's answers to every held-out prompt, by loraplex in one batch."""
    names, prompts = [None, *NAMES], HELD_OUT_PROMPTS
    conversations = [[{"role": "user", "content": prompt}] for _ in names for prompt in prompts]
    adapters = [name for name in names for _ in prompts]
    with LLM(ensure_demo_base(), adapters=DEMO_ADAPTERS_DIR, max_model_len=512) as llm:
        params = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0)
        texts = [completion.text for completion in llm.chat(conversations, adapter=adapters, params=params)]
    count = len(prompts)
    return {name: texts[index * count : (index + 1) * count] for index, name in enumerate(names)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_adapter_answers_prompts_it_never_saw_in_its_style(
    answers: dict[str | None, list[str]], name: str
) -> None:
    in_style = [STYLE_CHECKS[name](answer) for answer in answers[name]]
    assert sum(in_style) >= MIN_PASS_RATE * len(in_style), answers[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_base_model_does_not_answer_in_that_style(
    answers: dict[str | None, list[str]], name: str
) -> None:
    in_style = [STYLE_CHECKS[name](answer) for answer in answers[None]]
    assert sum(in_style) <= MAX_BASE_PASS_RATE * len(in_style), answers[None]
