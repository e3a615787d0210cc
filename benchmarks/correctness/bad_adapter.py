"""Section `bad_adapter`: weights that are not finite harm the requests of their own adapter, no other."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.correctness.check import Check, Setting, holds
from benchmarks.correctness.checkpoints import ALL_LINEARS, save_adapter, save_model
from benchmarks.correctness.driving import Answer, answers, bring_in, build, greedy_request, random_prompt
from benchmarks.device_memory import release
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import WEIGHTS_FILE, AdapterSpec
from loraplex.core.errors import AdapterError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.engine.core import Engine
from loraplex.model.config import load_config

NUM_WAVES = 3
"""Memory that a failed request leaves behind, NaN in it, is given to those that come after."""


def bad_adapter(setting: Setting) -> list[Check]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ranks = (4, 16) if setting.tiny else (1, 4, 8, 16, 32, 64)
        model = save_model(root / "base", "llama", device=setting.torch_device, tiny=setting.tiny)
        for rank in ranks:
            save_adapter(root / f"rank-{rank}", model, rank=rank, targets=ALL_LINEARS, seed=rank)
        del model
        release()
        shape = load_config(root / "base").shape
        good = [read_adapter(root / f"rank-{rank}", shape) for rank in ranks]
        checks = [_refused(root, value) for value in (math.nan, math.inf)]
        checks += _served(root, good, setting)
        release()
        return checks


def _refused(root: Path, value: float) -> Check:
    """Check that the reader refuses an adapter whose file has such numbers."""
    folder = _copy_with(root, value)
    try:
        read_adapter(folder, load_config(root / "base").shape)
    except AdapterError as error:
        return holds(f"a file with {value}", "is refused by the reader", "NaN or infinity" in str(error))
    return holds(f"a file with {value}", "is refused by the reader", False)


def _copy_with(root: Path, value: float) -> Path:
    """The first adapter with one row of its weights replaced."""
    from safetensors.torch import load_file, save_file

    source = sorted(root.glob("rank-*"))[0]
    folder = root / f"with-{value}"
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(source / WEIGHTS_FILE)
    first = sorted(tensors)[0]
    tensors[first][0] = value
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def _served(root: Path, good: Sequence[AdapterSpec], setting: Setting) -> list[Check]:
    """Numbers that become infinite only when multiplied pass every check of a file."""
    bad = {
        "a scale of NaN": _scaled(good[0], "nan", math.nan),
        "an infinite scale": _scaled(good[0], "inf", math.inf),
        "a scale that overflows": _scaled(good[-1], "overflow", 3e38),
        "a weight that overflows": read_adapter(_copy_with(root, 3e38), load_config(root / "base").shape),
    }
    engine = build(root / "base", "float32", setting)
    for spec in (*good, *bad.values()):
        engine.add_adapter(spec)
    bring_in(engine, [spec.version for spec in good])
    before = answers(engine, _requests("before", good, setting))
    checks = [
        check for name, spec in bad.items() for check in _beside(engine, name, spec, good, before, setting)
    ]
    engine.close()
    return checks


def _scaled(spec: AdapterSpec, version: str, scale: float) -> AdapterSpec:
    return replace(
        spec, version=version, modules=tuple(replace(module, scale=scale) for module in spec.modules)
    )


def _requests(wave: str, good: Sequence[AdapterSpec], setting: Setting) -> list[EngineRequest]:
    versions = [None, *(spec.version for spec in good)]
    return [
        greedy_request(
            f"{wave}/{index}", random_prompt(5 + 11 * index, 250, index), 6 if setting.tiny else 24, version
        )
        for index, version in enumerate(versions)
    ]


def _beside(
    engine: Engine,
    name: str,
    spec: AdapterSpec,
    good: Sequence[AdapterSpec],
    before: dict[str, Answer],
    setting: Setting,
) -> list[Check]:
    failed, changed, errors = 0, [], set()
    for wave in range(NUM_WAVES):
        requests = _requests(f"{name} {wave}", good, setting)
        own = greedy_request("bad", random_prompt(40, 250, 99), 8, spec.version)
        found = answers(engine, [*requests[:2], own, *requests[2:]])
        broken = found.pop("bad")
        failed += broken.finish_reason is FinishReason.ERROR
        errors.add(broken.error)
        changed += [
            request_id
            for request_id, answer in found.items()
            if answer.token_ids != before[f"before/{request_id.rpartition('/')[2]}"].token_ids
        ]
    return [
        holds(
            f"{name}: its own requests",
            f"all {NUM_WAVES} fail, and say why",
            failed == NUM_WAVES and all(error is not None and "finite" in error for error in errors),
        ),
        holds(
            f"{name}: the others",
            f"{len(before)} requests beside each of them have the texts they had before, none fails",
            not changed,
            changed=changed,
        ),
    ]
