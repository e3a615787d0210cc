"""Whether a file for results can be written is found out before they are measured."""

from __future__ import annotations

from pathlib import Path

import typer


def check_writable(path: Path | None, option: str = "--json") -> None:
    """A usage error if not; leaves nothing behind."""
    if path is None:
        return
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that exists",
            param_hint=option,
        ) from None
    if not existed:
        path.unlink()
