"""`loraplex adapter`: check a checkpoint before serving it, and list and change the adapters of a server.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from loraplex.cli import adapter_versions
from loraplex.cli.flags import App
from loraplex.cli.server_calls import DEFAULT_URL, ApiKey, AsJson, BaseUrl, rows_of
from loraplex.cli.sizes import format_size
from loraplex.cli.table import Column, number_column, print_table, printable, text_column
from loraplex.core.errors import UserError
from loraplex.core.words import plural

if TYPE_CHECKING:
    from rich.console import Console

    from loraplex.adapters.peft_config import Finding
    from loraplex.adapters.peft_reader import AdapterReport
    from loraplex.adapters.spec import AdapterSpec
    from loraplex.core.shape import ModelShape

app = App(help="Check LoRA adapters, and list and change those of a server.", no_args_is_help=True)
for _command in (
    *(adapter_versions.load, adapter_versions.unload, adapter_versions.versions),
    *(adapter_versions.promote, adapter_versions.abort, adapter_versions.rollback),
):
    app.command()(_command)

EXIT_REFUSED: Final = 1

_SHOWN_VERSION_CHARS: Final = 8


@app.command()
def check(
    source: Annotated[
        str,
        typer.Argument(
            help="The adapter's folder, or a Hugging Face repository: owner/name or owner/name@revision."
        ),
    ],
    model: Annotated[str, typer.Option(help="The base model: a checkpoint folder or a Hugging Face id.")],
    as_json: AsJson = False,
) -> None:
    """Tell what serving an adapter would honour, what has no effect, and all that is in the way.

    Exit code 0: it can be served; 1: it is refused, or it or the model cannot be read; 2: bad usage.
    """
    from loraplex.model.source import load_shape

    raise typer.Exit(run_check(_bring(source), model, as_json=as_json, load_shape=load_shape))


@app.command("list")
def list_adapters(
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Read this state folder instead of asking a server.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the adapters of a running server, or those remembered in a state folder."""
    if state_dir is not None:
        rows, columns = _from_state_dir(state_dir)
    else:
        rows, columns = _from_server(base_url, api_key), _SERVER_COLUMNS
        for row in [] if as_json else rows:
            if row.get("bytes") == 0:  # backends of a fleet do not report it
                row["bytes"] = row["hits"] = None
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo("no adapters")
        return
    print_table(rows, columns)


def _bring(source: str) -> Path:
    """Return the adapter's folder, fetched if necessary; exits with an error if that fails."""
    from loraplex.adapters.remote import resolve_adapter
    from loraplex.core.errors import AdapterError

    try:
        return resolve_adapter(source)
    except AdapterError as error:
        _fail(str(error), EXIT_REFUSED)


def run_check(path: Path, model: str, *, as_json: bool, load_shape: Callable[[str], ModelShape]) -> int:
    """Run `adapter check`, with a function that reads the base model's shape; return the exit code."""
    from rich.console import Console

    from loraplex.adapters.base_name import base_names, other_base, other_base_warning
    from loraplex.adapters.peft_reader import inspect_adapter
    from loraplex.core.errors import ModelError

    try:
        shape = load_shape(model)
    except ModelError as error:
        _fail(f"--model: {error}", EXIT_REFUSED)
    report = inspect_adapter(path, shape)
    other = other_base(path, base_names(model))
    warnings = [] if other is None else [other_base_warning(other, model)]
    if as_json:
        typer.echo(json.dumps(_report_as_json(report, shape, warnings), indent=2))
    else:
        _print_report(Console(highlight=False, markup=False), report, shape, warnings)
    return 0 if report.spec is not None else EXIT_REFUSED


@dataclass(frozen=True, kw_only=True)
class ModuleGroup:
    """Layers in which one module has the same rank, scale and size; `num_bytes` is their total."""

    module: str
    layers: tuple[int, ...]
    rank: int
    scale: float
    num_bytes: int


def group_modules(report: AdapterReport) -> list[ModuleGroup]:
    """Return the report's modules with equal layers grouped; a module's largest group comes first."""
    from loraplex.core.modules import MODULE_INDEX

    groups: dict[tuple[str, int, float, int], list[int]] = {}
    for each in report.modules:
        tensors = (report.tensors.get(each.a_name), report.tensors.get(each.b_name))
        num_bytes = sum(tensor.num_bytes for tensor in tensors if tensor is not None)
        groups.setdefault((each.module, each.rank, each.scale, num_bytes), []).append(each.layer)
    found = [
        ModuleGroup(
            module=module, layers=tuple(layers), rank=rank, scale=scale, num_bytes=num_bytes * len(layers)
        )
        for (module, rank, scale, num_bytes), layers in groups.items()
    ]
    return sorted(found, key=lambda group: (MODULE_INDEX[group.module], -len(group.layers), group.layers))


def format_layers(layers: Sequence[int]) -> str:
    """Format layers as ranges: (0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _report_as_json(report: AdapterReport, shape: ModelShape, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "servable": report.spec is not None,
        "version": None if report.spec is None else report.spec.version,
        "num_params": None if report.spec is None else report.spec.num_params,
        "num_bytes": _total_bytes(report),
        "memory_bytes": None if report.spec is None else _memory_bytes(report.spec, shape),
        "warnings": list(warnings),
        "honoured": _findings(report.honoured),
        "no_effect": _findings(report.no_effect),
        "refused": [
            {"kind": type(error).__name__, "field": getattr(error, "field", None), "message": str(error)}
            for error in report.refusals
        ],
        "modules": [
            {
                "module": group.module,
                "layers": list(group.layers),
                "rank": group.rank,
                "scale": group.scale,
                "num_bytes": group.num_bytes,
            }
            for group in group_modules(report)
        ],
    }


def _findings(findings: Iterable[Finding]) -> list[dict[str, object]]:
    return [{"field": each.field, "value": _as_json(each.value), "reason": each.reason} for each in findings]


def _as_json(value: object) -> object:
    """Return the value, or a text instead if it is nested too deeply for the JSON writer."""
    try:
        json.dumps({"honoured": [{"value": value}]}, indent=2)
    except RecursionError:
        return "nested too deeply to be shown"
    return value


def _print_report(
    console: Console, report: AdapterReport, shape: ModelShape, warnings: Sequence[str]
) -> None:
    """Print the verdict on the first line, then refusals and warnings, then details."""
    path = printable(str(report.path))
    if report.spec is not None:
        num_modules = len(report.modules)
        size = f"{format_size(_total_bytes(report))} on disk"
        summary = f"rank {report.spec.max_rank}, {num_modules} {plural('module', num_modules)}, {size}"
        console.print(f"Servable: {path} ({summary})", style="green", soft_wrap=True)
    else:
        num_reasons = len(report.refusals)
        console.print(
            f"Refused for {num_reasons} {plural('reason', num_reasons)}: {path}", style="red", soft_wrap=True
        )
    for error in report.refusals:
        console.print(f"- {printable(str(error))}")
    for warning in warnings:
        console.print(f"Warning: {printable(warning)}", style="yellow")
    console.print()
    _print_details(console, report)
    console.print(f"Total bytes in the file: {_total_bytes(report):,}")
    if report.spec is not None:
        in_memory = {name: format_size(size) for name, size in _memory_bytes(report.spec, shape).items()}
        console.print(
            f"In memory when served: {in_memory['float32']} in float32 (default on a CPU), "
            f"{in_memory['bfloat16']} in bfloat16 or float16 (default on a GPU)",
            soft_wrap=True,
        )
        console.print(f"Content hash: {report.spec.version}", soft_wrap=True)


def _print_details(console: Console, report: AdapterReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from loraplex.adapters.peft_config import OFF, show

    telling = [each for each in report.no_effect if each.reason != OFF]
    off = [each.field for each in report.no_effect if each.reason == OFF]
    for title, findings in (("Honoured", report.honoured), ("No effect", telling)):
        if findings:
            table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
            for each in findings:
                cells = (each.field, show(each.value), each.reason)
                table.add_row(*(Text(printable(cell)) for cell in cells))
            console.print(table)
    if off:
        console.print(f"Off: {', '.join(off)}")
    if report.modules:
        table = Table(
            "module", "layers", title="LoRA modules", title_justify="left", box=None, pad_edge=False
        )
        for heading in ("rank", "scale", "bytes"):
            table.add_column(heading, justify="right")
        for group in group_modules(report):
            cells = (f"{group.rank}", f"{group.scale:g}", f"{group.num_bytes:,}")
            table.add_row(group.module, format_layers(group.layers), *cells)
        console.print(table)


def _total_bytes(report: AdapterReport) -> int:
    return sum(tensor.num_bytes for tensor in report.tensors.values())


def _memory_bytes(spec: AdapterSpec, shape: ModelShape) -> dict[str, int]:
    """Return the adapter's bytes in memory by the engine's dtype, which may differ from the file's."""
    from loraplex.adapters.slab import slab_layout
    from loraplex.perf.subject import ELEMENT_BYTES

    num_elements = slab_layout(spec, shape).num_elements
    return {dtype: num_elements * size for dtype, size in ELEMENT_BYTES.items()}


def _from_state_dir(state_dir: Path) -> tuple[list[dict[str, Any]], tuple[Column, ...]]:
    from loraplex.adapters.registry import read_registry
    from loraplex.core.errors import StorageError

    try:
        entries = read_registry(state_dir)
    except StorageError as error:
        _fail(str(error), EXIT_REFUSED)
    rows = [
        {
            "name": entry.name,
            "version": entry.spec.version,
            "rank": entry.spec.max_rank,
            "params": entry.spec.num_params,
            "base_model": base_model,
            "path": str(entry.spec.path),
        }
        for base_model, entry in entries
    ]
    return rows, _STATE_COLUMNS


def _from_server(base_url: str, api_key: str | None) -> list[dict[str, Any]]:
    try:
        return rows_of(base_url, "/v1/adapters", api_key, kind="adapters")
    except UserError as error:
        _fail(str(error), EXIT_REFUSED)


def _short_version(version: str) -> str:
    return version[:_SHOWN_VERSION_CHARS]


def _short_base_model(key: str) -> str:
    """Return the model's last name, without folders and the hash of its shape."""
    return key.rpartition("@")[0].rstrip("/").rpartition("/")[2] or key


# The most important columns first: a narrow terminal drops the last ones.
_SERVER_COLUMNS: Final = (
    text_column("name"),
    text_column("version", _short_version),
    number_column("rank"),
    number_column("bytes", heading="memory", show=format_size),
    text_column("tier"),
    number_column("in_flight"),
    number_column("hits"),
    number_column("loads"),
    text_column("path"),
)
_STATE_COLUMNS: Final = (
    text_column("name"),
    text_column("version", _short_version),
    number_column("rank"),
    number_column("params"),
    text_column("base_model", _short_base_model),
    text_column("path"),
)


def _fail(message: str, exit_code: int) -> NoReturn:
    typer.secho(f"error: {printable(message)}", fg=typer.colors.RED, err=True)
    raise typer.Exit(exit_code)
