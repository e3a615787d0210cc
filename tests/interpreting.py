"""Triton's interpreter without what it does again and again, and with products of bfloat16."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import getmembers
from typing import Any, NamedTuple

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


@cache  # several folders' conftest.py ask for it
def patch_interpreter() -> None:
    """Have kernels computed as before, in less than half of the time; and `tl.dot` of bfloat16, which the
    interpreter would multiply as the integers that it keeps them in."""
    _patch_once_for_each_function()
    _look_up_builtins_once()
    _leave_out_unused_checks()
    _remember_types()
    _remember_shapes()
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


def _look_up_builtins_once() -> None:
    """Look through a module of the language for its builtins before the first kernel, not before every one.
    Call what a builtin wraps: the wrapper only checks that it is called by a kernel."""

    @cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, each) for name, each in getmembers(package) if tl.core.is_builtin(each)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return wrapped(*args, **options)

        wrapped = getattr(member, "__wrapped__", member)
        scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_attr = patch_attr


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


class _Shape(NamedTuple):
    """A shape as block types and as tensors have it."""

    of_type: tl.tuple
    of_tensor: tl.tuple
    numel: tl.constexpr
    num_elements: int


@cache
def _shape(*sizes: int) -> _Shape:
    num_elements = validate_block_shape(list(sizes))
    constants = [tl.constexpr(size) for size in sizes]
    return _Shape(tl.tuple(sizes), tl.tuple(constants), tl.constexpr(num_elements), num_elements)


def _remember_shapes() -> None:
    """Make and check the tuples of a shape once: every result of every operation has a shape and a type with
    one, and to make them anew was two fifths of the time. The same shape twice needs no broadcast."""
    broadcast = TritonSemantic.broadcast_impl_value

    def init_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        known = _shape(*[each.value if isinstance(each, tl.constexpr) else each for each in shape])
        if not known.of_type:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape = known.of_type
        self.numel = known.num_elements

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        known = _shape(*type.shape.values) if type.is_block() else _shape()
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape = known.of_tensor
        self.numel = known.numel

    def broadcast_unless_same(self: TritonSemantic[Any], lhs: tl.tensor, rhs: tl.tensor) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    tl.block_type.__init__ = init_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_unless_same


def _multiply_bfloat16() -> None:
    builder: Any = type(interpreter.interpreter_builder)
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *options: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *options)

    builder.create_dot = create_dot
