"""`loraplex plan`: made from tables and workloads, shown, and checked in the twin."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from small import made_up, own_on_cpu, simulated, slot_profile
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.cli.plan_profile import profile_of_plan
from loraplex.cli.plan_show import _much_quicker
from loraplex.cli.plan_train import _save_rules
from loraplex.core.errors import UserError
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.planner.dataset import make_dataset
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.features import FEATURE_NAMES
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.objectives import Objective
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import demand_of, plan_to_json, read_plan
from loraplex.planner.surrogate_json import read_surrogate
from loraplex.workload.jsonl import write_workload
from loraplex.workload.request import WorkloadHeader, WorkloadRequest

SLOTS, OURS = "vllm-h100-llama-3.1-8b", "h200-llama-2-7b"
LENGTHS = ("--mean-prompt-tokens", "250", "--mean-output-tokens", "230")
SHORT = ("--mean-prompt-tokens", "200", "--mean-output-tokens", "30")


ONE_GPU = Plan(
    gpus=(GpuPlan(adapters=(AdapterDemand(name="a", rank=8, rate_rps=0.1),), num_slots=8),),
    profile=SLOTS,
    packer="random",
    prompt_tokens=9,
    output_tokens=9,
)


def plan(*args: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, args)], env={"COLUMNS": "200"})


def make(*args: object) -> Result:
    return plan("make", "--no-compare", *args)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate each GPU for minutes at most, and floods for seconds."""
    monkeypatch.setattr("loraplex.planner.trial._JUDGED_S", (300.0, 300.0))
    monkeypatch.setattr("loraplex.planner.trial._OURS_JUDGED_S", 10.0)
    monkeypatch.setattr("loraplex.planner.trial._JUDGED_REQUESTS", 100)
    monkeypatch.setattr("loraplex.planner.trial._OVERLOAD_S", 5.0)
    monkeypatch.setattr("loraplex.planner.most_served._OUR_FLOOD_S", 2.0)
    monkeypatch.setattr("loraplex.planner.most_served._SLOTS_FLOOD_S", 20.0)


def words_of(result: Result) -> str:
    return " ".join((result.output.replace("│", " ") + str(result.exception or "")).split())


def table(folder: Path, num_adapters: int, rate_rps: float, ranks: tuple[int, ...] = (8, 32)) -> Path:
    lines = [f"a{index},{ranks[index % len(ranks)]},{rate_rps}" for index in range(num_adapters)]
    path = folder / "adapters.csv"
    path.write_text("\n".join(["name,rank,rate_rps", *lines]) + "\n")
    return path


@pytest.mark.parametrize("packer", ["max-pack", pytest.param("least-rate", marks=pytest.mark.slow)])
def test_a_plan_is_made_drawn_shown_and_holds_on_other_traffic(tmp_path: Path, packer: str) -> None:
    out, figures, picture = tmp_path / "plan.json", tmp_path / "figures.json", tmp_path / "plan.png"
    made = plan(
        *("make", "--profile", SLOTS, "--adapters", table(tmp_path, 40, 0.05), *LENGTHS),
        *("--out", out, "--json", figures, "--plot", picture, "--packer", packer),
    )
    assert made.exit_code == 0, made.output
    assert f"40 adapters on 1 GPU, packed by {packer} for {SLOTS}" in made.output
    found = read_plan(out)
    assert {each.name for each in demand_of(found).adapters} == {f"a{index}" for index in range(40)}
    assert "one GPU more" in made.output
    written = json.loads(figures.read_text())
    assert written["holds"]
    assert written["gpus"][0]["adapters"] == 40
    assert 0 < written["gpus"][0]["utilisation"] < 1
    assert [each["plan"] for each in written["alternatives"]][-1] == "dlora"
    assert written["alternatives"][0]["plan"] == "this plan"
    assert picture.stat().st_size > 1000
    assert "40 adapters on 1 GPU" in plan("show", out).output
    listed = plan("show", out, "--adapters").output.splitlines()
    assert {line.split()[1] for line in listed if line.split()[2:] in (["8", "0.05"], ["32", "0.05"])} == {
        f"a{index}" for index in range(40)
    }
    checked = plan("check", out, "--seeds", "7", "--seconds", "2m")
    assert checked.exit_code == 0, checked.output
    assert "0 of 1" in checked.output
    refused = plan("check", out, "--seconds", "inf")
    assert refused.exit_code == 2
    assert "'inf' is no time" in words_of(refused)


@pytest.mark.usefixtures("short_runs")
def test_a_plan_of_our_engine_has_no_slots(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    made = make("--profile", OURS, "--adapters", table(tmp_path, 12, 0.5), *LENGTHS, "--out", out)
    assert made.exit_code == 0, made.output
    assert [(len(gpu.adapters), gpu.num_slots) for gpu in read_plan(out).gpus] == [(12, None)]


@pytest.mark.slow
def test_copies_of_an_adapter_are_shown_and_checked_as_one(tmp_path: Path) -> None:
    out, adapters = tmp_path / "plan.json", tmp_path / "adapters.csv"
    adapters.write_text("name,rank,rate_rps\nbusy,16,2\nquiet,16,0.1\n")
    asked = ("--profile", SLOTS, "--adapters", adapters, *LENGTHS, "--packer", "dlora")
    made = make(*asked, "--gpus", "2", "--out", out, "--plot", tmp_path / "plan.png")
    assert made.exit_code == 0, words_of(made)
    assert "2 adapters in 3 copies on 2 GPUs, packed by dlora" in made.output
    assert {each.name: each.rate_rps for each in demand_of(read_plan(out)).adapters} == {
        "busy": 2,
        "quiet": 0.1,
    }
    assert plan("check", out, "--seeds", "1", "--seconds", "300").exit_code == 0
    assert make(*asked, "--out", out).exit_code == 0
    assert len(read_plan(out).gpus) == 1


def test_without_a_file_the_plan_is_shown_only(tmp_path: Path) -> None:
    adapters = table(tmp_path, 8, 0.05)
    made = make("--profile", SLOTS, "--adapters", adapters, *LENGTHS, "--packer", "max-base")
    assert made.exit_code == 0, words_of(made)
    assert "8 adapters on 1 GPU" in made.output
    assert "no file was written; --out PLAN.json writes the plan" in made.output
    assert list(tmp_path.iterdir()) == [adapters]


def test_a_check_that_finds_starvation_fails(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    made = make(
        *("--profile", SLOTS, "--adapters", table(tmp_path, 320, 0.1), *LENGTHS),
        *("--packer", "max-base-half", "--out", out),
    )
    assert made.exit_code == 1
    assert f"wrote {out}" in made.output
    assert "plan with --packer max-pack" in words_of(made)
    checked = plan("check", out, "--seeds", "1", "--seconds", "300")
    assert checked.exit_code == 1
    assert "starving" in checked.output or "leave no memory" in checked.output


@pytest.mark.usefixtures("short_runs")
def test_a_plan_holds_to_its_limits_and_is_checked_for_them(tmp_path: Path) -> None:
    out, adapters = tmp_path / "plan.json", table(tmp_path, 24, 0.25)
    asked = ("--profile", SLOTS, "--adapters", adapters, *LENGTHS, "--out", out, "--no-compare")
    assert make(*asked).exit_code == 0
    num_gpus = len(read_plan(out).gpus)
    made = make(*asked, "--slo-itl", "20ms", "--slo-ttft", "1s")
    assert made.exit_code == 0, words_of(made)
    assert "for each GPU: mean TTFT at most 1,000 ms, mean ITL at most 20 ms" in made.output
    assert len(read_plan(out).gpus) > num_gpus
    assert read_plan(out).objective == Objective(ttft_s=1.0, itl_s=0.02)
    alone = make(*asked, "--slo-itl", "1ms")
    assert "misses the objective even alone on a GPU: mean ITL" in words_of(alone)
    tight = replace(read_plan(out), objective=Objective(ttft_s=0.001))
    out.write_text(plan_to_json(tight))
    checked = plan("check", out, "--seeds", "1", "--seconds", "60")
    assert checked.exit_code == 1
    assert "above 1 ms; plan with more --gpus" in words_of(checked)


def test_a_workload_says_what_is_to_be_served(tmp_path: Path) -> None:
    workload, out = tmp_path / "w.jsonl", tmp_path / "plan.json"
    requests = [
        WorkloadRequest(arrival_s=index / 2, prompt_tokens=100, output_tokens=50, adapter=index % 3)
        for index in range(60)
    ]
    write_workload(workload, requests, WorkloadHeader(ranks=(8, 16, 8), duration_s=30.0))
    made = make("--profile", SLOTS, "--workload", workload, "--out", out)
    assert made.exit_code == 0, made.output
    assert read_plan(out).profile_sha256 == fingerprint(slot_profile())
    adapters = demand_of(read_plan(out)).adapters
    assert sorted((each.rank, each.rate_rps) for each in adapters) == [
        (8, pytest.approx(2 / 3)),
        (8, pytest.approx(2 / 3)),
        (16, pytest.approx(2 / 3)),
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "give --workload FILE or --adapters FILE or --from URL"),
        (("--adapters", "TABLE", "--from", "http://127.0.0.1:9"), "one of them"),
        (("--from", "http://127.0.0.1:9", *LENGTHS), "leave --mean-prompt-tokens and the like out"),
        (("--from", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--adapters", "TABLE"), "give --mean-prompt-tokens and --mean-output-tokens"),
        (("--workload", "TABLE", "--mean-prompt-tokens", "5"), "leave --mean-prompt-tokens and the like out"),
        (("--adapters", "TABLE", *LENGTHS, "--gpus", "0"), "Invalid value for '--gpus'"),
        (("--adapters", "TABLE", *LENGTHS, "--packer", "max-pak"), "max-pack"),
        (("--adapters", "BUSY", *LENGTHS), "starves a GPU alone"),
        (("--adapters", "FLOOD", *LENGTHS), "adapter 'a1' starves a GPU alone: its 5.25e+06 requests/s"),
        (("--adapters", "FLOOD", *LENGTHS, "--packer", "random"), "adapter 'a1' starves a GPU alone"),
        (
            ("--adapters", "TABLE", "--mean-prompt-tokens", "nan", "--mean-output-tokens", "5"),
            "Invalid value for '--mean-prompt-tokens'",
        ),
        (
            ("--adapters", "TABLE", "--mean-prompt-tokens", "1e5", "--mean-output-tokens", "5"),
            "requests are too long",
        ),
        (("--adapters", "TABLE", *LENGTHS, "--headroom", "nan"), "Invalid value for '--headroom'"),
        (("--adapters", "RANKS", *LENGTHS), "adapter 'a1' has rank 1,024, and engines serve ranks up to 512"),
        (
            ("--adapters", "TABLE", *LENGTHS, "--surrogate", "x", "--slo-itl", "1s"),
            "knows throughput and starvation",
        ),
        (
            ("--adapters", "TABLE", *LENGTHS, "--slo-itl", "1.5x"),
            "'1.5x' is no time; write it like 2s or 500ms",
        ),
        (("--adapters", "MANY", *LENGTHS, "--gpus", "1", "--packer", "max-base"), "GPUs would do"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    def of(name: str, num_adapters: int, rate_rps: float, ranks: tuple[int, ...] = (8, 32)) -> str:
        folder = tmp_path / name
        folder.mkdir()
        return str(table(folder, num_adapters, rate_rps, ranks))

    files = {
        "TABLE": of("some", 2, 0.1),
        "BUSY": of("busy", 2, 500.0),
        "FLOOD": of("flood", 2, 5e6),
        "MANY": of("many", 150, 0.4),
        "RANKS": of("ranks", 2, 0.1, (8, 1024)),
    }
    given = [files.get(arg, arg) for arg in args]
    refused = make("--profile", SLOTS, "--out", tmp_path / "plan.json", *given)
    fails = ("no server answers", "starves a GPU", "too long", "GPUs would do", "up to 512")
    assert refused.exit_code == (1 if any(each in words for each in fails) else 2), words_of(refused)
    assert words in words_of(refused)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.usefixtures("short_runs")
def test_larger_ranks_are_planned_for_cpus_only(tmp_path: Path) -> None:
    profile, out = tmp_path / "cpu.json", tmp_path / "plan.json"
    write_profile(profile, own_on_cpu())
    adapters = table(tmp_path, 2, 0.1, ranks=(8, 1024))
    made = make("--profile", profile, "--adapters", adapters, *LENGTHS, "--out", out)
    assert made.exit_code == 0, words_of(made)
    assert {each.rank for each in demand_of(read_plan(out)).adapters} == {8, 1024}
    refused = plan("check", out, "--profile", OURS)
    assert "adapter 'a1' has rank 1,024, and engines serve ranks up to 512 on a GPU" in words_of(refused)


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "damaged", "newer"])
@pytest.mark.parametrize("command", ["show", "check"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / "plan.json"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_text(
            {"empty": "", "damaged": '{"loraplex_plan": 1, "gp', "newer": '{"loraplex_plan": 9}'}[kind]
        )
    refused = plan(command, path)
    assert refused.exit_code == 1
    assert "`loraplex plan make`" in words_of(refused)


@pytest.mark.parametrize("option", ["--adapters", "--workload", "--surrogate"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, option: str) -> None:
    asked: tuple[object, ...] = ("--profile", SLOTS, "--out", tmp_path / "plan.json")
    if option != "--workload":
        asked = (*asked, *LENGTHS)
    if option == "--surrogate":
        asked = (*asked, "--adapters", table(tmp_path, 2, 0.1))
    empty = tmp_path / "empty"
    empty.touch()
    for path in (tmp_path / "none", tmp_path, empty):
        refused = make(*asked, option, path)
        assert refused.exit_code == 1
        assert str(path) in words_of(refused)


def test_an_adapter_larger_than_a_gpu_is_named(tmp_path: Path) -> None:
    profile = slot_profile()
    write_slot_profile(
        tmp_path / "small.json", replace(profile, memory=replace(profile.memory, tokens=100_000.0))
    )
    adapters = table(tmp_path, 3, 0.1, ranks=(8, 512))
    for packer in ("max-pack", "least-rate", "random"):
        refused = make(
            *("--profile", tmp_path / "small.json", "--adapters", adapters, *LENGTHS, "--packer", packer),
            *("--out", tmp_path / "plan.json"),
        )
        assert refused.exit_code == 1
        assert "adapter 'a1' (rank 512) is larger than a GPU has memory for" in words_of(refused)


def test_a_plan_for_fewer_gpus_than_there_are_says_so_when_it_is_made_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    asked = (
        "--profile",
        SLOTS,
        "--adapters",
        table(tmp_path, 2, 0.05),
        *LENGTHS,
        "--gpus",
        "3",
        "--out",
        out,
    )
    made = make(*asked, "--packer", "max-base", "--no-compare")
    assert made.exit_code == 0, words_of(made)
    for said in (made, plan("show", out)):
        assert "1 of the 3 GPUs will do, and the plan has nothing for the other 2" in words_of(said)
        assert "`loraplex fleet scale 1`" in words_of(said)


def test_a_plan_is_not_checked_with_a_profile_of_another_kind_of_engine(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    out.write_text(plan_to_json(ONE_GPU))
    refused = plan("check", out, "--profile", OURS)
    assert refused.exit_code == 1
    assert f"judged with the profile {OURS}; the plan was made with {SLOTS}" in refused.stderr
    assert f"give the one that the plan was made with ({SLOTS})" in words_of(refused)


def test_a_plan_is_judged_with_its_profile_as_it_is_now_and_says_if_that_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, file, moved = slot_profile(), tmp_path / "profile.json", tmp_path / "moved.json"
    made = replace(ONE_GPU, profile=str(file), profile_sha256=fingerprint(profile))
    old = replace(made, profile_sha256=None)

    def said(read: Plan, given: Path | None = None) -> str:
        profile_of_plan(read, given)
        return capsys.readouterr().err

    write_slot_profile(moved, profile)
    with pytest.raises(UserError, match=r"no file or named profile .*name it by --profile"):
        profile_of_plan(made, None)
    assert said(made, moved) == said(made, Path(SLOTS)) == "", "the same under other names"
    write_slot_profile(file, replace(profile, max_running=7))
    assert profile_of_plan(made, None).max_running == 7
    assert f"the profile {file} has changed since the plan was made" in capsys.readouterr().err
    other = Path("vllm-h100-qwen-2.5-7b")
    assert f"profile {other} is not the one that the plan was made with ({file})" in said(made, other)
    assert said(old) == "", "an old plan knows its profile by name"
    assert f"judged with the profile {moved}; the plan was made with {file}" in said(old, moved)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small surrogate that `plan train` made of a complete dataset, with its rules."""
    folder = tmp_path_factory.mktemp("trained")
    dataset, rows = folder / "runs.jsonl", made_up()
    make_dataset(dataset, replace(simulated(), duration_s=3600.0), num_rows=0)
    columns = (rows.features[:, :7], rows.offered_tok_s, rows.throughput_tok_s, rows.is_starved)
    with dataset.open("a") as file:
        for row in np.column_stack((np.arange(len(rows)), *columns)).tolist():
            file.write(json.dumps(row) + "\n")
    asked = ("train", "--profile", SLOTS, *SHORT, "--dataset", dataset, "--rows", len(rows), "--small")
    done = plan(*asked, "--out", folder / "surrogate.json", "--rules", folder / "rules.py")
    assert done.exit_code == 0, words_of(done)
    assert "runs that it was not trained on: throughput" in done.output
    return folder


@pytest.mark.slow
def test_the_rules_of_a_trained_surrogate_are_written_as_text_or_as_python(trained: Path) -> None:
    surrogate = read_surrogate(trained / "surrogate.json")
    assert surrogate.starvation is not None
    _save_rules(trained / "rules.txt", surrogate)
    text = (trained / "rules.txt").read_text()
    assert text.count("->") == surrogate.throughput.num_rules + surrogate.starvation.num_rules
    module: dict[str, Any] = {}
    exec((trained / "rules.py").read_text(), module)
    assert all(f"{name}: " in module["__doc__"] for name in FEATURE_NAMES)
    rows = made_up().features.astype(np.float32)
    for function, forest in (("most_tok_s", surrogate.throughput), ("starves", surrogate.starvation)):
        found = [module[function](*row) for row in rows.astype(np.float64).tolist()]
        assert found == forest.values(rows).tolist()


@pytest.mark.slow
def test_a_surrogate_is_asked_instead_of_the_twin(trained: Path, tmp_path: Path) -> None:
    out, adapters = tmp_path / "plan.json", table(tmp_path, 40, 0.05)
    asked = ("--adapters", adapters, "--out", out, "--surrogate", trained / "surrogate.json")
    made = make(*asked, "--profile", SLOTS, *SHORT)
    assert made.exit_code == 0, words_of(made)
    assert {each.name for each in demand_of(read_plan(out)).adapters} == {f"a{index}" for index in range(40)}
    assert "max_size 32, trained on" in words_of(made)
    assert "leave --surrogate out, and the twin judges" in words_of(made)
    longer = make(*asked, "--profile", SLOTS, "--mean-prompt-tokens", "900", "--mean-output-tokens", "30")
    assert "was trained on requests of 200 prompt and 30 answer tokens" in words_of(longer)
    other = make(*asked, "--profile", "vllm-h100-qwen-2.5-7b", *SHORT)
    assert "was trained on the profile" in words_of(other)
    with_limit = make(*asked, "--profile", SLOTS, *SHORT, "--slo-ttft", "1s")
    assert "leave it out, and the twin judges" in words_of(with_limit)
    ours = make(*asked, "--profile", OURS, *SHORT)
    assert (with_limit.exit_code, ours.exit_code) == (2, 2)
    assert "of one without; leave it out" in words_of(ours)


def test_a_packer_that_is_much_quicker_on_as_many_gpus_is_pointed_out() -> None:
    ours = {"plan": "this plan", "gpus": 3, "ttft_s": 4.0, "found": "nobody starves"}
    others = [
        {"plan": "one GPU more", "gpus": 4, "ttft_s": 0.1, "found": "nobody starves"},
        {"plan": "max-base", "gpus": 2, "ttft_s": 0.2, "found": "starves GPU 1"},
        {"plan": "random", "found": "starves GPUs even with 12"},
        {"plan": "dlora", "gpus": 3, "ttft_s": 0.5, "found": "nobody starves"},
    ]
    assert _much_quicker([ours, *others]) == others[-1]
    assert _much_quicker([ours, *others[:-1]]) is None
    assert _much_quicker([{**ours, "ttft_s": 0.9}, *others]) is None


def test_making_and_checking_need_neither_torch_nor_scikit_learn(tmp_path: Path) -> None:
    code = (
        "import sys, loraplex.planner.make, loraplex.planner.check, loraplex.planner.adapter_table\n"
        "print([name for name in ('torch', 'ray', 'sklearn', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
