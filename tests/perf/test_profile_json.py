"""Profiles on disk: written whole, read strictly, refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_models import H200_MEMORY, SUBJECT, h200_model

from loraplex.core.errors import StorageError
from loraplex.perf.assist_split import ROW_ALIGNMENT
from loraplex.perf.cost_model import Corrections, KernelKind, with_padded_kernels
from loraplex.perf.line import Line
from loraplex.perf.profile_json import ProfileError, profile_to_json, read_profile, write_profile


def test_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "profile.json"
    models = (
        h200_model(),
        replace(h200_model(), bus=None, corrections=Corrections(step=1.5)),
        replace(h200_model(), held_out=None, memory=None),
        with_padded_kernels(h200_model()),
        replace(h200_model(), assist=replace(h200_model().assist, rows_each=128)),
        replace(h200_model(), memory=replace(H200_MEMORY, arena_bytes=None, kv_tokens=1000, table_bytes=0)),
    )
    for model in models:
        write_profile(path, model, {"date": "today"})
        assert read_profile(path, SUBJECT) == model
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_an_older_profile_says_nothing_of_a_steps_work(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(profile_to_json(h200_model()))
    assert document.pop("units")["*_s"] == "seconds"
    for name in ("step_tokens", "position_cost"):
        del document["memory"][name]
    path.write_text(json.dumps(document))
    memory = read_profile(path).memory
    assert memory is not None
    assert (memory.step_tokens, memory.position_cost) == (2048, 0.0)


def test_an_older_profile_has_the_finest_split_to_which_its_costs_were_fitted(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = replace(h200_model(), assist=replace(h200_model().assist, rows_each=128))
    document = json.loads(profile_to_json(model))
    assert document["assist"].pop("rows_each") == 128
    path.write_text(json.dumps(document))
    assert read_profile(path).assist.rows_each == ROW_ALIGNMENT


def test_an_older_profile_is_of_kernels_that_do_not_pad(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(profile_to_json(h200_model()))
    del document["kernels"]
    path.write_text(json.dumps(document))
    assert read_profile(path).kernels is KernelKind.RANK


def test_an_older_profile_guesses_merges_from_the_speed_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = replace(h200_model(), merge=Line(latency_s=1e-4, unit_s=1e-12))
    document = json.loads(profile_to_json(model))
    path.write_text(json.dumps(document))
    assert read_profile(path).merge == model.merge
    del document["merge"]
    path.write_text(json.dumps(document))
    assert read_profile(path).merge.unit_s == 2 * model.step.terms.adapter_byte_s


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: p.update(version=3), "it was made by an older loraplex"),
        (lambda p: p.update(version=6), "version 6, this loraplex reads version 5"),
        (lambda p: p.pop("version"), "has no 'version'"),
        (lambda p: p.pop("disk"), "the profile has no 'disk'"),
        (lambda p: p.update(speed=1), "unknown 'speed'"),
        (lambda p: p["disk"].pop("unit_s"), "disk has no 'unit_s'"),
        (lambda p: p["disk"].update(latency_s=float("nan")), "disk: latency_s is nan"),
        (lambda p: p["disk"].update(latency_s=float("inf")), "disk: latency_s is inf"),
        (lambda p: p["disk"].update(latency_s=10**400), "disk: latency_s is inf"),
        (lambda p: p["disk"].update(latency_s=-1e-9), "disk: latency_s is -1e-09"),
        (
            lambda p: p["disk"].update(latency_s=1e300),
            "disk: latency_s is 1e+300, not a number of at least 0 and at most",
        ),
        (lambda p: p["disk"].update(latency_s=True), "disk: latency_s is True, not a number"),
        (lambda p: p["disk"].update(latency_s="1"), "disk: latency_s is '1', not a number"),
        (lambda p: p.update(disk=[1]), "disk is not an object"),
        (lambda p: p.update(measured=1), "measured is neither true nor false"),
        (lambda p: p["bus"].update(launch_s=-1), "bus: launch_s is -1"),
        (lambda p: p["bus"]["copy"].update(more=1), "copy has an unknown 'more'"),
        (lambda p: p.update(read=[]), "read is not an object"),
        (lambda p: p["read"]["quality"].pop("mean_error"), "has no 'mean_error'"),
        (lambda p: p["read"]["quality"].update(mean_error="5%"), "read: mean_error is '5%', not a number"),
        (lambda p: p["read"]["quality"].update(worst_error=-1), "read: worst_error is -1"),
        (lambda p: p["step"]["terms"].pop("lora_s"), "terms has no 'lora_s'"),
        (lambda p: p["step"]["terms"].update(x=0), "terms has an unknown 'x'"),
        (lambda p: p["step"].pop("prompts"), "step has no 'prompts'"),
        (lambda p: p["step"]["decodes"]["rows"].pop(), "decodes: there are not as many seconds_at as rows"),
        (lambda p: p["step"]["prompts"]["seconds_at"].reverse(), "prompts: rows and seconds_at are not in"),
        (lambda p: p["step"]["decodes"]["rows"].__setitem__(0, 0), "rows is 0, not a whole number"),
        (lambda p: p["step"]["prompts"].update(stepped=1), "prompts: stepped is neither true nor false"),
        (lambda p: p.update(kernels="bgmv"), "kernels is 'bgmv', not one of rank-proportional, padded"),
        (lambda p: p.update(kernels=None), "kernels is not a text"),
        (lambda p: p.pop("held_out"), "the profile has no 'held_out'"),
        (lambda p: p["held_out"].pop("load"), "held_out has no 'load'"),
        (lambda p: p["held_out"]["decode"].update(num_samples=0), "decode: num_samples is 0"),
        (lambda p: p["held_out"]["decode"].update(mean_error=None), "held_out: decode: mean_error is None"),
        (lambda p: p["held_out"].update(disk={}), "held_out has an unknown 'disk'"),
        (lambda p: p.pop("memory"), "the profile has no 'memory'"),
        (lambda p: p.update(memory=7), "memory is not an object"),
        (lambda p: p["memory"].pop("token_bytes"), "memory has no 'token_bytes'"),
        (lambda p: p["memory"].update(host_bytes=0.5), "memory: host_bytes is 0.5, not a whole number"),
        (lambda p: p["memory"].update(table_bytes=-1), "table_bytes is -1, not a whole number of at least 0"),
        (lambda p: p["memory"].update(arena_bytes=None), "one of arena_bytes and kv_tokens"),
        (lambda p: p["memory"].update(kv_tokens=5), "one of arena_bytes and kv_tokens"),
        (lambda p: p["memory"]["rank_bytes"].pop("q_proj"), "rank_bytes has no 'q_proj'"),
        (lambda p: p["memory"]["rank_bytes"].update(embed=1), "rank_bytes has an unknown 'embed'"),
        (lambda p: p["assist"].update(row_s=None), "assist: row_s is None"),
        (lambda p: p["corrections"].update(step=0), "a factor is zero"),
        (lambda p: p["corrections"].pop("step"), "corrections has no 'step'"),
        (lambda p: p["subject"].update(machine=""), "subject: machine is not a text"),
        (lambda p: p["subject"].update(machine="another"), "measured for machine 'another' instead of"),
        (lambda p: p["subject"].update(num_layers=31), "measured for num_layers 31 instead of 32"),
        (lambda p: p.pop("environment"), "has no 'environment'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Change, reason: str) -> None:
    profile = json.loads(profile_to_json(h200_model()))
    change(profile)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(ProfileError) as found:
        read_profile(path, SUBJECT)
    assert reason in str(found.value)
    assert str(found.value).startswith(str(path))
    assert str(found.value).endswith("run `loraplex profile` again")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"version": 1, "version": 1}', "a key is given twice"),
        (b"null", "the profile is not an object"),
        (b" " * (2 << 20), "no profile"),
    ],
    ids=["empty", "cut short", "not text", "nested", "twice", "null", "huge"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=reason):
        read_profile(path)


def test_a_profile_that_is_not_there_is_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="run `loraplex profile` to make one"):
        read_profile(tmp_path / "absent.json")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_profile(tmp_path / "file" / "profile.json", h200_model())


def test_a_number_that_json_does_not_have_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        profile_to_json(replace(h200_model(), corrections=Corrections(step=float("nan"))))
