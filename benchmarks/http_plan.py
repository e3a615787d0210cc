"""The loads of the HTTP comparison, and the servers and numbers of adapters that each is run with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.http_client import Lengths, Load

STEADY, HIGH_RATE, SATURATED = "steady", "high-rate", "saturated"
DEFAULT_SHAPE: Final = "llama-2-7b"
_PROMPT_ANSWER_TOKENS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements of each server. `num_adapters`: those that servers know. `selected`: the names of the
    loads to run now; results name all loads, so that one section can be made in several calls."""

    adapters: tuple[int, ...]
    num_adapters: int
    loads: tuple[Load, ...]
    selected: tuple[str, ...]

    def load(self, name: str) -> Load:
        return next(load for load in self.loads if load.name == name)

    def cells(self, server: str) -> list[tuple[int, Load]]:
        """Return the numbers of adapters and the loads that this server is measured with.

        The steady and the saturated load are run with every number of adapters, the others with the base
        model and with all adapters. vLLM without LoRA has the base model only. vLLM with LoRA has the steady
        and the saturated load only: the high rate is beyond its capacity, and prompts alone are compared with
        vLLM at its fastest, without LoRA.
        """
        return [
            (adapters, load)
            for adapters in self.adapters
            for load in self.loads
            if load.name in self.selected
            and (adapters == 0 or server != "vllm")
            and (_is_swept(load) or (adapters in (0, self.num_adapters) and server != "vllm-lora"))
        ]


def _is_swept(load: Load) -> bool:
    return load.name in (STEADY, SATURATED)


def prompt_load(prompt_tokens: int, num_requests: int) -> Load:
    """Return a load of prompts of this length, one at a time; the answers are short, so that prompts take
    most of the time."""
    lengths = Lengths(prompt_tokens=prompt_tokens, output_tokens=_PROMPT_ANSWER_TOKENS, spread=0.0)
    return Load(name=f"prompt-{prompt_tokens}", num_requests=num_requests, concurrency=1, lengths=lengths)


def prompt_tokens_of(load: str) -> int | None:
    """Return the prompt length of a load of prompts alone, by its name; None for another load."""
    kind, _, tokens = load.partition("-")
    return int(tokens) if kind == "prompt" else None


def section_of(server: str, shape: str) -> str:
    """Return the name of the section that holds a server's results with a model of this shape."""
    return server if shape == DEFAULT_SHAPE else f"{server} {shape}"


def choose(names: Sequence[str] | None, loads: Sequence[Load]) -> tuple[str, ...]:
    """Return the names of the loads to run: these, or all; raises ValueError for a name that is not there."""
    known = [load.name for load in loads]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"no load {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(names or known)
