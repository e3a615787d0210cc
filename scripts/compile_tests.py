"""Compile what each test worker, and each engine that tests start, would compile for itself, or wait for
another to: bytecode, the kernels of engines on a CPU, and the twin's engine with slots.

Pytest rewrites the assertions of test modules, and of packages that extend it, when it imports them. Here its
import hook does the same to every file and runs none: that is far less work than to collect the tests.
"""

from __future__ import annotations

import compileall
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from _pytest.assertion import rewrite
from _pytest.config import _prepareconfig

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "loraplex", "tests")
EXTENSIONS = ("anyio", "hypothesis", "schemathesis")
"""Packages of plugins: what their names import is compiled with rewritten assertions, too."""
LATER = ("schemathesis.python.asgi", "schemathesis.graphql", "hypothesis.stateful")
"""Modules of theirs that only tests import."""

TESTS = re.compile(r"/(conftest|test_\w+)\.py$")
"""Files that nothing imports but pytest, which rewrites their assertions."""

KERNELS = (
    ("loraplex.kernels.cpu.file_matrices", "compile_reader"),
    ("loraplex.engine.assist.control", "_compiled"),
    ("loraplex.engine.assist.product", "_touch_kernel"),
)
"""Kernels that are compiled when they are first used."""


def main() -> None:
    """Compile everything that tests import and pip did not install."""
    sys.dont_write_bytecode = False
    config = _prepareconfig(["--noconftest", str(ROOT)])
    for name in (*EXTENSIONS, *LATER):
        import_module(name)
    hook = config.pluginmanager.rewrite_hook
    assert isinstance(hook, rewrite.AssertionRewritingHook)
    # From here on modules are compiled and not run.
    rewrite.exec = lambda code, namespace: None  # type: ignore[attr-defined]
    for path in rewritten():
        spec = spec_from_file_location(path.stem, path, loader=hook)
        assert spec is not None
        hook.exec_module(module_from_spec(spec))
    for folder in FOLDERS:
        compileall.compile_dir(ROOT / folder, rx=TESTS, quiet=2)
    sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "twin")]
    import_module("compiled").compile_slot_engine()
    import_module("loraplex.kernels.cpu.numba_kernels")
    for module, compile_kernel in KERNELS:
        getattr(import_module(module), compile_kernel)()


def rewritten() -> Iterator[Path]:
    """Yield the files whose assertions pytest rewrites."""
    for pattern in ("conftest.py", "test_*.py"):
        yield from sorted((ROOT / "tests").rglob(pattern))


if __name__ == "__main__":
    main()
