"""`loraplex profile` on a CPU with a tiny model: what it measures, writes, shows and refuses."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from click.testing import Result
from tiny import save_model
from typer.testing import CliRunner

from loraplex.bench import profile_scenarios
from loraplex.bench.alternating import at_usual_pace, time_alternating, time_within, undisturbed
from loraplex.bench.profile_merges import measure_merges
from loraplex.bench.profile_progress import PhaseProgress, Progress
from loraplex.bench.profile_reads import _pinned_reader, _plain_reader, _saved, _seconds
from loraplex.bench.profile_scenarios import ProfileOptions
from loraplex.bench.profile_serving import measure_serving
from loraplex.bench.profile_steps import StepCases, StepSamples, fit_steps, measure_steps
from loraplex.bench.random_engine import (
    RandomEngineOptions,
    build_random_engine,
    random_spec,
    random_specs,
    register,
)
from loraplex.bench.step_cases import (
    CaseLimits,
    StepAdapter,
    StepCase,
    held_out_decodes,
    held_out_prompts,
    step_cases,
)
from loraplex.cli.main import app
from loraplex.core.clock import ManualClock
from loraplex.core.errors import CapacityError, LoraplexError
from loraplex.core.paths import cache_dir
from loraplex.engine.adapter_loader import resident_bytes
from loraplex.engine.cpu_build import plan_cpu
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.engine.executor import LandedFlight
from loraplex.engine.options import EngineOptions
from loraplex.engine.profile_subject import profile_path, subject_of
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.held_out import HeldOut
from loraplex.perf.least_squares import quality_of
from loraplex.perf.profile_json import read_profile
from loraplex.perf.step_cost import StepFeatures, StepSample
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.step_features import step_features
from loraplex.scheduling.work import StepWork

TINY = config_of_shape("tiny").shape


def profile(*args: str) -> Result:
    return CliRunner().invoke(app, ["profile", *args])


@pytest.mark.slow
def test_a_profile_is_written_where_an_engine_of_this_kind_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").symlink_to(cache_dir() / "kernels")  # they take longer to compile than to measure
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path))
    num_threads, shares, measure = torch.get_num_threads(), list[float](), profile_scenarios.profile_machine

    def watched(options: ProfileOptions, progress: Progress) -> CostModel:
        return measure(options, lambda phase, share: (shares.append(share), progress(phase, share))[1])

    monkeypatch.setattr(profile_scenarios, "profile_machine", watched)
    # Every third case: which there are is tested below.
    monkeypatch.setattr(profile_scenarios, "step_cases", lambda *limits: step_cases(*limits)[::3])
    result = profile("--shape", "tiny", "--device", "cpu", "--repeats", "1", "--threads", "1")
    assert result.exit_code == 0, result.output
    subject = subject_of(TINY, "cpu", torch.float32)
    model = read_profile(profile_path(subject), subject)
    assert str(tmp_path) in result.output.replace("\n", "")
    assert model.measured
    assert model.bus is None
    assert model.step_s(StepFeatures(num_decodes=4, decode_positions=100)) > 0
    assert model.read_s(1 << 20) > 0
    assert 0 < model.merge_s(1 << 20) < 60
    assert model.step.quality is not None
    assert model.step.quality.num_samples > 30
    assert "engine step" in result.output
    assert "held out: decode" in result.output
    assert model.held_out is not None
    # One of the 24 steps that decode is larger than the largest fitted case, and left out.
    assert (model.held_out.decode.num_samples, model.held_out.prefill.num_samples) == (23, 24)
    assert model.held_out.load.num_samples == 6
    memory = model.memory
    assert memory is not None
    assert memory.max_context == 512
    assert (memory.token_bytes, memory.block_tokens) == (2 * 2 * 32 * 4, 16)
    # Of the engine that would serve here, not of the small one that was measured.
    plan = plan_cpu(EngineOptions(model=""), config_of_shape("tiny"), torch.float32)
    assert (memory.arena_bytes, memory.kv_tokens) == (None, plan.num_blocks * 16)
    assert memory.host_bytes > 0
    assert (memory.step_tokens, memory.position_cost) == (plan.work.max_tokens, plan.work.position_cost)
    spec = random_spec("one", TINY, 16, ("q_proj", "down_proj"))
    in_memory = resident_bytes(spec, TINY, torch.float32)
    assert memory.adapter_bytes(16, ("q_proj", "down_proj")) == in_memory
    assert torch.get_num_threads() == num_threads
    assert (shares[0], shares[-1]) == (0, pytest.approx(1))
    assert all(0 <= share <= 1 for share in shares)
    assert len({share for share in shares if 0.1 < share < 0.9}) > 5, "it is said how far it is"
    assert [file.suffix for file in (tmp_path / "profiles").iterdir()] == [".json"], "no other file is left"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CostModel]:
    """Return the models that are found instead of measuring, the last one first."""
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path / "cache"))
    subject = subject_of(TINY, "cpu", torch.float32)
    good = quality_of([1.0, 2.0], [1.1, 2.0])
    guessed = default_cost_model(subject, TINY, num_cores=2)
    found = [
        replace(guessed, measured=True, held_out=HeldOut(decode=good, prefill=good, serving=good, load=good))
    ]

    def measure(options: ProfileOptions, progress: Progress) -> CostModel:
        for phase in ("engine", "steps", "disk"):
            for done in (0.1, 0.2):
                progress(phase, done)
        return found[-1]

    monkeypatch.setattr(profile_scenarios, "profile_machine", measure)
    return found


def test_a_profile_that_fits_badly_is_kept_with_a_warning(measured: list[CostModel], tmp_path: Path) -> None:
    good = measured[0]
    out = tmp_path / "p.json"
    assert "warning" not in profile("--device", "cpu", "--json", str(out)).output
    assert good.held_out is not None
    poor = quality_of([1.0, 2.0, 1.0] * 2, [3.0, 1.0, 2.0] * 2)
    measured.append(replace(good, held_out=replace(good.held_out, prefill=poor)))
    result = profile("--device", "cpu", "--json", str(out))
    assert result.exit_code == 0
    assert "warning: R² of held out: prefill is under 0.5: other programs were probably" in result.stderr
    assert "run this again" in result.stderr
    assert read_profile(out) == measured[-1]


def test_few_samples_are_judged_by_their_mean_error(measured: list[CostModel]) -> None:
    good = measured[0]
    assert good.held_out is not None
    few = quality_of([1.0, 2.0], [1.3, 1.3])  # an R² that says nothing
    measured.append(replace(good, held_out=replace(good.held_out, load=few)))
    result = profile("--device", "cpu")
    assert "warning" not in result.stderr
    [row] = [line for line in result.stdout.splitlines() if "held out: load" in line]
    assert row.split()[-4:] == ["2", "-", f"{few.mean_error:.1%}", f"{few.worst_error:.0%}"]
    assert "this profile is in use from now on: " in result.stdout
    measured.append(replace(good, held_out=replace(good.held_out, load=quality_of([1.0, 2.0], [3.0, 5.0]))))
    assert "warning: the mean error of held out: load is over 50%" in profile("--device", "cpu").stderr


def test_without_a_terminal_each_phase_is_a_line_with_the_name_of_the_folder(
    measured: list[CostModel], tmp_path: Path
) -> None:
    save_model(tmp_path / "somewhere" / "far" / "my-model")
    result = profile("--device", "cpu", "--model", str(tmp_path / "somewhere" / "far" / "my-model"))
    assert result.exit_code == 0, result.output
    expected, *lines = result.stderr.splitlines()
    assert "measuring my-model: on two cores, some 10 min for a tiny model and 2 h 0 min for" in expected
    assert "--quick takes two minutes" in expected
    assert lines == [f"measuring my-model: {each}, 10%" for each in ("engine", "steps", "disk")]


def test_what_is_interrupted_says_that_nothing_was_kept(
    measured: list[CostModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: ProfileOptions, progress: Progress) -> CostModel:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_scenarios, "profile_machine", interrupted)
    result = profile("--device", "cpu", "--repeats", "2", "--json", str(tmp_path / "p.json"))
    assert result.exit_code == 130
    expected, stopped = result.stderr.splitlines()
    assert "on two cores, some 1 min for a tiny model and 14 min for" in expected
    assert "--repeats" not in expected
    assert stopped == "stopped: nothing was kept of what was measured"
    assert not (tmp_path / "p.json").exists()


def test_on_a_narrow_terminal_the_phase_is_seen(
    measured: list[CostModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / ("long" * 20) / "my-model"
    save_model(folder)
    result = profile("--device", "cpu", "--model", str(folder))
    assert "measuring my-model: disk" in result.stderr


def test_the_configuration_of_a_model_is_not_written_over(measured: list[CostModel], tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    save_model(folder)
    for name in ("config.json", "generation_config.json"):
        before = (folder / name).read_bytes()
        result = profile("--device", "cpu", "--model", str(folder), "--json", str(folder / name))
        assert result.exit_code == 2
        assert "is read here, and would be lost" in " ".join(result.output.replace("│", " ").split())
        assert (folder / name).read_bytes() == before


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--shape", "tiny", "--model", "x"), "give --model or --shape, not both"),
        (("--json", "/nonexistent/a.json"), "name a file in a folder that exists"),
        (("--repeats", "0"), "greater than or equal to 1"),
        (("--repeats", "3", "--quick"), "--quick decides the repeats itself"),
    ],
)
def test_bad_usage_says_what_would_be_good(args: tuple[str, ...], reason: str) -> None:
    result = profile("--device", "cpu", *args)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--shape", "llama-9"), "known are tiny, llama-2-7b"),
        (("--shape", "llama-2-7b"), "too large for --device cpu"),
        (("--device", "tpu"), "choose auto, cpu or cuda"),
        (("--dtype", "int8"), "choose auto, float32"),
        (("--model", "/nonexistent/model"), "/nonexistent/model"),
    ],
    ids=["shape", "large shape", "device", "dtype", "model"],
)
def test_what_does_not_exist_is_answered_with_what_does(args: tuple[str, ...], reason: str) -> None:
    result = profile("--device", "cpu", *args)
    assert isinstance(result.exception, LoraplexError)
    assert reason in str(result.exception)


ADAPTERS = [
    StepAdapter(version=f"{rank}-{index}", rank=rank, num_bytes=100 * rank)
    for rank in (8, 64)
    for index in range(128)
]


def features_of(case: StepCase) -> StepFeatures:
    """Return the features of the step in which prompts join requests that have generated nothing yet."""
    tokens = [(n, 1) for n in case.contexts] + [(0, n) for n in case.prompts]
    used = [case.adapter_of(index) for index in range(len(tokens))]
    chunks = [
        Chunk("", None if adapter is None else adapter.version, start, [0] * count, [], True)
        for (start, count), adapter in zip(tokens, used, strict=True)
    ]
    return step_features(chunks, {each.version: each.num_bytes for each in case.adapters}.__getitem__)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_cases_fit_the_engine_and_tell_every_cost_apart(on_gpu: bool) -> None:
    work = StepWork(max_tokens=2048, position_cost=4e-5)
    cases = step_cases(ADAPTERS, CaseLimits(on_gpu=on_gpu, max_context=2048, max_tokens=40_000, work=work))
    assert all(case.max_context <= 2048 and case.num_tokens <= 40_000 for case in cases)
    assert all(sum(work.cost(0, n) for n in case.prompts) <= work.max_tokens for case in cases)
    features = [features_of(case) for case in cases]
    base = [step for step in features if step.num_adapters == 0]
    assert len({step.decode_positions / step.num_decodes for step in base if step.num_decodes}) > 2
    assert len({step.num_prompts for step in base}) > 2
    assert len({step.num_adapters for step in features}) > 4
    assert any(step.num_decodes and step.num_prompts and step.num_adapters for step in features)
    if on_gpu:
        alone = {step.num_decodes for step in base if not step.num_prompts}
        assert alone == set(DECODE_ROWS), "the curve has a size for every graph"


def test_cases_of_many_requests_have_behind_them_what_a_small_cache_holds() -> None:
    limits = CaseLimits(on_gpu=False, max_context=512, max_tokens=7680, work=StepWork(max_tokens=2048))
    assert limits.contexts_held(16, 64) == limits.contexts(16, 64)
    held = limits.contexts_held(96, 64)
    assert 64 * 96 > sum(held) > 30 * 96
    assert not limits.fits(StepCase(contexts=limits.contexts(96, 64)))
    assert held in {case.contexts for case in step_cases(ADAPTERS, limits)}
    with pytest.raises(CapacityError, match="a KV cache for 16 tokens is too small to measure one request"):
        replace(limits, max_tokens=16).check()


def test_requests_that_decode_have_contexts_of_all_lengths_about_the_mean() -> None:
    limits = CaseLimits(on_gpu=False, max_context=512, max_tokens=20_000, work=StepWork())
    assert limits.contexts(1, 16) == (12,)
    contexts = limits.contexts(200, 50)
    assert sum(contexts) / 200 == pytest.approx(50, rel=0.05)
    assert min(contexts) < 50 / 4
    assert max(contexts) > 50 * 4
    assert max(limits.contexts(200, 400)) == 384


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_sample_has_what_was_in_the_step_that_was_timed(runs_ahead: bool) -> None:
    """Prompts are read in two steps, and those read first decode in the second already: contexts are what
    the engine has them at, not what the case asks for."""
    engine = build_random_engine(
        RandomEngineOptions(
            shape="tiny", device="cpu", dtype=torch.float32, max_step_tokens=600, runs_ahead=runs_ahead
        )
    )
    specs = random_specs("timed", "tiny", num_adapters=2, ranks=(8,), modules="q,k,v")
    adapters = tuple(StepAdapter(version=v, rank=8, num_bytes=800) for v in register(engine, specs))
    cases = StepCases(
        fitted=[StepCase(contexts=(300, 300, 300), adapters=adapters)],
        decodes=[StepCase(contexts=(100, 90, 110), prompts=(10,), adapters=adapters)],
        prompts=[StepCase(prompts=(10, 20), adapters=adapters[:1])],
    )
    found = measure_steps(engine, cases, vocab_size=TINY.vocab_size, repeats=2, report=lambda done: None)
    engine.close()
    [(decodes, _)], [(joined, _)], [(prompts, _)] = found
    # In the second step, the first that yields three tokens, the third prompt is read. It and seven more
    # settle; of the sixteen after them the ninth is in the middle, and the eighteenth of all.
    assert decodes.decode_positions == 2 * (300 + 17) + (300 + 16)
    assert (decodes.num_decodes, decodes.num_prompts, decodes.num_adapters) == (3, 0, 2)
    assert (joined.num_adapters, joined.adapter_bytes) == (2, 1600)
    assert joined.row_adapter_bytes == (3 + 10) * 800
    assert (joined.num_decodes, joined.num_prompts) == (3, 1)
    assert (joined.num_prompt_tokens, joined.prompt_pairs) == (10, 50)
    # One step reads them and eight settle. Then come one without a prompt, one with, and where the engine
    # runs ahead one that was under way: the second with a prompt is the thirteenth, or the fifteenth.
    assert joined.decode_positions == 300 + 3 * (14 if runs_ahead else 12)
    assert (prompts.num_prompts, prompts.num_prompt_tokens, prompts.prompt_pairs) == (2, 30, 250)


def test_things_are_timed_in_turn_and_the_first_time_does_not_count() -> None:
    calls: list[str] = []
    clock, shares = ManualClock(), list[float]()
    took = {"a": [100.0, 1.0, 3.0, 2.0], "b": [100.0, 5.0, 5.0, 6.0]}

    def case(name: str) -> float:
        calls.append(name)
        clock.advance(1.0 if name == "a" else 3.0)  # with what it takes to prepare it
        return took[name].pop(0)

    cases = [lambda: case("a"), lambda: case("b")]
    found = time_alternating(cases, repeats=3, report=shares.append, now_s=clock.now_s)
    assert found == pytest.approx([2.0, 5.0], rel=0.3)
    assert all(sorted(calls[at : at + 2]) == ["a", "b"] for at in range(0, 8, 2))
    assert shares[0] == pytest.approx(1 / 8), "of the other nothing is known yet"
    spent_s = list(accumulate(1 if name == "a" else 3 for name in calls))
    assert shares[1:] == pytest.approx([each / 16 for each in spent_s[1:]]), "by time, not by number"


@pytest.mark.slow
def test_as_many_cases_are_timed_as_there_is_time_for() -> None:
    clock, calls = ManualClock(), list[int]()

    def case(number: int) -> float:
        calls.append(number)
        clock.advance(1.0)
        return float(number + 1)

    def timed_within(budget_s: float) -> dict[int, float]:
        calls.clear()
        cases = [partial(case, number) for number in range(100)]
        return time_within(cases, budget_s=budget_s, least=4, most_repeats=3, now_s=clock.now_s)

    found = timed_within(99.0)
    assert len(found) == 34
    assert len(calls) == 2 * 34, "there is no time for another turn"
    assert all(found[number] == pytest.approx(number + 1) for number in found)
    gaps = [later - sooner for sooner, later in pairwise(sorted(found))]
    assert max(gaps) <= 4, "they are from all of the list"
    found = timed_within(0.1)
    assert len(found) == 4
    assert len(calls) == 4, "there is no time for another, so that the first time counts"
    assert all(found[number] == pytest.approx(number + 1) for number in found)
    assert len(timed_within(1000.0)) == 100
    assert len(calls) == 400


@pytest.mark.slow
def test_a_quick_profile_knows_every_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path))
    monkeypatch.setattr("loraplex.cli.profile._QUICK_S", 1.0)
    result = profile("--shape", "tiny", "--device", "cpu", "--quick", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert "this is a rough profile" in result.output
    subject = subject_of(TINY, "cpu", torch.float32)
    model = read_profile(profile_path(subject), subject)
    assert model.step_s(StepFeatures(num_decodes=4, decode_positions=100)) > 0
    assert model.step.quality is not None
    assert 10 < model.step.quality.num_samples < 60
    assert model.held_out is not None
    assert model.held_out.decode.num_samples > 0


def test_what_is_left_is_told_by_what_phases_have_taken_here() -> None:
    clock, seen = ManualClock(), list[tuple[str, float]]()
    weights = {"engine": 0.0, "steps": 1.0, "reads": 0.1}
    phases = PhaseProgress(lambda *each: seen.append(each), weights, now_s=clock.now_s)
    phases.of("engine")
    clock.advance(5.0)
    steps = phases.of("steps")
    clock.advance(10.0)
    steps(0.1)  # so steps take 100 s, and reads 10
    clock.advance(90.0)
    steps(1.0)
    reads = phases.of("reads")
    clock.advance(10.0)
    reads(0.5)  # they take longer than was thought
    clock.advance(10.0)
    reads(1.0)
    assert [name for name, _ in seen] == ["engine", *["steps"] * 3, *["reads"] * 3]
    shares = [0, 0, 15 / 115, 105 / 115, 105 / 115, 115 / 125, 1]
    assert [share for _, share in seen] == pytest.approx(shares)


def test_a_machine_that_is_slow_for_a_while_does_not_change_what_things_take() -> None:
    """Three of five rounds at half the pace, one case disturbed by itself."""
    real = [1.0 + 0.1 * case for case in range(40)]
    taken = []
    for repeat in range(5):
        order = list(range(40))
        random.Random(repeat).shuffle(order)
        for at, case in enumerate(order):
            slow = 2.0 if (repeat * 40 + at) % 67 < 35 else 1.0
            taken.append((case, real[case] * slow * (5.0 if case == 7 and repeat == 2 else 1.0)))
    found = at_usual_pace(taken, 40)
    ratios = [each / true for each, true in zip(found, real, strict=True)]
    assert max(ratios) / min(ratios) < 1.02


def test_pauses_only_ever_add() -> None:
    assert undisturbed([1.0, 9.0, 1.1, 1.2, 7.0, 1.3, 1.4, 1.5]) == 1.2
    assert undisturbed([3.0]) == 3.0


@pytest.mark.parametrize("on_gpu", [True, False])
def test_cases_held_out_are_others_than_those_fitted(on_gpu: bool) -> None:
    limits = CaseLimits(on_gpu=on_gpu, max_context=512, max_tokens=20_000, work=StepWork())
    fitted = set(step_cases(ADAPTERS, limits))
    decodes, prompts = held_out_decodes(ADAPTERS, limits, 24), held_out_prompts(ADAPTERS, limits, 24)
    assert decodes == held_out_decodes(ADAPTERS, limits, 24), "the same whenever they are drawn"
    assert all(limits.fits(case) and case not in fitted for case in (*decodes, *prompts))
    assert all(case.num_decodes > 0 and not case.prompts for case in decodes)
    assert all(case.num_decodes == 0 and min(case.prompts) > 1 for case in prompts)
    assert len({case.num_decodes for case in decodes}) > 8
    for cases in (decodes, prompts):
        assert len({features_of(case).num_adapters for case in cases}) > 2


@pytest.mark.slow
def test_steps_of_serving_are_timed_from_one_request_to_many() -> None:
    engine = build_random_engine(RandomEngineOptions(shape="tiny", device="cpu", dtype=torch.float32))
    specs = random_specs("served", "tiny", num_adapters=3, ranks=(8,), modules="q,k,v")
    adapters = [StepAdapter(version=version, rank=8, num_bytes=1000) for version in register(engine, specs)]
    limits = CaseLimits(on_gpu=False, max_context=256, max_tokens=6 * 3 * 16, work=StepWork())
    shares: list[float] = []
    first, second = measure_serving(
        engine,
        adapters,
        adapters[:2],
        limits,
        vocab_size=TINY.vocab_size,
        steps_each=30,
        report=shares.append,
    )
    engine.close()
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])
    for samples in (first, second):
        assert len(samples) == 3 * 30, "with 1, 2 and 4 requests; 8 would not fit"
        assert {1, 2, 4} <= {step.num_decodes + step.num_prompts for step, _ in samples}
        assert any(step.num_decodes and step.num_prompts for step, _ in samples)
        assert all(seconds > 0 and step.num_adapters <= 3 for step, seconds in samples)
    assert [step for step, _ in first] != [step for step, _ in second]


def test_merging_is_measured_and_leaves_nothing_behind() -> None:
    engine = build_random_engine(RandomEngineOptions(shape="tiny", device="cpu", dtype=torch.float32))
    specs = random_specs("merge", "tiny", num_adapters=1, ranks=[8], modules="q,k,v")
    register(engine, specs)
    version, shares = specs[0].version, list[float]()
    line = measure_merges(engine, version, vocab_size=256, repeats=2, report=shares.append)
    assert line is not None
    assert 0 < line.seconds(1 << 20) < 60
    assert shares == [0.0, 0.5, 1.0]
    assert not engine.has_work()
    assert engine._memory.merged_bytes == 0
    engine.check_integrity()
    engine.close()


def test_a_step_takes_what_its_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may still be launching kernels when the step before ends."""
    launch = TorchExecutor.launch

    def on_device(executor: TorchExecutor, plan: StepPlan) -> LandedFlight:
        flight = launch(executor, plan)
        return replace(flight, result=replace(flight.land(), device_s=0.25 + len(plan.chunks)))

    monkeypatch.setattr(TorchExecutor, "launch", on_device)
    engine = build_random_engine(RandomEngineOptions(shape="tiny", device="cpu", dtype=torch.float32))
    (version,) = register(engine, random_specs("one", "tiny", num_adapters=1, ranks=(8,), modules="q"))
    adapter = StepAdapter(version=version, rank=8, num_bytes=1000)
    limits = CaseLimits(on_gpu=False, max_context=256, max_tokens=6 * 3 * 16, work=StepWork())
    samples, _ = measure_serving(
        engine,
        [adapter],
        [adapter],
        limits,
        vocab_size=TINY.vocab_size,
        steps_each=10,
        report=lambda _: None,
    )
    assert all(seconds == 0.25 + step.num_decodes + step.num_prompts for step, seconds in samples)
    joined = StepCase(contexts=(8, 8), prompts=(4,), adapters=(adapter,))
    (sample,), _, _ = measure_steps(
        engine,
        StepCases([joined], [], []),
        vocab_size=TINY.vocab_size,
        repeats=1,
        report=lambda _: None,
    )
    engine.close()
    assert sample.seconds == 0.25 + 3, "two requests that decode, and a prompt"


def test_a_fit_to_serving_as_well_is_between_the_two_and_knows_no_pauses() -> None:
    """Serving takes a tenth longer than the same steps by themselves, and one step very much longer."""
    limits = CaseLimits(on_gpu=False, max_context=512, max_tokens=20_000, work=StepWork())
    real = default_cost_model(subject_of(TINY, "cpu", torch.float32), TINY, num_cores=2).step

    def measured(cases: list[StepCase], slower: float = 1.0) -> list[StepSample]:
        return [StepSample(features_of(case), real.seconds(features_of(case)) * slower) for case in cases]

    decodes, prompts = held_out_decodes(ADAPTERS, limits, 24), held_out_prompts(ADAPTERS, limits, 24)
    samples = StepSamples(measured(step_cases(ADAPTERS, limits)), measured(decodes), measured(prompts))
    served = measured([*decodes, *prompts] * 10, slower=1.1)
    paused = [*served, served[0]._replace(seconds=100.0)]
    found = fit_steps(samples, paused, served, stepped=False)
    assert found == fit_steps(samples, served, served, stepped=False)
    assert found.serving is not None
    assert found.serving.mean_error < 0.06
    assert fit_steps(samples, (), (), stepped=False).serving is None
    assert fit_steps(samples, (), (), stepped=False).decodes.mean_error < found.decodes.mean_error < 0.1


def test_adapters_are_read_as_either_engine_reads_them(tmp_path: Path) -> None:
    for reader in (_plain_reader, partial(_pinned_reader, pinned=False)):
        with reader(TINY, torch.float32) as read:
            spec = _saved(tmp_path / str(reader), TINY, torch.float32, 4)
            assert _seconds(read, spec) > 0
