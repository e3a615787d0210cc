"""Surrogates: predictions, ranges, judging, and files that are refused."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import LENGTHS, by_hand, random_features, slot_profile

from loraplex.planner.demand import AdapterDemand, PlanError
from loraplex.planner.features import FEATURE_NAMES
from loraplex.planner.judge import Judge, Verdict
from loraplex.planner.surrogate import SurrogateJudge
from loraplex.planner.surrogate_json import (
    SurrogateError,
    read_surrogate,
    surrogate_to_json,
    write_surrogate,
)
from loraplex.planner.trees import LEAF, Tree, forest_of

QWEN = "vllm-h100-qwen-2.5-7b"


def adapters(count: int, rate_rps: float, rank: int = 16) -> list[AdapterDemand]:
    return [AdapterDemand(name=f"a-{number}", rank=rank, rate_rps=rate_rps) for number in range(count)]


@pytest.fixture
def judge() -> SurrogateJudge:
    return SurrogateJudge(
        by_hand(), slot_profile(), prompt_tokens=LENGTHS.prompt, output_tokens=LENGTHS.output
    )


def test_a_surrogate_judges_by_its_rules(judge: Judge) -> None:
    assert judge.judge(adapters(10, 1.0), 4) == Verdict(2300.0, False)
    assert judge.judge(adapters(30, 1.0), 4) == Verdict(4600.0, True)
    assert judge.judge(adapters(30, 1.0), 128) == Verdict(3450.0, True)
    assert judge.judge([], 4) == Verdict(0.0, False)


def test_slots_without_memory_are_starved(judge: Judge) -> None:
    assert judge.fits(8, 8)
    assert not judge.fits(32, 384)
    assert judge.judge(adapters(10, 1.0, rank=32), 384) == Verdict(0.0, True)


def test_queries_outside_the_training_range_say_so(judge: SurrogateJudge) -> None:
    judge.judge(adapters(10, 1.0), 4)
    assert judge.outside_range() == []
    judge.judge(adapters(80, 1.0), 4)
    judge.judge(adapters(70, 1.0), 4)
    assert judge.outside_range() == [
        "served_adapters 70 to 80, trained on 1 to 64",
        "sum_rate 70 to 80, trained on 0.1 to 40",
    ]
    outside = by_hand().predict(np.array((8, 1, 0, 64, 8, 0, 300), np.float32)).outside
    assert outside == ("max_size", "adapter_slots")


def test_a_number_that_is_none_is_outside() -> None:
    assert by_hand().predict(np.array((np.nan, 1, 0, 8, 8, 0, 4), np.float32)).outside == ("served_adapters",)


def test_requests_of_other_lengths_are_refused() -> None:
    SurrogateJudge(by_hand(), slot_profile(), prompt_tokens=204, output_tokens=31)
    for prompt_tokens, output_tokens in ((400, 30), (200, 60), (float("nan"), 30)):
        with pytest.raises(PlanError, match=r"200 prompt and 30 answer tokens, these have .* plan train"):
            SurrogateJudge(
                by_hand(), slot_profile(), prompt_tokens=prompt_tokens, output_tokens=output_tokens
            )


def test_another_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "surrogate.json"
    write_surrogate(path, by_hand())
    changed = replace(slot_profile(), max_running=7)
    for other in (slot_profile(QWEN), changed):
        with pytest.raises(PlanError, match=r"trained on the profile vllm-h100-llama.* `loraplex plan train"):
            read_surrogate(path, other)
        with pytest.raises(PlanError, match=r"trained on the profile vllm-h100-llama.* `loraplex plan train"):
            SurrogateJudge(by_hand(), other, prompt_tokens=200, output_tokens=30)


def test_a_surrogate_without_starvation_sees_it_in_the_throughput(tmp_path: Path) -> None:
    path = tmp_path / "surrogate.json"
    write_surrogate(path, replace(by_hand(), starvation=None))
    judge = SurrogateJudge(
        read_surrogate(path), slot_profile(), prompt_tokens=LENGTHS.prompt, output_tokens=LENGTHS.output
    )
    assert judge.judge(adapters(20, 1.0), 4) == Verdict(4600.0, False)
    assert judge.judge(adapters(22, 1.0), 4) == Verdict(4600.0, False), "0.91 of what is offered"
    assert judge.judge(adapters(23, 1.0), 4) == Verdict(4600.0, True)


def test_a_file_holds_the_whole_surrogate(tmp_path: Path) -> None:
    path, written = tmp_path / "surrogate.json", replace(by_hand(), accuracy={"starvation_macro_f1": 0.5})
    write_surrogate(path, written, {"date": "2026-01-01"})
    found = read_surrogate(path, slot_profile())
    assert surrogate_to_json(found) == surrogate_to_json(written)
    rows = random_features(np.random.default_rng(0), 50)
    assert (found.throughput.values(rows) == written.throughput.values(rows)).all()
    document = json.loads(path.read_text())
    assert document["environment"] == {"date": "2026-01-01"}
    assert document["units"].keys() == {*FEATURE_NAMES, "throughput", "starvation", "trained_on"}


def with_nodes(document: dict[str, Any], change: Callable[[bytes], bytes]) -> None:
    nodes = document["throughput"]["nodes"]
    changed = zlib.compress(change(zlib.decompress(base64.b64decode(nodes))))
    document["throughput"]["nodes"] = base64.b64encode(changed).decode()


def with_a_cycle(document: dict[str, Any]) -> None:
    # The last number of the nodes is the `right` of the last one, the first of these that of the root.
    with_nodes(document, lambda nodes: nodes[:-12] + bytes(12))


def with_nan(document: dict[str, Any]) -> None:
    with_nodes(document, lambda nodes: nodes.replace(np.float64(3450).tobytes(), np.float64("nan").tobytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(version=1), "version 1, this loraplex reads version 3"),
        (lambda document: document.update(kind="slots"), "kind 'slots', not 'planner surrogate'"),
        (lambda document: document.pop("throughput"), "has no 'throughput'"),
        (lambda document: document.update(more=1), "unknown 'more'"),
        (lambda document: document["ranges"].pop("sum_rate"), "has no 'sum_rate'"),
        (lambda document: document["ranges"].update(sum_rate=[2, 1]), "a least one above the greatest"),
        (lambda document: document["ranges"].update(sum_rate=[0, float("nan")]), "is not finite"),
        (lambda document: document["throughput"].update(nodes="####"), "cannot be unpacked"),
        (lambda document: document["throughput"].update(num_nodes=2), "fewer or more nodes than 2"),
        (lambda document: document["throughput"].update(num_nodes=10**12), "cannot be"),
        (lambda document: with_nodes(document, lambda nodes: nodes[:-1]), "fewer or more nodes than 3"),
        (with_a_cycle, "the nodes are no trees"),
        (with_nan, "throughput: a threshold or value is nan"),
        (lambda document: document["trained_on"].update(output_tokens=float("nan")), "output_tokens is nan"),
    ],
)
def test_a_broken_file_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "surrogate.json"
    document = json.loads(surrogate_to_json(by_hand()))
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(SurrogateError, match=f"{message}.*; train it again with `loraplex plan train`"):
        read_surrogate(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "surrogate.json", surrogate_to_json(by_hand())
    for length in (0, 1, len(text) // 2, len(text) - 3):
        path.write_text(text[:length])
        with pytest.raises(SurrogateError, match=r"not JSON, or not all of it.* train it again"):
            read_surrogate(path)
    with pytest.raises(SurrogateError, match=r"cannot be read .* make one with `loraplex plan train`"):
        read_surrogate(tmp_path / "none.json")


def test_nothing_that_is_no_number_is_written() -> None:
    accuracy = {"starvation_macro_f1": float("nan")}
    with pytest.raises(ValueError, match="JSON"):
        surrogate_to_json(replace(by_hand(), accuracy=accuracy))


def test_large_forests_are_small_files() -> None:
    leaf = Tree(LEAF, 1.0)
    tree = leaf
    for depth in range(8):
        tree = Tree(depth % 7, float(depth), tree, tree)
    text = surrogate_to_json(replace(by_hand(), throughput=forest_of([tree] * 20)))
    assert len(text) < 2 * 20 * 511


ALONE = """
import sys
for name in ("sklearn", "torch", "ray"):
    sys.modules[name] = None  # importing it fails

from pathlib import Path
from small import slot_profile
import loraplex.planner.training
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.surrogate import SurrogateJudge
from loraplex.planner.surrogate_json import read_surrogate

profile = slot_profile()
surrogate = read_surrogate(Path(sys.argv[1]), profile)
judge = SurrogateJudge(surrogate, profile, prompt_tokens=200, output_tokens=30)
print(judge.judge([AdapterDemand(name="a", rank=8, rate_rps=1.5)], 1).throughput_tok_s)

from small import made_up
try:
    loraplex.planner.training.train_forest(made_up())
except loraplex.planner.training.NoTrainerError as error:
    print(error)
"""


def test_a_surrogate_is_used_without_scikit_learn_torch_and_ray(tmp_path: Path) -> None:
    path, here = tmp_path / "surrogate.json", Path(__file__)
    write_surrogate(path, by_hand())
    folders = os.pathsep.join((str(here.parents[2]), str(here.parent)))
    command = [sys.executable, "-c", ALONE, str(path)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": folders}
    )
    first, second = done.stdout.splitlines()
    assert first == "345.0"
    assert "training needs scikit-learn" in second
    assert "pip install scikit-learn" in second
