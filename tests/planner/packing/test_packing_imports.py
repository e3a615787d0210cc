from __future__ import annotations

import subprocess
import sys


def test_packers_need_the_standard_library_alone() -> None:
    """Only dLoRA's placement, which is the fleet's, computes with arrays."""
    names = ("max_pack", "max_base", "random_packing", "least_rate", "improve", "even", "least_gpus")
    code = "import sys\n" + "".join(f"import loraplex.planner.packing.{name}\n" for name in names)
    command = [sys.executable, "-c", code + "print(*sys.modules)"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {"numpy", "torch", "sklearn", "asyncio", "pathlib"}.isdisjoint(listed)
