"""Starts the processes of all shards, and the executor that drives them."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from loraplex.core.logs import current_format, current_level
from loraplex.engine.parallel.executor import ParallelExecutor
from loraplex.engine.parallel.messages import BuildExecutor, Launch, Progress
from loraplex.engine.parallel.workers import Workers
from loraplex.model.collective import connect
from loraplex.model.sharding import Shard


def start_parallel(
    build: BuildExecutor, *, count: int, device: str, num_threads: int, report: Progress
) -> ParallelExecutor:
    """Start `count` shards, the first one in this process, each with `num_threads` threads.

    `device`: "cpu", or "cuda" for one CUDA device each.
    """
    stack = ExitStack()
    try:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(num_threads)
        folder = tempfile.TemporaryDirectory(prefix="loraplex-shards-")
        stack.callback(folder.cleanup)
        first, *others = [
            Launch(
                shard=Shard(index=index, count=count),
                device=torch.device("cpu") if device == "cpu" else torch.device(device, index),
                num_threads=num_threads,
                rendezvous=Path(folder.name) / "rendezvous",
                build=build,
                log_level=current_level(),
                log_format=current_format(),
            )
            for index in range(count)
        ]
        report("starting processes", 0.0)
        workers = Workers(others)
        stack.callback(workers.close)
        workers.wait_started()  # `connect` must not wait for one that could not even start
        with workers.blamed():
            collective = connect(first.shard, first.rendezvous, first.device)
            stack.callback(collective.close)
            workers.on_end = collective.abort
            if device == "cpu":  # removed now, so that a kill -9 cannot leave it behind
                folder.cleanup()
            local = build(first.shard, collective, report)
        workers.wait_ready()
    except BaseException:
        stack.close()
        raise
    return ParallelExecutor(local=local, workers=workers, release=stack.close)
