"""Section `adapters`: sixteen PEFT adapters and the base in one batch, against PEFT one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.correctness.check import Check, Setting, within
from benchmarks.correctness.checkpoints import (
    ALL_LINEARS,
    ATTENTION,
    Expected,
    greedy,
    save_adapter,
    save_model,
)
from benchmarks.correctness.comparing import text_error
from benchmarks.correctness.driving import Answer, answers, bring_in, build, greedy_request, random_prompt
from benchmarks.correctness.families import (
    FLOAT32_MARGIN,
    FLOAT32_TOLERANCE,
    NUM_TOP,
    SCORED_AND_PLAIN,
    logprob_error,
)
from benchmarks.device_memory import release
from loraplex.adapters.peft_reader import read_adapter
from loraplex.model.config import load_config

RANKS: Final = (1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 40, 48, 63, 64)
TARGETS: Final[tuple[list[str] | str, ...]] = (
    ALL_LINEARS,
    ATTENTION,
    ["q_proj", "v_proj"],
    ["down_proj"],
    ["o_proj", "gate_proj"],
    r".*layers\.(0|2)\..*(q|up)_proj",
)
NUM_BASE = 2


def adapters(setting: Setting) -> list[Check]:
    checks = []
    for family in ("llama",) if setting.tiny else ("llama", "qwen2"):
        with tempfile.TemporaryDirectory() as folder:
            expected = _by_peft(family, Path(folder), setting)
            release()
            checks += _compare(family, Path(folder), expected, setting)
            release()
    return checks


def _by_peft(family: str, root: Path, setting: Setting) -> dict[str, Expected]:
    """Return PEFT's answer to every request, by the name of its adapter's folder or of the base."""
    from peft import PeftModel

    model = save_model(root / "base", family, device=setting.torch_device, tiny=setting.tiny)
    num_tokens = 6 if setting.tiny else 48
    ranks = RANKS[::5] if setting.tiny else RANKS
    names = [*(f"rank-{rank}" for rank in ranks), *(f"base-{index}" for index in range(NUM_BASE))]
    prompts = {
        name: random_prompt(5 + 7 * index, model.config.vocab_size, index) for index, name in enumerate(names)
    }
    expected: dict[str, Expected] = {}
    for index, rank in enumerate(ranks):
        folder = root / f"rank-{rank}"
        save_adapter(
            folder,
            model,
            rank=rank,
            targets=TARGETS[index % len(TARGETS)],
            seed=rank,
            **_settings(index, rank),
        )
        with_adapter = PeftModel.from_pretrained(model, folder).eval()
        expected[folder.name] = greedy(with_adapter, prompts[folder.name], num_tokens)
        with_adapter.unload()
    for name in names[-NUM_BASE:]:
        expected[name] = greedy(model, prompts[name], num_tokens)
    return expected


def _settings(index: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"use_rslora": True} if index % 3 == 1 else {}
    if index % len(TARGETS) in (1, 2):
        found |= {"rank_pattern": {"q_proj": rank + 3}, "alpha_pattern": {"v_proj": 5}}
    return found


def _compare(family: str, root: Path, expected: dict[str, Expected], setting: Setting) -> list[Check]:
    scored, plain = _serve(root, expected, setting)
    errors = [
        text_error(found[name].token_ids, want.token_ids, want.lag)
        for found in (scored, plain)
        for name, want in expected.items()
    ]
    mixed = f"{len(expected) - NUM_BASE} adapters and {NUM_BASE} base requests in one batch"
    return [
        within(
            f"{family}, log-probabilities",
            f"{mixed}: the {NUM_TOP} likeliest tokens at every position, with PEFT one by one",
            max(logprob_error(scored[name], want) for name, want in expected.items()),
            FLOAT32_TOLERANCE,
        ),
        within(
            f"{family}, texts",
            f"{mixed}: greedy texts with PEFT's; where one differs, PEFT's logits of the two tokens",
            max(error for error, _ in errors),
            FLOAT32_MARGIN,
            texts=len(errors),
            texts_equal=sum(error == 0.0 for error, _ in errors),
        ),
    ]


def _serve(
    root: Path, expected: dict[str, Expected], setting: Setting
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """The mixed batch with log-probabilities, and again without."""
    engine = build(root / "base", "float32", setting)
    shape = load_config(root / "base").shape
    versions: dict[str, str] = {}
    for name in expected:
        if not name.startswith("base"):
            spec = read_adapter(root / name, shape)
            engine.add_adapter(spec)
            versions[name] = spec.version
    bring_in(engine, tuple(versions.values()))
    found = [
        answers(
            engine,
            [
                greedy_request(name, want.prompt, len(want.token_ids), versions.get(name), **params)
                for name, want in expected.items()
            ],
        )
        for params in SCORED_AND_PLAIN
    ]
    engine.close()
    return found[0], found[1]
