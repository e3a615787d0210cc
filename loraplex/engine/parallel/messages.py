"""What the process of shard 0, which decides, and those of the other shards say to each other.

    shard 0                                      worker
    ───────                                      ──────
    Launch                          ───────────▶
                                    ◀─────────── Started
              (both meet for collectives, and load their shards)
                                    ◀─────────── Ready
    Call*                           ───────────▶ carries them out in their order
                                    ◀─────────── AdapterEvent for each load that ended
                                    ◀─────────── Done for each call that wants an answer
    (closes its pipe)               ───────────▶ exits with 0
                                    ◀─────────── Failed, then exits with another code

Two one-way pipes; messages are pickled, as the only other end is a process and the child that it started.
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
"""Called with (what is going on, fraction done)."""
BuildExecutor = Callable[[Shard, Collective, Progress], Executor]
"""Loads a shard and allocates its memory. It is sent to other processes: a function of a module, or a
`functools.partial` of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """All that a worker needs to be ready."""

    shard: Shard
    device: torch.device
    num_threads: int
    rendezvous: Path
    build: BuildExecutor
    log_level: int
    log_format: LogFormat = LogFormat.TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A method of the executor. Whatever it returns stays in the worker. `launch` is given a
    `shard_plans.SentPlan`, which the worker unpacks."""

    method: str
    args: tuple[Any, ...]
    wants_answer: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The worker is about to meet the others."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's shard is in memory."""


@dataclass(frozen=True, slots=True)
class Done:
    """A call that wants an answer was carried out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The worker cannot go on; it ends right after."""

    reason: str


Answer = Started | Ready | Done | Failed | AdapterEvent
