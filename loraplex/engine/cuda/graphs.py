"""Records launches, to replay all of them with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], object]


class Recorder(Protocol):
    """Makes replays. No two of them run at the same time."""

    def record(self, run: Run, *, warm: bool) -> Run:
        """Return a function that launches what `run` launches, on the same memory. `warm`: all of it was
        launched before; otherwise `run` is called once first."""
        ...


class GraphRecorder:
    """A recorder of CUDA graphs, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, run: Run, *, warm: bool) -> Run:
        if not warm:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # loads kernels, allocates workspaces of libraries
                run()
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        replay: Run = graph.replay
        return replay
