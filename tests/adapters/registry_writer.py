"""A process that registers adapters for ever, or until its file size limit stops it. Run by test_registry."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from loraplex.adapters.registry import AdapterRegistry
from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.adapters.targets import tensor_names
from loraplex.core.errors import StorageError

BASE_MODEL = "base"


def make_spec(version: str, *, num_layers: int = 8) -> AdapterSpec:
    modules = []
    for layer in range(num_layers):
        a_name, b_name = tensor_names(layer, "q_proj")
        modules.append(
            LoraModule(layer=layer, module="q_proj", rank=8, scale=1 / 3, a_name=a_name, b_name=b_name)
        )
    return AdapterSpec(
        version=version,
        path=Path("/adapters") / version,
        modules=tuple(modules),
        num_params=4096,
        fingerprint="1-2-3+4-5-6",
    )


def put_many(registry: AdapterRegistry, adapters: Sequence[tuple[str, AdapterSpec]], **options: Any) -> None:
    """Register adapters in one transaction, whatever their names stood for."""
    now = registry.put_unless_changed(adapters, seen=registry.states(), **options)
    assert now.keys() == {name for name, _ in adapters}


def main() -> None:
    state_dir, max_file_bytes = Path(sys.argv[1]), int(sys.argv[2])
    registry = AdapterRegistry(state_dir, BASE_MODEL)
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    for number in count():
        try:
            put_many(registry, [(f"a{number}-{part}", make_spec(f"v{number}")) for part in range(3)])
        except StorageError as exc:
            print("StorageError", exc, flush=True)
            return
        print(number, flush=True)


if __name__ == "__main__":
    main()
