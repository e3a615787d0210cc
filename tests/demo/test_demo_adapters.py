"""The adapters that ship: small, well-formed, unlike each other, and told apart by one answer."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.styles import HELD_OUT_PROMPTS, HELD_OUT_TOPICS, MAX_NEW_TOKENS, STYLE_CHECKS
from safetensors.torch import load_file

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


@dataclass(frozen=True, kw_only=True)
class DemoModel:
    """The base with every adapter loaded, none of them active until it is set."""

    model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_demo_base()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first, *others = NAMES
    # "low memory" here means: no random weights made first, only to be overwritten.
    options = {"low_cpu_mem_usage": True}
    model = PeftModel.from_pretrained(base, DEMO_ADAPTERS_DIR / first, adapter_name=first, **options)
    for name in others:
        model.load_adapter(DEMO_ADAPTERS_DIR / name, adapter_name=name, **options)
    return DemoModel(model=model.eval(), tokenizer=AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("name", NAMES)
def test_adapter_answers_prompts_it_never_saw_in_its_style(demo: DemoModel, name: str) -> None:
    demo.model.set_adapter(name)
    answers = greedy_answers(demo)
    assert pass_rate(name, answers) >= MIN_PASS_RATE, answers


def test_base_model_has_none_of_the_styles(demo: DemoModel) -> None:
    with demo.model.disable_adapter():
        answers = greedy_answers(demo)
    passed = {name: pass_rate(name, answers) for name in NAMES}
    assert max(passed.values()) <= MAX_BASE_PASS_RATE, (passed, answers)


def pass_rate(name: str, answers: list[str]) -> float:
    return sum(STYLE_CHECKS[name](answer) for answer in answers) / len(answers)


@torch.inference_mode()
def greedy_answers(demo: DemoModel) -> list[str]:
    """The answers to the held-out prompts, in one batch."""
    tokenizer = demo.tokenizer
    conversations = [[{"role": "user", "content": prompt}] for prompt in HELD_OUT_PROMPTS]
    inputs = tokenizer.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_tensors="pt",
        return_dict=True,
    )
    outputs = demo.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new_tokens = outputs[:, inputs["input_ids"].shape[1] :]
    answers: list[str] = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    return answers
