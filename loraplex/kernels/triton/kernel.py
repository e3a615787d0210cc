"""Kernels that fail by name: what cannot be compiled or launched is told with the shapes it was for."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from loraplex.core.errors import KernelError


class Kernel:
    """Put above `triton.jit` on whatever is launched with a grid; launched as ever, `kernel[grid](...)`.

    Costs a call a launch. Triton's own errors say which line or how many bytes, not of which kernel or for
    which sizes; the driver's are bare RuntimeErrors. An error of a kernel that was launched before may come
    to light here, too, as the device runs behind: its cause ("illegal memory access") tells.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        try:
            return self._jitted[grid](*args, **constants)
        except (TritonError, RuntimeError) as error:
            raise KernelError(self._describe(grid, args, constants, error)) from error

    def _describe(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], error: Exception
    ) -> str:
        function = self._jitted.fn
        named = zip(inspect.signature(function).parameters, args, strict=False)
        given = ", ".join(f"{name} {_shown(value)}" for name, value in named)
        sizes = ", ".join(f"{name}={_shown(value)}" for name, value in constants.items())
        # A compilation error quotes the source first; what is wrong comes last.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = lines[-1] if lines else "no reason given"
        return (
            f"the GPU kernel {function.__name__} failed: {type(error).__name__}: {cause}; "
            f"it was launched with grid {grid}, {given}, {sizes}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return str(value)
