"""`loraplex ... | head`: commands whose reader leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.workload.jsonl import WorkloadRequest, write_workload

COMMAND = [sys.executable, "-m", "loraplex.cli.main"]


def run_without_reader(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run([*COMMAND, *args], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)


@pytest.mark.parametrize("args", [("--version",), ("adapter", "--help"), ("workload", "describe", "FILE")])
def test_a_closed_pipe_ends_a_command_without_a_word(args: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    write_workload(file, [WorkloadRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=2, adapter=0)])
    done = run_without_reader(*(str(file) if arg == "FILE" else arg for arg in args))
    assert done.stderr == ""
    assert done.returncode == 141


def test_errors_keep_their_message_and_exit_code(tmp_path: Path) -> None:
    done = run_without_reader("workload", "describe", str(tmp_path / "missing.jsonl"))
    assert "missing.jsonl" in done.stderr
    assert done.returncode in (1, 2)


def test_a_full_disk_is_told_in_a_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr.splitlines() == [
        "error: the output cannot be written (No space left on device); make room, or write elsewhere"
    ]
    assert done.returncode == 1


def test_what_is_read_to_the_end_ends_well() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_command_that_outlives_its_reader_goes_on_without_a_word() -> None:
    reader, writer = os.pipe()
    program = (
        "import sys; from loraplex.cli.closed_pipe import end_with_the_reader, outlive_the_reader\n"
        "end_with_the_reader(); outlive_the_reader()\n"
        "print('first', flush=True); sys.stdin.read()\n"
        "print('second', flush=True); print('third'); sys.exit(7)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writer)
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)
        _, said = process.communicate("")
    assert (process.returncode, said) == (7, "")


def test_what_is_said_on_stderr_after_its_reader_has_left_does_not_change_the_exit_code() -> None:
    """Both streams are one pipe, as in `loraplex serve 2>&1 | head`."""
    reader, writer = os.pipe()
    program = (
        "import sys; from loraplex.cli.closed_pipe import outlive_the_reader; outlive_the_reader()\n"
        "print('first', flush=True); sys.stdin.read()\n"
        "print('a line', file=sys.stderr); sys.stderr.write('half a line'); sys.exit(7)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=writer, stderr=writer
    ) as process:
        os.close(writer)
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)
        process.communicate(b"")
    assert process.returncode == 7
