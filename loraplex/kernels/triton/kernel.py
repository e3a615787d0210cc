"""A wrapper of Triton kernels: errors of compiling and launching name the kernel and the shapes.

Launches can also be collected instead of executed (`collect_launches`), to compile what they need ahead of
the first of them, several kernels at a time.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from loraplex.core.errors import KernelError


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedLaunch:
    """A launch that was recorded instead of executed."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def compile(self) -> None:
        """Compile the kernel for such launches, or read it from Triton's cache, and load it onto the current
        device. Raises KernelError."""
        self.kernel.compile(self.grid, self.args, self.constants)


_Collected = dict[Any, CollectedLaunch]
_collected: ContextVar[_Collected | None] = ContextVar("collected launches", default=None)


@contextmanager
def collect_launches() -> Iterator[_Collected]:
    """Record this thread's launches instead of executing them: one for each variant that would be
    compiled."""
    found: _Collected = {}
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


class Kernel:
    """Put above `triton.jit` on every kernel that is launched with a grid; launch it as usual,
    `kernel[grid](...)`.

    Costs one call per launch. Triton's own errors give the line or the number of bytes, not the kernel or the
    sizes; the driver's are bare RuntimeErrors. An error of a kernel launched earlier may also surface here,
    because the device runs asynchronously; its cause ("illegal memory access") shows that.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        collected = _collected.get()
        if collected is not None:
            launch = CollectedLaunch(kernel=self, grid=grid, args=args, constants=constants)
            collected.setdefault(self._variant(args, constants), launch)
            return None
        try:
            return self._jitted[grid](*args, **constants)
        except (TritonError, RuntimeError) as error:
            raise KernelError(self._describe(grid, args, constants, error)) from error

    def hash(self) -> None:
        """Make Triton compute the key under which it caches the compiled kernel.

        A key depends on which kernels that call the same functions were hashed before. If threads compile,
        that order differs between processes, and one does not find what another has compiled.
        """
        _ = self._jitted.cache_key

    def compile(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """See `CollectedLaunch`."""
        try:
            compiled = self._jitted.warmup(*args, grid=grid, **constants)
            if compiled is not None:
                _ = compiled.run  # loads it: a graph capture must not
        except (TritonError, RuntimeError, OSError) as error:  # OSError: the cache's disk may be full
            raise KernelError(self._describe(grid, args, constants, error)) from error

    def _variant(self, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """Return what Triton specialises a kernel on: types, and which of the arguments are 1 or divisible by
        16, except those that the kernel excludes."""
        seen: list[Any] = [self]
        for parameter, value in zip(self._jitted.params, args, strict=False):
            if isinstance(value, TensorDescriptor):
                seen.append((value.base.dtype, *value.block_shape))
                continue
            is_tensor = isinstance(value, torch.Tensor)
            number = value.data_ptr() if is_tensor else value
            traits: list[Any] = [value.dtype if is_tensor else type(value)]
            if isinstance(number, int) and not parameter.do_not_specialize:
                traits += [
                    not parameter.do_not_specialize_on_alignment and number % 16 == 0,
                    not is_tensor and number == 1,
                ]
            seen.append(tuple(traits))
        return *seen, *sorted(constants.items())

    def _describe(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], error: Exception
    ) -> str:
        function = self._jitted.fn
        named = zip(inspect.signature(function).parameters, args, strict=False)
        given = ", ".join(f"{name} {_shown(value)}" for name, value in named)
        sizes = ", ".join(f"{name}={_shown(value)}" for name, value in constants.items())
        # A compilation error quotes the source first; the cause comes last.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = lines[-1] if lines else "no reason given"
        return (
            f"the GPU kernel {function.__name__} failed: {type(error).__name__}: {cause}; "
            f"it was launched with grid {grid}, {given}, {sizes}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tiles {tuple(value.block_shape)} of {_shown(value.base)}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return str(value)
