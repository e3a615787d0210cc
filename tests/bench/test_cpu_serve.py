"""The comparison of engines on a CPU: its models, its turns and the peers' set-ups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_openai import FakeServer

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import cpu_serve, engines
from benchmarks.cpu_models import MODELS
from benchmarks.engines import ADAPTERS, BASE, Engine
from benchmarks.make_checkpoint import HALF_BILLION, Checkpoint, write_tokenizer
from benchmarks.measure import Traffic
from benchmarks.peer_setups import BEST, SETUPS
from benchmarks.servers import RunningServer, ServerCommand

SHORT = Traffic(
    num_requests=4,
    concurrency=2,
    prompt_tokens=4,
    output_tokens=3,
    warmup_requests=2,
    warmup_output_tokens=1,
)


def test_engines_take_turns_and_rows_grow_by_one_run_a_repeat(
    monkeypatch: pytest.MonkeyPatch, fake: FakeServer, tmp_path: Path
) -> None:
    started: list[str] = []

    @contextmanager
    def running(command: ServerCommand, *, log_path: Path) -> Iterator[RunningServer]:
        started.append(log_path.stem)
        yield RunningServer(base_url=fake.base_url, start_s=1.0, log_path=log_path, pid=0)

    monkeypatch.setattr(cpu_serve, "running", running)
    chosen = [
        Engine(name=name, label=name, version="1", command=ServerCommand(args=(name,)), traffic=traffic)
        for name, traffic in (("ours", (BASE, ADAPTERS)), ("theirs", (BASE,)))
    ]
    after = list(cpu_serve.measure_serve(chosen, SHORT, repeats=2, logs=tmp_path))
    assert started == ["ours-0", "theirs-0", "ours-1", "theirs-1"]
    assert [[len(row["runs"]) for row in rows] for rows in after] == [[1, 1, 1], [2, 2, 2]]
    assert [(row["engine"], row["traffic"]) for row in after[0]] == [
        ("ours", "base"), ("ours", "adapters"), ("theirs", "base"),
    ]  # fmt: skip
    assert [len(row["start_s"]) for row in after[0]] == [1, 1, 1]
    answers = [body["max_tokens"] for body in fake.bodies]
    assert answers == [1, 1, 3, 3, 3, 3] * 6


def test_the_larger_model_has_half_a_billion_parameters() -> None:
    size = HALF_BILLION
    attention = sum(size.hidden * out for out in size.target_out_features.values())
    linears = size.num_layers * (attention + 3 * size.hidden * size.mlp_hidden)
    assert round((linears + 2 * size.vocab_size * size.hidden) / 1e6) == 475


def test_models_keep_their_results_apart() -> None:
    assert [model.file for model in MODELS.values()] == ["cpu_serve.json", "cpu_serve_05b.json"]


def test_a_larger_vocabulary_has_longer_pieces_and_still_a_text_for_each(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, vocab_size=20_000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 20_000
    assert len(tokenizer.decode([19_999])) == 4
    assert len({tokenizer.decode([token_id]) for token_id in range(3, 20_000)}) == 19_997


def test_the_best_set_ups_are_among_those_that_can_be_tried() -> None:
    for chosen in BEST.values():
        assert all(setup in SETUPS[engine] for engine, setup in chosen.items())
    assert BEST.keys() == MODELS.keys()


def test_libraries_are_preloaded_together_and_shown_without_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "_version_in", lambda venv, package: "1")
    served = Checkpoint(root=tmp_path, num_adapters=1)
    engine = engines.vllm(served, venv=tmp_path, lora=True, setup="targets-tcmalloc-iomp")
    assert cpu_serve.without_folders(engine.command.env["LD_PRELOAD"]) == (
        "libtcmalloc_minimal.so.4:libiomp5.so"
    )
    assert "LD_PRELOAD" not in engines.vllm(served, venv=tmp_path, lora=False, setup="default").command.env


def test_a_set_up_of_llama_cpp_names_its_program_and_options(tmp_path: Path) -> None:
    for name in ("llama-server", "llama-server-openblas"):
        (tmp_path / name).write_text("#!/bin/sh\necho version: 9 >&2\n")
        (tmp_path / name).chmod(0o755)

    def shown(setup: str) -> str:
        engine = engines.llama_cpp(
            Checkpoint(root=tmp_path, num_adapters=1),
            program=tmp_path / "llama-server",
            gguf_dir=tmp_path,
            num_slots=16,
            setup=setup,
            named=True,
        )
        assert (engine.name, engine.version) == (f"llama.cpp:{setup}", "9")
        return cpu_serve.shown_command(engine)

    assert shown("default").startswith("llama-server --model base.gguf --port {port} --parallel 16 ")
    assert shown("openblas").startswith("llama-server-openblas ")
    assert "--parallel 4 --ctx-size 1024" in shown("slots-4")
    assert "--threads 2 --no-webui --flash-attn off --lora-init" in shown("no-flash")
