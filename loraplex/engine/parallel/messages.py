"""Messages between the process of shard 0, which decides, and the workers of the other shards.

    shard 0                                      worker
    ───────                                      ──────
    Launch                          ───────────▶
                                    ◀─────────── Started
              (both connect for collectives, and load their shards)
                                    ◀─────────── Ready
    Call*                           ───────────▶ executes them in order
                                    ◀─────────── AdapterEvent for each load that ended
                                    ◀─────────── Done for each call that wants an answer
    (closes its pipe)               ───────────▶ exits with 0
                                    ◀─────────── Failed, then exits with another code

There are two one-way pipes. Messages are pickled: they pass only between a process and a child it started.
Steps are not answered: all processes compute the same logits and choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.core.logs import LogFormat
from loraplex.engine.executor import AdapterEvent, Executor
from loraplex.model.collective import Collective
from loraplex.model.sharding import Shard

Progress = Callable[[str, float], None]
"""Called with (current phase, fraction done)."""
BuildExecutor = Callable[[Shard, Collective, Progress], Executor]
"""Loads a shard and allocates its memory. It is pickled for other processes: a module-level function, or a
`functools.partial` of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Everything a worker needs to start."""

    shard: Shard
    device: torch.device
    num_threads: int
    rendezvous: Path
    build: BuildExecutor
    log_level: int
    log_format: LogFormat = LogFormat.TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of an executor method. Its return value stays in the worker. `launch` is given a
    `shard_plans.SentPlan`, which the worker unpacks."""

    method: str
    args: tuple[Any, ...]
    wants_answer: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The worker is about to connect to the other shards."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's shard is in memory."""


@dataclass(frozen=True, slots=True)
class Done:
    """A call that wants an answer was executed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The worker failed, and exits right after."""

    reason: str


Answer = Started | Ready | Done | Failed | AdapterEvent
