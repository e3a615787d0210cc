from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_factory import (
    SHAPE,
    Tensors,
    encode,
    lora_name,
    make_config,
    make_tensors,
    write_adapter,
    write_safetensors,
)

from loraplex.adapters import peft_reader
from loraplex.adapters.fingerprint import files_unchanged
from loraplex.adapters.peft_reader import inspect_adapter, read_adapter, read_adapters
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE, AdapterSpec
from loraplex.adapters.tensors import scan_data
from loraplex.core.errors import AdapterError, AdapterFormatError, AdapterMismatchError

Q0_A, Q0_B = lora_name(0, "q_proj", "A"), lora_name(0, "q_proj", "B")


def test_a_sound_adapter_is_read(tmp_path: Path) -> None:
    spec = read_adapter(write_adapter(tmp_path / "a"), SHAPE)
    assert len(spec.version) == 64
    assert spec.path == tmp_path / "a"
    assert [(each.layer, each.module) for each in spec.modules[:3]] == [
        (0, "q_proj"),
        (0, "v_proj"),
        (1, "q_proj"),
    ]
    assert {each.rank for each in spec.modules} == {4}
    assert {each.scale for each in spec.modules} == {2.0}
    assert spec.num_params == 4 * (4 * (32 + 32) + 4 * (32 + 16))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_served_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    read_adapter(write_adapter(tmp_path, tensors=make_tensors(dtype=dtype)), SHAPE)


def test_tensors_of_several_dtypes_in_one_file_are_read(tmp_path: Path) -> None:
    tensors = make_tensors() | {Q0_A: encode(np.ones((4, 32)), "BF16"), Q0_B: encode(np.ones((32, 4)), "F16")}
    read_adapter(write_adapter(tmp_path, tensors=tensors), SHAPE)


@pytest.mark.parametrize("dtype", ["F64", "I32"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    write_adapter(tmp_path, tensors=make_tensors(dtype=dtype))
    with pytest.raises(AdapterFormatError, match=f"dtype {dtype}, which is not served; save it as float32"):
        read_adapter(tmp_path, SHAPE)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 77, 127])
def test_a_number_that_is_not_finite_is_refused_naming_the_tensor(
    tmp_path: Path, dtype: str, value: float, place: int
) -> None:
    values = np.full((32, 4), -3.0e4)
    values.flat[place] = value
    name = lora_name(2, "q_proj", "B")
    write_adapter(tmp_path, tensors=make_tensors(dtype=dtype) | {name: encode(values, dtype)})
    with pytest.raises(AdapterFormatError, match="NaN or infinity") as caught:
        read_adapter(tmp_path, SHAPE)
    assert caught.value.field == name


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_largest_finite_numbers_and_subnormals_are_fine(tmp_path: Path, dtype: str) -> None:
    largest = 65504.0 if dtype == "F16" else 3.3895314e38
    extremes = np.tile(np.array([largest, -largest, 0.0, -0.0, 1e-7, -1e-7, 1.0, -1.0]), 16).reshape(4, 32)
    write_adapter(tmp_path, tensors=make_tensors(dtype=dtype) | {Q0_A: encode(extremes, dtype)})
    read_adapter(tmp_path, SHAPE)


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def add(name: str, *size: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: encode(np.ones(size), "F32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(Q0_B), r"q_proj.lora_B.weight is missing: there is only lora_A"),
        (drop(Q0_A), r"q_proj.lora_A.weight is missing: there is only lora_B"),
        (drop(Q0_A, Q0_B), r"layers.0.self_attn.q_proj.lora_A.weight is missing, though target_modules"),
        (add(lora_name(0, "k_proj", "A"), 4, 32), r"is for k_proj, which target_modules does not target"),
        (add(Q0_A, 4, 32, 1), r"has 3 dimensions, not 2"),
        (add(Q0_A, 128), r"has 1 dimensions, not 2"),
        (add(Q0_A, 8, 32), r"has rank 8, but r and rank_pattern say 4"),
        (add(Q0_B, 32, 2), r"has rank 2"),
        (add("base_model.model.lm_head.lora_A.weight", 4, 32), r"output head is not served"),
        (add("base_model.model.model.embed_tokens.lora_embedding_A", 4, 64), r"LoRA on embeddings"),
        (add("base_model.model.model.embed_tokens.weight", 64, 32), r"save_embedding_layers=False"),
        (add(Q0_A.replace(".weight", ".default.weight"), 4, 32), r"carries an adapter name"),
        (add(Q0_B.replace(".weight", ".bias"), 32), r"trained biases"),
        (add(Q0_A.replace("lora_A.weight", "lora_magnitude_vector"), 32), r"DoRA"),
        (add(Q0_A.replace("self_attn", "mlp"), 4, 32), r"was it trained on another model family"),
        (add("model\x1b[2J", 4), r"is not a LoRA tensor that can be served"),
    ],
)
def test_every_tensor_is_accounted_for(
    tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    write_adapter(tmp_path, tensors=change(make_tensors()))
    with pytest.raises(AdapterFormatError, match=message) as caught:
        read_adapter(tmp_path, SHAPE)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add(Q0_A, 4, 2048), r"trained for hidden size 2048, this base has 32"),
        (add(Q0_B, 64, 4), r"shape \[64, 4\] where this base needs \[32, 4\].*attention width 64"),
        (add(lora_name(1, "v_proj", "B"), 32, 4), r"trained for key/value width 32, this base has 16"),
        (add(lora_name(4, "q_proj", "A"), 4, 32), r"is for layer 4, but this base has layers 0 to 3 only"),
        (
            drop(
                *(
                    lora_name(layer, module, side)
                    for layer in (2, 3)
                    for module in ("q_proj", "v_proj")
                    for side in "AB"
                )
            ),
            r"trained for 2 layers, this base has 4",
        ),
    ],
)
def test_an_adapter_of_another_base_is_a_mismatch(
    tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    write_adapter(tmp_path, tensors=change(make_tensors()))
    with pytest.raises(AdapterMismatchError, match=message):
        read_adapter(tmp_path, SHAPE)


def test_targets_of_another_model_family_are_a_mismatch(tmp_path: Path) -> None:
    write_adapter(tmp_path, make_config(target_modules=["c_attn"]))
    with pytest.raises(AdapterMismatchError, match="matches no module of this base"):
        read_adapter(tmp_path, SHAPE)


def test_a_target_that_matches_nothing_is_noted_beside_those_that_do(tmp_path: Path) -> None:
    write_adapter(
        tmp_path, make_config(target_modules=["q_proj", "v_proj", "c_attn"], rank_pattern={"o_proj": 2})
    )
    report = inspect_adapter(tmp_path, SHAPE)
    assert report.spec is not None
    assert {(each.field, each.value) for each in report.no_effect} >= {
        ("target_modules", "c_attn"),
        ('rank_pattern["o_proj"]', 2),
    }


@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj", "lm_head"], "(.*[qv]_proj|lm_head)", ["embed_tokens"]]
)
def test_embeddings_and_head_as_targets_are_refused(tmp_path: Path, targets: object) -> None:
    write_adapter(tmp_path, make_config(target_modules=targets))
    with pytest.raises(AdapterFormatError, match="which is not served") as caught:
        read_adapter(tmp_path, SHAPE)
    assert caught.value.field == "target_modules"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"target_modules": "(unclosed"}, "target_modules"),
        ({"exclude_modules": "*"}, "exclude_modules"),
        ({"rank_pattern": {"[": 2}}, "rank_pattern"),
        ({"alpha_pattern": {r"\q": 2}}, "alpha_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": "("}, "layers_pattern"),
    ],
)
def test_a_pattern_that_is_no_regex_is_refused(tmp_path: Path, overrides: dict[str, Any], field: str) -> None:
    write_adapter(tmp_path, make_config(**overrides))
    with pytest.raises(AdapterFormatError, match="not a valid regular expression") as caught:
        read_adapter(tmp_path, SHAPE)
    assert caught.value.field == field


def test_a_scale_beyond_float32_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, make_config(lora_alpha=1e300))
    with pytest.raises(AdapterFormatError, match="beyond float32"):
        read_adapter(tmp_path, SHAPE)


def test_all_refusals_are_reported_at_once(tmp_path: Path) -> None:
    tensors = add(Q0_A, 4, 2048)(make_tensors()) | {Q0_B: encode(np.full((32, 4), np.nan), "F32")}
    write_adapter(tmp_path, make_config(use_dora=True, novelty=1), tensors)
    messages = [str(error) for error in inspect_adapter(tmp_path, SHAPE).refusals]
    assert len(messages) == 4
    for text, message in zip(("novelty", "use_dora", "2048", "NaN"), messages, strict=True):
        assert text in message
    with pytest.raises(AdapterFormatError, match="and 3 more: `loraplex adapter check`"):
        read_adapter(tmp_path, SHAPE)


def sound_bytes(tmp_path: Path) -> bytes:
    write_safetensors(tmp_path / "sound", make_tensors())
    return (tmp_path / "sound").read_bytes()


def overlapping_header() -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    text = json.dumps({"a": entry, "b": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda sound: b"", "is empty"),
        (lambda sound: sound[:4], "not a sound safetensors file"),
        (lambda sound: sound[:200], "not a sound safetensors file"),
        (lambda sound: sound[:-1], "not a sound safetensors file"),
        (lambda sound: sound + b"\0", "not a sound safetensors file"),
        (lambda sound: sound[:8] + b"\xff" * 64 + sound[72:], "not a sound safetensors file"),
        (lambda sound: b"\xff" * 8 + sound[8:], "not a sound safetensors file"),
        (lambda sound: overlapping_header(), "not a sound safetensors file"),
        (lambda sound: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda sound: b"PK\x03\x04" + bytes(100), "pickle under another name"),
        (lambda sound: b"hello, this is text", "not a sound safetensors file"),
    ],
)
def test_broken_weights_are_refused(tmp_path: Path, make: Callable[[bytes], bytes], message: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS_FILE).write_bytes(make(sound_bytes(tmp_path)))
    with pytest.raises(AdapterFormatError, match=message):
        read_adapter(folder, SHAPE)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors={})
    with pytest.raises(AdapterFormatError, match="is missing, though target_modules calls for it"):
        read_adapter(tmp_path, SHAPE)


def test_missing_files_are_named(tmp_path: Path) -> None:
    messages = [str(error) for error in inspect_adapter(tmp_path, SHAPE).refusals]
    assert len(messages) == 2
    assert f"no {CONFIG_FILE} in" in messages[0]
    assert f"no {WEIGHTS_FILE} in" in messages[1]


def test_a_pickle_is_never_opened_and_the_conversion_is_explained(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match=r"pickles are never opened.*safe_serialization=True"):
        read_adapter(tmp_path, SHAPE)


def test_a_path_that_is_no_folder_is_explained(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    with pytest.raises(AdapterFormatError, match=f"is a file; name the folder that holds {CONFIG_FILE}"):
        read_adapter(folder / WEIGHTS_FILE, SHAPE)
    with pytest.raises(AdapterFormatError, match="there is no folder"):
        read_adapter(tmp_path / "b", SHAPE)
    with pytest.raises(AdapterFormatError, match="not a usable path"):
        read_adapter(Path("a\0b"), SHAPE)
    with pytest.raises(AdapterFormatError, match="not a usable path"):
        read_adapter(Path(os.fsdecode(b"/tmp/\xff")), SHAPE)


def test_a_named_pipe_does_not_block_the_reader(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    os.mkfifo(tmp_path / WEIGHTS_FILE)
    with pytest.raises(AdapterFormatError, match="not a regular file"):
        read_adapter(tmp_path, SHAPE)


def test_the_version_depends_on_what_changes_results_and_on_nothing_else(tmp_path: Path) -> None:
    def version(name: str, config: dict[str, Any], tensors: Tensors | None = None) -> str:
        return read_adapter(write_adapter(tmp_path / name, config, tensors), SHAPE).version

    plain = version("plain", make_config())
    assert version("reworded", make_config(target_modules=r".*\.[qv]_proj", lora_dropout=0.5)) == plain
    assert version("rslora", make_config(use_rslora=True, lora_alpha=4)) == plain
    assert version("alpha", make_config(lora_alpha=9)) != plain
    assert version("one-alpha", make_config(alpha_pattern={"layers.3.self_attn.q_proj": 9})) != plain
    assert version("weights", make_config(), make_tensors(seed=1)) != plain


def test_many_are_read_in_order_with_errors_in_their_places(tmp_path: Path) -> None:
    good = [write_adapter(tmp_path / f"good{n}", tensors=make_tensors(seed=n)) for n in range(8)]
    bad = write_adapter(tmp_path / "bad", make_config(r=0))
    results = read_adapters([*good[:4], bad, *good[4:], tmp_path / "none"], SHAPE, num_threads=3)
    assert [isinstance(result, AdapterError) for result in results] == [False] * 4 + [True] + [False] * 4 + [
        True
    ]
    specs = [result for result in results if isinstance(result, AdapterSpec)]
    assert [spec.path for spec in specs] == good
    assert len({spec.version for spec in specs}) == 8


def test_a_file_that_changes_while_being_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path)
    num_scans = 0

    def scan_and_replace(*args: Any) -> Any:
        nonlocal num_scans
        num_scans += 1
        found = scan_data(*args)
        if num_scans == 1:
            write_adapter(tmp_path, make_config(), make_tensors(seed=1))
        return found

    monkeypatch.setattr(peft_reader, "scan_data", scan_and_replace)
    spec = read_adapter(tmp_path, SHAPE)
    assert num_scans == 2
    assert files_unchanged(spec)
    assert (
        spec.version
        == read_adapter(write_adapter(tmp_path / "b", tensors=make_tensors(seed=1)), SHAPE).version
    )


@pytest.mark.parametrize("victim", [WEIGHTS_FILE, CONFIG_FILE])
def test_files_that_keep_changing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    write_adapter(tmp_path)

    def scan_and_replace(*args: Any) -> Any:
        found = scan_data(*args)
        (tmp_path / "new").write_bytes((tmp_path / victim).read_bytes())
        (tmp_path / "new").rename(tmp_path / victim)
        return found

    monkeypatch.setattr(peft_reader, "scan_data", scan_and_replace)
    with pytest.raises(AdapterFormatError, match="change while they are read"):
        read_adapter(tmp_path, SHAPE)


def test_a_file_cut_short_while_being_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path)

    def cut_and_scan(*args: Any) -> Any:
        write_adapter(tmp_path)
        os.truncate(tmp_path / WEIGHTS_FILE, 3000)
        return scan_data(*args)

    monkeypatch.setattr(peft_reader, "scan_data", cut_and_scan)
    with pytest.raises(AdapterFormatError, match=r"change while they are read|not a sound safetensors"):
        read_adapter(tmp_path, SHAPE)


def test_the_fingerprint_tells_changed_files(tmp_path: Path) -> None:
    spec = read_adapter(write_adapter(tmp_path), SHAPE)
    assert files_unchanged(spec)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        before = (tmp_path / name).stat()
        os.utime(tmp_path / name, ns=(1, 1))
        assert not files_unchanged(spec)
        os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert files_unchanged(spec)
    spec.weights_path.unlink()
    assert not files_unchanged(spec)
