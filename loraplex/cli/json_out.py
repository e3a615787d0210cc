"""Whether a file for results or a picture can be written is found out before anything is measured."""

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


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """The same of a PNG: by other names it would be drawn as something else, or not at all."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"{path.name} is no .png; name one", param_hint=option)
    check_writable(path, option)
