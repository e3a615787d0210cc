"""Parsing and formatting of memory sizes: 512MiB, 2GB, 1.5g."""

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

_RATE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)/s\s*", re.IGNORECASE)


def parse_size(text: str, option: str | None = None) -> int:
    """Return bytes; GB is 10^9, GiB and a bare g are 2^30. Raises a usage error that names the option."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise typer.BadParameter(
            f"{text!r} is not a size; write it like 512MiB, 2GB or 1.5g", param_hint=option
        )
    num_bytes = round(float(match[1]) * unit)
    if num_bytes < 1:
        raise typer.BadParameter(
            f"{text!r} is no memory at all; leave it out for a size that suits", param_hint=option
        )
    return num_bytes


def parse_rate(text: str, option: str | None = None) -> float:
    """Return bytes per second of 25GB/s, or of 200Gb/s in bits. Raises a usage error that names the
    option."""
    match = _RATE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    # Bits and bytes differ by the case of a letter: if all letters are lower case, it is ambiguous.
    is_unclear = match is not None and match[2].islower() and match[2] != "b" and match[2].endswith("b")
    if match is None or unit is None or is_unclear:
        raise typer.BadParameter(
            f"{text!r} is no speed; write it like 25GB/s, or 200Gb/s in bits", param_hint=option
        )
    in_bits = match[2][:1].isupper() and match[2].endswith("b")
    rate = float(match[1]) * unit / (8 if in_bits else 1)
    if rate <= 0:
        raise typer.BadParameter(f"nothing ever arrives at {text}; give more", param_hint=option)
    return rate


def format_size(num_bytes: int) -> str:
    """Format a size with about three digits: 512 B, 3.2 MiB, 120 GiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
