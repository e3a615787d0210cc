"""How options are shown in --help that take no value."""

from __future__ import annotations

from typing import Final

NO_VALUE: Final = ""
"""The metavar of a flag: recent releases of typer show `<bool>` behind one that has none."""
