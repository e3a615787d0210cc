"""A kernel that cannot be compiled or launched says which one it is, and for what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

import loraplex.kernels.triton
from loraplex.core.errors import KernelError
from loraplex.kernels.triton import rows
from loraplex.kernels.triton.kernel import Kernel


class Failing:
    """In place of what `triton.jit` makes: fails when it is launched."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @staticmethod
    def fn(x: Any, out: Any, stride: Any, SIZE: Any, BLOCK: Any) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            raise self.error

        return launch


def message(error: Exception) -> str:
    x, out = torch.zeros(3, 40, dtype=torch.float16), torch.zeros(3)
    with pytest.raises(KernelError) as raised:
        Kernel(Failing(error))[(3, 2)](x, out, 40, SIZE=40, BLOCK=64, num_warps=4)
    assert raised.value.__cause__ is error
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfResources(262144, 232448, "shared memory"), "OutOfResources: out of resource: shared memory"),
        (CompilationError("a = 1\nb = 2", None, "b is no block"), "CompilationError: b is no block"),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "RuntimeError: Triton Error [CUDA]: invalid"),
        (TritonError(), "TritonError: no reason given"),
    ],
    ids=["shared memory", "compilation", "driver", "no reason"],
)
def test_the_message_names_kernel_shapes_sizes_and_cause(error: Exception, cause: str) -> None:
    text = message(error)
    assert text.startswith(f"the GPU kernel fn failed: {cause}")  # first: a long message may be cut short
    assert (
        "grid (3, 2), x (3, 40) float16, out (3,) float32, stride 40, SIZE=40, BLOCK=64, num_warps=4" in text
    )
    assert "\n" not in text


def test_a_bug_of_our_own_is_not_dressed_up() -> None:
    with pytest.raises(AssertionError):
        Kernel(Failing(AssertionError("ours")))[(1,)]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter")
def test_a_real_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 48 is no power of two: no kernel can be made of it."""
    monkeypatch.setattr(triton, "next_power_of_2", lambda size: 48)
    with pytest.raises(
        KernelError, match=r"_add_rms_norm_kernel failed: .*x \(2, 40\) float32.*BLOCK_SIZE=48"
    ):
        rows.add_rms_norm(torch.zeros(2, 40), torch.zeros(2, 40), torch.ones(40), 1e-6)


def test_every_kernel_that_is_launched_is_guarded() -> None:
    for path in Path(loraplex.kernels.triton.__path__[0]).glob("*.py"):
        source = path.read_text()
        launched = set(re.findall(r"^ *(_\w+)\[\(", source, re.MULTILINE))
        guarded = set(re.findall(r"^@Kernel\n@triton\.jit(?:\([^)]*\))?\ndef (\w+)", source, re.MULTILINE))
        assert launched == guarded, path.name
