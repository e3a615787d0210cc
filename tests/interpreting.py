"""Triton's interpreter without what it does again and again, and with products of bfloat16."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


@cache  # several folders' conftest.py ask for it
def patch_interpreter() -> None:
    """Have kernels computed as before, in less than half of the time; and `tl.dot` of bfloat16, which the
    interpreter would multiply as the integers that it keeps them in."""
    _patch_once_for_each_function()
    _leave_out_unused_checks()
    _remember_types()
    _multiply_bfloat16()


def _patch_once_for_each_function() -> None:
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


def _leave_out_unused_checks() -> None:
    """Do not compute whether integers overflow: without `debug` nothing looks at the result."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _remember_types() -> None:
    """Look up the numpy type of each scalar type once: each lookup makes a table of all of them."""
    look_up = interpreter._get_np_dtype
    known = cache(look_up)

    def np_dtype(tt_dtype: tl.dtype) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        return look_up(element) if isinstance(element, tl.pointer_type) else known(element)

    interpreter._get_np_dtype = np_dtype


def _multiply_bfloat16() -> None:
    builder: Any = type(interpreter.interpreter_builder)
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *options: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *options)

    builder.create_dot = create_dot
