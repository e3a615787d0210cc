"""Result files and pictures. A command checks that they can be written before it measures anything, and old
results stay until the new ones are complete."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from loraplex.core.errors import StorageError
from loraplex.core.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_writable(path: Path | None, option: str = "--json", *, inputs: tuple[Path, ...] = ()) -> None:
    """Raise a usage error if the file cannot be written or is one of the inputs; leaves nothing behind."""
    if path is None:
        return
    if any(path.resolve() == each.resolve() for each in inputs):
        raise typer.BadParameter(f"{path} is read here, and would be lost; name another", param_hint=option)
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
        path.resolve().unlink()  # if it is a link, remove its target: the link existed before


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the file like `save_json`, and print its name."""
    save_json(path, document)
    typer.echo(f"wrote {path}")


def save_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file atomically, or leave it as it is. Pipes and devices are written to."""
    save_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def save_text(path: Path, text: str) -> None:
    """Write a text like `save_json`."""
    _save(path, text.encode())


@contextmanager
def files_saved(*saves: tuple[Path | None, Callable[[Path], None]]) -> Iterator[Collection[Path]]:
    """Save files, then run the block that prints their figures; each happens even if the other fails. Yields
    the files that were saved.

    Files come first, as printing may fail on a full disk or a closed pipe. Errors of saving are raised after
    the block.
    """
    errors: list[StorageError] = []
    written: list[Path] = []
    for path, save in saves:
        if path is None:
            continue
        try:
            save(path)
            written.append(path)
        except StorageError as error:
            errors.append(error)
    yield written
    for path in written:
        typer.echo(f"wrote {path}")
    if errors:
        raise StorageError("; ".join(map(str, errors))) from errors[0]


def check_picture(path: Path | None, option: str = "--plot", *, inputs: tuple[Path, ...] = ()) -> None:
    """Check a picture like `check_writable`; also that it is a .png, as other suffixes mean other formats."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"{path.name} is no .png; name one", param_hint=option)
    check_writable(path, option, inputs=inputs)


def save_picture(path: Path, figure: Figure) -> None:
    """Write a figure as a PNG, like `save_json`."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    _save(path, picture.getvalue())


def _save(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}); make room, or name another"
        ) from error
