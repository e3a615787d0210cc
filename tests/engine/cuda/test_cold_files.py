"""Adapters that are read from files while an engine runs, and files that go bad; kernels interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_engines import CONFIG, greedy, interpreted, save_base
from driving import run_to_end
from tiny import save_adapter

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import FinishReason


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = save_base(folder / "base")
    for name in ("good", "bad"):
        save_adapter(folder / name, base, rank=4, targets=["q_proj"], seed=len(name))
    return folder


def with_files(saved: Path, tmp_path: Path) -> tuple[object, AdapterSpec, AdapterSpec]:
    """An engine that reads from files, with two adapters of which one is to go bad."""
    from shutil import copytree

    good, bad = (
        read_adapter(copytree(saved / name, tmp_path / name), CONFIG.shape) for name in ("good", "bad")
    )
    engine = interpreted(cold_start=ColdStart.PIPELINED, read=None)
    for spec in (good, bad):
        engine.add_adapter(spec)
    engine.add_request(greedy("good", good.version, tokens=2))
    return engine, good, bad


def check_only_bad_fails(engine, bad: AdapterSpec, reason: str) -> None:
    engine.add_request(greedy("bad", bad.version))
    done = run_to_end(engine)
    assert done["bad"].finish_reason is FinishReason.ERROR
    assert reason in (done["bad"].error or "")
    assert len(done["good"].token_ids) == 2
    (stats,) = (adapter for adapter in engine.stats().adapters if adapter.version == bad.version)
    assert stats.tier == "disk"
    assert engine.stats().host_adapter_bytes > 0, "the good one is not there any more"
    engine.close()


def test_a_file_that_vanished_fails_its_own_requests(saved: Path, tmp_path: Path) -> None:
    engine, _, bad = with_files(saved, tmp_path)
    bad.weights_path.unlink()
    check_only_bad_fails(engine, bad, "cannot be read")


def test_a_file_that_changed_fails_its_own_requests(saved: Path, tmp_path: Path) -> None:
    engine, good, bad = with_files(saved, tmp_path)
    bad.weights_path.write_bytes(good.weights_path.read_bytes())
    check_only_bad_fails(engine, bad, "changed on disk")


def test_a_file_cut_short_during_the_read_fails_its_own_requests(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex.engine import slab_reader

    engine, _, bad = with_files(saved, tmp_path)
    matrices = slab_reader._matrices

    def cut_first(layout, header, *rest):
        if bad.weights_path.exists() and cutting:
            with bad.weights_path.open("r+b") as file:
                file.truncate(header.data_start + 100)
        return matrices(layout, header, *rest)

    cutting: list[bool] = []
    monkeypatch.setattr(slab_reader, "_matrices", cut_first)
    while engine.stats().num_steps == 0:  # the good one is read by then
        engine.step()
    cutting.append(True)
    check_only_bad_fails(engine, bad, "ends too early")


@pytest.mark.parametrize(
    "content", [b"", b"\x10\x00", b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"[]"], ids=repr
)
def test_a_header_that_is_no_more_fails_its_own_requests(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Written between the look at the file's identity and that at its header."""
    from loraplex.adapters.tensors import parse_header
    from loraplex.engine import slab_reader

    def another_header(file):
        if changing:
            bad.weights_path.write_bytes(content)
        return parse_header(file)

    changing: list[bool] = []
    engine, _, bad = with_files(saved, tmp_path)
    monkeypatch.setattr(slab_reader, "parse_header", another_header)
    while engine.stats().num_steps == 0:
        engine.step()
    changing.append(True)
    check_only_bad_fails(engine, bad, "changed on disk")


def test_a_file_replaced_during_the_read_fails_its_own_requests(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex.engine import slab_reader

    engine, good, bad = with_files(saved, tmp_path)
    read_part = slab_reader._read_part

    def overwrite_then_read(fd, part, slab):
        if cutting:
            bad.weights_path.write_bytes(good.weights_path.read_bytes())
        read_part(fd, part, slab)

    cutting: list[bool] = []
    monkeypatch.setattr(slab_reader, "_read_part", overwrite_then_read)
    while engine.stats().num_steps == 0:
        engine.step()
    cutting.append(True)
    check_only_bad_fails(engine, bad, "changed on disk")


@pytest.mark.parametrize("shape", [[4, 128], [8, 64], None], ids=["wider", "higher", "missing"])
def test_a_header_written_anew_in_the_meantime_never_writes_beyond_the_slab(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: list[int] | None
) -> None:
    """Between the look at the file's identity and that at its header."""
    from loraplex.adapters.tensors import parse_header
    from loraplex.engine import slab_reader

    def another_header(file):
        header = parse_header(file)
        name = bad.modules[0].a_name
        if changing:
            found = header.tensors.pop(name)
            if shape is not None:
                header.tensors[name] = found._replace(shape=shape)
        return header

    changing: list[bool] = []
    engine, _, bad = with_files(saved, tmp_path)
    monkeypatch.setattr(slab_reader, "parse_header", another_header)
    while engine.stats().num_steps == 0:  # the good one is read by then
        engine.step()
    changing.append(True)
    check_only_bad_fails(engine, bad, "changed on disk")
