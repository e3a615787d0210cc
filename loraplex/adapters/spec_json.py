"""AdapterSpec as JSON text, for the registry."""

from __future__ import annotations

import json
from pathlib import Path

from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.adapters.targets import tensor_names
from loraplex.core.modules import MODULE_INDEX, MODULES


def spec_to_json(spec: AdapterSpec) -> str:
    """Return compact JSON: modules as [layer, module index, rank, scale]; tensor names follow from the first
    two."""
    return json.dumps(
        {
            "version": spec.version,
            "path": str(spec.path),
            "fingerprint": spec.fingerprint,
            "num_params": spec.num_params,
            "modules": [
                [each.layer, MODULE_INDEX[each.module], each.rank, each.scale] for each in spec.modules
            ],
        },
        separators=(",", ":"),
    )


def spec_from_json(text: str) -> AdapterSpec:
    """Invert `spec_to_json`. Raises ValueError, KeyError, TypeError or IndexError on other text."""
    stored = json.loads(text)
    return AdapterSpec(
        version=stored["version"],
        path=Path(stored["path"]),
        modules=tuple(_module(*entry) for entry in stored["modules"]),
        num_params=stored["num_params"],
        fingerprint=stored["fingerprint"],
    )


def _module(layer: int, module_index: int, rank: int, scale: float) -> LoraModule:
    module = MODULES[module_index]
    a_name, b_name = tensor_names(layer, module)
    return LoraModule(layer=layer, module=module, rank=rank, scale=scale, a_name=a_name, b_name=b_name)
