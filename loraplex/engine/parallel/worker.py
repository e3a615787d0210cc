"""The process of one shard: executes the calls that shard 0 sends.

Run as `python -m loraplex.engine.parallel.worker IN OUT` with inherited file descriptors: calls are read from
IN, answers are written to OUT. Stdin stays open while the parent lives; the worker exits at once when it
closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Final

import torch

from loraplex.core.logs import flush_logs, logging_to_stderr
from loraplex.engine.executor import Executor
from loraplex.engine.parallel.messages import Call, Done, Failed, Launch, Ready, Started
from loraplex.engine.parallel.shard_plans import PlanReceiver
from loraplex.model.collective import connect

logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
EXIT_PARENT_GONE: Final = 3
_LOAD_WAIT_S: Final = 0.001
"""Seconds that a worker with a load in flight waits for a call before it checks the load again."""
_IDLE_S: Final = 1.0
"""The same for a worker without one: an overdue read may still end."""
_MAX_REASON_CHARS: Final = 500


def serve(executor: Executor, calls: Connection, answers: Connection) -> None:
    """Execute calls until the pipe is closed."""
    plans = PlanReceiver()
    while True:
        while not calls.poll(_LOAD_WAIT_S if executor.num_pending_loads > 0 else _IDLE_S):
            _report_loads(executor, answers)
        try:
            call: Call = calls.recv()
        except EOFError:
            return
        if call.method == "launch":
            executor.launch(plans.unpack(*call.args))
        else:
            getattr(executor, call.method)(*call.args)
        if call.wants_answer:
            answers.send(Done())
        _report_loads(executor, answers)


def _report_loads(executor: Executor, answers: Connection) -> None:
    for event in executor.poll_adapters(0.0):
        answers.send(event)


def _run(launch: Launch, calls: Connection, answers: Connection) -> None:
    torch.set_num_threads(launch.num_threads)
    answers.send(Started())
    collective = connect(launch.shard, launch.rendezvous, launch.device)
    executor = launch.build(launch.shard, collective, lambda phase, fraction: None)
    answers.send(Ready())
    try:
        serve(executor, calls, answers)
    finally:
        executor.close()


def _leave_with_parent() -> None:
    # In a thread of its own: the main thread may be blocked in a collective with other shards.
    while os.read(0, 1024):
        pass
    os._exit(EXIT_PARENT_GONE)


def main() -> int:
    # Ctrl-C reaches every process of the terminal; shard 0 decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()
    with (
        Connection(int(sys.argv[1]), writable=False) as calls,
        Connection(int(sys.argv[2]), readable=False) as answers,
    ):
        launch: Launch = calls.recv()
        shard = launch.shard.index
        with logging_to_stderr(launch.log_level, launch.log_format, f"shard {shard}"):
            try:
                _run(launch, calls, answers)
            except Exception as error:
                logger.exception("shard %d failed", shard)
                flush_logs()  # this process may be killed as soon as the answer is read
                with contextlib.suppress(OSError):  # shard 0 may be gone
                    answers.send(Failed(reason=f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]))
                return EXIT_FAILED
    return 0


if __name__ == "__main__":
    os._exit(main())  # there is nothing to save, and tearing down torch takes a second
