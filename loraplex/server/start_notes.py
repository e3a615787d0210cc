"""Notes for the operator of a server that has started, about limits that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loraplex.adapters.registry import AdapterRegistry
from loraplex.engine.options import EngineOptions
from loraplex.fleet.admission import Admitted
from loraplex.model.config import ModelConfig
from loraplex.server.waiting import Forecaster


def context_notes(max_model_len: int, options: EngineOptions, config: ModelConfig) -> Iterator[str]:
    """Yield a note if memory or a sliding window, not the operator, limits the length of contexts."""
    longest = config.shape.max_position
    if config.cut_context is not None and options.max_model_len is None:
        yield (
            f"the model's sliding window is not implemented: contexts end with it, at {longest:,} tokens, "
            f"not at the model's {config.cut_context:,}"
        )
    if max_model_len < (options.max_model_len or longest):
        yield (
            f"KV memory holds contexts of {max_model_len:,} tokens, the model could take {longest:,}; raise "
            "--kv-memory for longer ones"
        )


def ttft_note(engine: Forecaster, max_ttft_s: float | None) -> Iterator[str]:
    """Yield a note if the limit on the time to the first token cannot be kept, or has no effect."""
    if max_ttft_s is None:
        return
    least = engine.forecast(None, 1, Admitted())
    if least is None:
        yield f"nothing is known of what steps of this engine take: --max-ttft {max_ttft_s:g} refuses nothing"
    elif least.ttft_s > max_ttft_s:
        yield (
            f"--max-ttft {max_ttft_s:g} is less than the {least.ttft_s:.2g} s that an idle engine would "
            "take for a prompt of one token: requests are served one at a time, and all others refused; "
            "raise it, or run `loraplex profile` if the prediction is wrong"
        )


def shared_state_note(registry: AdapterRegistry, state_dir: Path) -> Iterator[str]:
    """Yield a note if another server shares this registry, as two fronts do."""
    others = registry.other_servers
    if others:
        servers = (
            f"another server (process {others[0]}) uses"
            if len(others) == 1
            else f"{len(others)} other servers use"
        )
        yield (
            f"{servers} the state folder {state_dir}: adapters are the same on all, and what is changed "
            "through one is followed by the others; give each a --state-dir of its own if that is not wanted"
        )


def namesake_notes(registry: AdapterRegistry, state_dir: Path) -> Iterator[str]:
    """Yield a note for each server that probably should share this registry but does not."""
    for pid, model in registry.namesakes:
        yield (
            f"another server (process {pid}) on the state folder {state_dir} serves a base model of the same "
            f"shape as {model!r}: as this one has another name here, they share no adapters; give both the "
            "same --model if it is the same"
        )
