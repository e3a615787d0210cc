"""Text files line by line, compressed or not; a file that cannot be read is a WorkloadError that names it."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Final, TextIO, cast

from loraplex.workload.errors import WorkloadError

_GZIP_MAGIC: Final = b"\x1f\x8b"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line without its end), from 1. Compression is detected from the contents, not the
    name."""
    number = 0
    try:
        with _open(path) as file:
            for line in file:
                number += 1
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not a UTF-8 text file ({error.reason}, after line {number})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: a broken gzip file ({error}, after line {number})") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    # newline="\n": a carriage return within a line does not end it.
    if compressed:
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return path.open(encoding="utf-8", newline="\n")


@contextmanager
def write_text(path: Path) -> Iterator[TextIO]:
    """Write a file that is put in place when complete: until then, readers find the old file or none.

    A file whose name ends in .gz is compressed, without a timestamp, so that equal texts give equal files.
    """
    path = path.resolve()  # write the file that a link points to, not the link
    unfinished = path.with_name(f".{path.name}.new")
    if path.exists() and not path.is_file():
        raise WorkloadError(f"{path}: not a plain file")
    try:
        with ExitStack() as stack:
            binary: IO[bytes] = stack.enter_context(unfinished.open("wb"))
            if path.suffix == ".gz":
                packed = gzip.GzipFile(filename="", mode="wb", fileobj=binary, mtime=0)
                binary = cast(IO[bytes], stack.enter_context(packed))
            yield stack.enter_context(io.TextIOWrapper(binary, "utf-8", newline="\n"))
        unfinished.replace(path)
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):  # it was put in place, or could not be created
            unfinished.unlink()
