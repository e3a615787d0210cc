"""The entry point of the `loraplex` command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import os, signal, sys
from loraplex.cli.entry import main

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "loraplex.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


INTERRUPTED_LATER = """
import os, signal
import typer.main
from loraplex.cli.entry import main

typer.main.get_command = lambda app: os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


INTERRUPTED_BETWEEN = """
import os, signal
from loraplex.cli.entry import main

signal.signal(signal.SIGINT, signal.default_int_handler)
set_handler = signal.signal

def restore(number, handler):
    set_handler(number, handler)
    if handler is signal.default_int_handler:
        os.kill(os.getpid(), signal.SIGINT)

signal.signal = restore
main()
"""


@pytest.mark.parametrize("program", [INTERRUPTED, INTERRUPTED_BETWEEN, INTERRUPTED_LATER])
def test_ctrl_c_before_the_command_begins_leaves_no_traceback(program: str) -> None:
    """While it is imported, right after that, and while it is put together."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


def test_the_command_runs() -> None:
    program = "import sys; sys.argv[1:] = ['--version']; from loraplex.cli.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
