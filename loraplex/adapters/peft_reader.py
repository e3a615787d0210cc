"""Reading a PEFT checkpoint: check the config, check every tensor, hash the content.

`read_adapter` returns an AdapterSpec or raises; `inspect_adapter` reports every finding about a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.adapters.checkpoint_files import CheckpointFiles, FilesChangedError, open_checkpoint
from loraplex.adapters.open_file import OpenFile, open_regular
from loraplex.adapters.peft_config import ConfigVerdict, Finding, judge_config, parse_config
from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.adapters.targets import TargetPlan, plan_targets
from loraplex.adapters.tensor_check import check_tensors
from loraplex.adapters.tensors import (
    SUPPORTED_DTYPES,
    FileCutShortError,
    TensorInfo,
    WeightsHeader,
    read_header,
    scan_data,
)
from loraplex.core.errors import AdapterError, AdapterFormatError, UserError
from loraplex.core.shape import ModelShape

_MAX_THREADS: Final = 8
_NUM_ATTEMPTS: Final = 2

# Part of every hash, so that a change of the canonical form yields different versions.
_HASH_DOMAIN: Final = b"loraplex-adapter-1\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterReport:
    """All findings about one checkpoint. It is servable exactly if `spec` is not None.

    `modules` and `tensors` hold whatever could be determined.
    """

    path: Path
    honoured: tuple[Finding, ...] = ()
    no_effect: tuple[Finding, ...] = ()
    refusals: tuple[AdapterError, ...] = ()
    modules: tuple[LoraModule, ...] = ()
    tensors: Mapping[str, TensorInfo]
    spec: AdapterSpec | None = None


def read_adapter(path: Path, shape: ModelShape, *, open_file: OpenFile = open_regular) -> AdapterSpec:
    """Return a validated adapter. Raises AdapterError: AdapterFormatError names the field or tensor,
    AdapterMismatchError says that the adapter belongs to another base. Also raises what `open_file`
    raises."""
    report = inspect_adapter(path, shape, open_file=open_file)
    if report.spec is None:
        raise _as_one(report.refusals)
    return report.spec


def read_adapters(
    paths: Sequence[Path],
    shape: ModelShape,
    *,
    num_threads: int | None = None,
    open_file: OpenFile = open_regular,
) -> list[AdapterSpec | UserError]:
    """Read many adapters in threads; return each path's spec or error, in order."""
    if num_threads is None:
        num_threads = min(_MAX_THREADS, 2 * (os.cpu_count() or 1))  # some wait for the disk

    def read_one(path: Path) -> AdapterSpec | UserError:
        try:
            return read_adapter(path, shape, open_file=open_file)
        except UserError as exc:
            return exc

    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="read-adapter") as pool:
        return list(pool.map(read_one, paths))


def inspect_adapter(path: Path, shape: ModelShape, *, open_file: OpenFile = open_regular) -> AdapterReport:
    """Return all findings about a checkpoint, with every problem in `refusals`. Does not raise for bad
    input."""
    path = path.absolute()
    for _ in range(_NUM_ATTEMPTS):
        try:
            with open_checkpoint(path, open_file) as files:
                report = _inspect_open(path, files, shape)
                files.check_unchanged()
            return report
        except (FilesChangedError, FileCutShortError):
            continue
        except AdapterError as exc:
            return AdapterReport(path=path, refusals=(exc,), tensors={})
        except OSError as exc:
            error = AdapterFormatError(f"{path} cannot be read: {exc.strerror or exc}")
            return AdapterReport(path=path, refusals=(error,), tensors={})
    changing = AdapterFormatError(
        f"the files in {path} change while they are read; wait until they are complete, or write them to "
        "another folder and rename it"
    )
    return AdapterReport(path=path, refusals=(changing,), tensors={})


def _inspect_open(path: Path, files: CheckpointFiles, shape: ModelShape) -> AdapterReport:
    refusals: list[AdapterError] = list(files.problems)
    verdict: ConfigVerdict | None = None
    plan: TargetPlan | None = None
    header: WeightsHeader | None = None
    version: str | None = None
    if files.config is not None:
        try:
            verdict = judge_config(parse_config(files.read_config()))
        except AdapterFormatError as exc:
            refusals.append(exc)
    if verdict is not None:
        refusals += verdict.refusals
        if verdict.settings is not None:
            plan = plan_targets(verdict.settings, shape)
            refusals += plan.refusals
    if files.weights is not None:
        try:
            header = read_header(files.weights)
        except AdapterFormatError as exc:
            refusals.append(exc)
    if header is not None:
        # If nothing is targeted, every tensor would look wrong; the cause is among the refusals already.
        if plan is not None and plan.modules:
            refusals += check_tensors(header.tensors, plan, shape)
        version, nonfinite = _scan(files, header, b"" if plan is None else plan.canonical)
        refusals += [nonfinite] if nonfinite is not None else []
    spec = None
    if not refusals:
        assert plan is not None, "nothing was refused, so there is a plan"
        assert version is not None, "nothing was refused, so the weights were hashed"
        spec = AdapterSpec(
            version=version,
            path=path,
            modules=plan.modules,
            num_params=plan.num_params,
            fingerprint=files.fingerprint(),
        )
    return AdapterReport(
        path=path,
        honoured=verdict.honoured if verdict else (),
        no_effect=(*(verdict.no_effect if verdict else ()), *(plan.notes if plan else ())),
        refusals=tuple(refusals),
        modules=plan.modules if plan else (),
        tensors=header.tensors if header else {},
        spec=spec,
    )


def _scan(
    files: CheckpointFiles, header: WeightsHeader, canonical_config: bytes
) -> tuple[str | None, AdapterFormatError | None]:
    """Return the content hash, and the error about numbers that are not finite."""
    assert files.weights is not None, "there is a header, so there is a file"
    if any(info.dtype not in SUPPORTED_DTYPES for info in header.tensors.values()):
        return None, None  # already refused for the dtype, and not readable as floats
    content = hashlib.sha256(_HASH_DOMAIN)
    content.update(len(canonical_config).to_bytes(8, "little"))
    content.update(canonical_config)
    nonfinite = scan_data(files.weights, header, content)
    return content.hexdigest(), nonfinite


def _as_one(refusals: Sequence[AdapterError]) -> AdapterError:
    """Return one error for all refusals: a new one, since those of a plan are shared with other adapters."""
    first, *others = refusals
    message = str(first)
    if others:
        message += f" (and {len(others)} more: `loraplex adapter check` lists them all)"
    if isinstance(first, AdapterFormatError):
        return AdapterFormatError(message, field=first.field)
    return type(first)(message)
