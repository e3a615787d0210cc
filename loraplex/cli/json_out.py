"""Whether a file for results or a picture can be written is found out before anything is measured. Results
that were there stay until all of the next ones are written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from loraplex.core.errors import StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_writable(path: Path | None, option: str = "--json", *, inputs: tuple[Path, ...] = ()) -> None:
    """A usage error if not, or if it is one of the files that are read; leaves nothing behind."""
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
        path.resolve().unlink()  # of a link, what it stands for: the link was there


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the file as `save_json` does, and say so."""
    save_json(path, document)
    typer.echo(f"wrote {path}")


def save_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file in one go, or leave it as it is. Pipes and devices stay what they are."""
    _save(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


@contextmanager
def files_saved(*saves: tuple[Path | None, Callable[[Path], None]]) -> Iterator[None]:
    """Save files, and then print their figures in the block: each is done also if the other one fails.

    Files come first, as the output may have no room, or its reader may leave. An error of theirs is raised
    when the figures are printed.
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
    yield
    for path in written:
        typer.echo(f"wrote {path}")
    if errors:
        raise StorageError("; ".join(map(str, errors))) from errors[0]


def check_picture(path: Path | None, option: str = "--plot", *, inputs: tuple[Path, ...] = ()) -> None:
    """The same of a PNG: by other names it would be drawn as something else, or not at all."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"{path.name} is no .png; name one", param_hint=option)
    check_writable(path, option, inputs=inputs)


def save_picture(path: Path, figure: Figure) -> None:
    """Write a figure as a PNG, as `save_json` writes its file."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    _save(path, picture.getvalue())


def _save(path: Path, data: bytes) -> None:
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = path.resolve()  # the file that a link stands for is written, not the link
        unfinished = path.with_name(f".{path.name}.new")
        try:
            unfinished.write_bytes(data)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)  # unless it has moved to its place
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}); make room, or name another"
        ) from error
