"""Where the `loraplex` command begins."""

from __future__ import annotations

import signal
import subprocess
import sys

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


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_the_command_runs() -> None:
    program = "import sys; sys.argv[1:] = ['--version']; from loraplex.cli.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
