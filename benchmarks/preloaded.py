"""Runs a module as a program repeatedly, with its imports done once.

    python benchmarks/preloaded.py MODULE ARG...

The first run, with the arguments given here, is made in this process, so that its imports stay. Every further
run is a fork of this process: it shares nothing with the runs before it. Commands are lines of JSON on stdin,
`{"args": [...], "log": "where its output goes"}`; the answer to each is a line with its exit status. Only the
standard library is used, since the Python that runs this may differ from the benchmark's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def run_module(module: str, args: list[str]) -> None:
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(module: str, *first_args: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep the module's output apart from the answers
    try:
        run_module(module, list(first_args))
    except SystemExit as end:
        if end.code:
            raise
    print("ready", file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            return run_module(module, order["args"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
