"""Amounts of memory as people write them: 512MiB, 2GB, 1.5g."""

from __future__ import annotations

import re
from typing import Final

import typer

_UNITS: Final = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes; GB is 10^9, GiB and a bare g are 2^30. Raises a usage error."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it like 512MiB, 2GB or 1.5g")
    num_bytes = round(float(match[1]) * unit)
    if num_bytes < 1:
        raise typer.BadParameter(f"{text!r} is no memory at all")
    return num_bytes
