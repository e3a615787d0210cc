"""loraplex: many LoRA adapters on one base LLM, at little more than the price of the base model.

from loraplex import LLM, SamplingParams, StructuredOutput
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.core.sampling import SamplingParams
    from loraplex.core.structured_output import OutputKind, StructuredOutput
    from loraplex.engine.llm import LLM

    __version__: str

__all__ = ["LLM", "OutputKind", "SamplingParams", "StructuredOutput", "__version__"]

# A thread of a parallel region that is done first spins until the others are. By default it does so for
# milliseconds, and on a core that it has to share it takes from the others the time that it waits for: a step
# then takes many times as long. Read when torch loads its OpenMP library, so set before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Import torch and the engine only when somebody asks for them, and look up the version likewise."""
    if name == "__version__":
        return _built_version()
    if name == "LLM":
        from loraplex.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from loraplex.core.sampling import SamplingParams

        return SamplingParams
    if name in ("OutputKind", "StructuredOutput"):
        from loraplex.core import structured_output

        return getattr(structured_output, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _built_version() -> str:
    """Return the version that the package was built as, from its latest tag; of a clone that is only on the
    path, that of the installed package."""
    try:
        from loraplex._version import version
    except ImportError:
        from importlib import metadata

        try:
            return metadata.version("loraplex")
        except metadata.PackageNotFoundError:
            return "0+unknown"
    return str(version)
