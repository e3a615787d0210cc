"""Options without a value in --help."""

from __future__ import annotations

from typing import Final

NO_VALUE: Final = ""
"""The metavar of a flag: recent releases of typer show `<bool>` behind one that has none."""
