"""Triton's interpreter without what it does again and again."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.runtime.interpreter import InterpretedFunction


@cache  # several folders' conftest.py ask for it
def patch_once_for_each_function() -> None:
    """Let calls of device functions look through `triton.language` once each, not every time.

    The interpreter replaces the language's builtins by its own before every kernel, and once more before
    every call of a device function within it, where they are replaced already: half of its time. The first
    call stays as it is, because Triton's own device functions see the builtins in another module.
    """
    patch_and_call, patched = InterpretedFunction.__call__, set[object]()

    def call(function: InterpretedFunction[Any], *args: Any, **options: Any) -> Any:
        if function.fn in patched:
            return function.rewrite()(*args, **options)
        patched.add(function.fn)
        return patch_and_call(function, *args, **options)

    InterpretedFunction.__call__ = call
