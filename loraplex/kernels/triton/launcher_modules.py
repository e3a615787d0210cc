"""Prevents Triton from giving a kernel another kernel's launcher, where threads load several at a time.

Up to Triton 3.6 every signature of a kernel has a launcher of its own, a compiled Python module, and all of
these modules have the same name. If a module is loaded that this process has loaded before, Python does not
make a new object: it writes the module's functions into the object that was loaded last under that name.
Between loading a launcher and reading its function, another thread can thus replace the function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.runtime import build

_LoadModule = Callable[[str, str], Any]
_PATCHED = "_load_module_from_path"
_lock = threading.Lock()


def load_modules_apart() -> None:
    """Make Triton read a module's contents before any other module is loaded, from now on."""
    load: _LoadModule | None = getattr(build, _PATCHED, None)
    if load is not None and not hasattr(load, "__wrapped__"):
        setattr(build, _PATCHED, loaded_apart(load))


def loaded_apart(load: _LoadModule) -> _LoadModule:
    """Return a function that loads a module and returns its contents as a separate namespace."""

    @wraps(load)
    def load_one(name: str, path: str) -> SimpleNamespace:
        with _lock:
            module: ModuleType = load(name, path)
            return SimpleNamespace(**vars(module))

    return load_one
