"""Records what is launched, to launch it again at a stroke."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], object]


class Recorder(Protocol):
    """Makes replays. None of them runs beside another."""

    def record(self, run: Run, *, warm: bool) -> Run:
        """Return a function that launches what `run` does, on the same memory. `warm`: all that it launches
        was launched before; else it is run first."""
        ...


class GraphRecorder:
    """CUDA graphs, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, run: Run, *, warm: bool) -> Run:
        if not warm:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # loads the kernels, and makes the libraries' workspaces
                run()
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        replay: Run = graph.replay
        return replay
