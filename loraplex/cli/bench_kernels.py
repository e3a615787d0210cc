"""`loraplex bench kernels`: how close the decode LoRA kernels come to memory bandwidth.

Imports of torch are deferred until the command runs, to keep `--help` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.json_out import check_writable, write_json
from loraplex.core.modules import MAX_RANK
from loraplex.core.words import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_ADAPTERS: Final = 256
"""Upper bound of adapters, one row each: the most rows of a decode step."""


def kernels(
    shape: Annotated[str, typer.Option(help="llama-2-7b, llama-3-8b, qwen2.5-7b, ...")] = "llama-2-7b",
    num_adapters: Annotated[
        str, typer.Option(help="Numbers of adapters, each on one row of a decode step.")
    ] = "16,32,64",
    ranks: Annotated[str, typer.Option(help="Ranks; every number of adapters is tried with each.")] = (
        "16,32,64,128"
    ),
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write figures, machine and parameters here.")
    ] = None,
) -> None:
    """Time of the decode LoRA kernels for q, k and v, one layer after the other. Needs a CUDA device."""
    import torch

    from loraplex.core.errors import CapacityError, ModelError
    from loraplex.model.shapes import config_of_shape

    counts = _numbers(num_adapters, "--num-adapters", _MAX_ADAPTERS)
    wanted = _numbers(ranks, "--ranks", MAX_RANK)
    config_of_shape(shape)
    check_writable(json_out)
    if not torch.cuda.is_available():
        raise ModelError(
            "there is no CUDA device here, and these kernels run on nothing else; run this on a machine with "
            "an NVIDIA GPU, or measure the CPU with `loraplex bench engine decode --device cpu`"
        )
    from loraplex.bench.kernel_scenarios import measure_kernels

    try:
        copy_tb_per_s, rows = measure_kernels(shape, counts, wanted)
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"the device's memory does not hold {max(counts)} {plural('adapter', max(counts))} of rank "
            f"{max(wanted)}; lower --num-adapters or --ranks"
        ) from error
    halves = [half for row in rows for half in _halves(row, copy_tb_per_s)]
    _show(shape, copy_tb_per_s, halves)
    if json_out is not None:
        parameters = {"shape": shape, "num_adapters": counts, "ranks": wanted}
        _write(json_out, parameters, {"copy_tb_per_s": copy_tb_per_s, "rows": halves})


def _numbers(text: str, option: str, highest: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 16,32", param_hint=option
        ) from None
    for number in numbers:
        if not 1 <= number <= highest:
            raise typer.BadParameter(f"{number} is not between 1 and {highest}", param_hint=option)
    return numbers


def _halves(row: dict[str, Any], copy_tb_per_s: float) -> list[dict[str, Any]]:
    """Return shrink and expand of one measured row, each relative to the device's copy bandwidth."""
    return [
        {
            "adapters": row["adapters"],
            "rank": row["rank"],
            "kernel": kernel,
            "mb": row[f"{kernel}_mb"],
            "us": row[f"{kernel}_us"],
            "tb_per_s": row[f"{kernel}_tb_per_s"],
            "share_of_copy": round(row[f"{kernel}_tb_per_s"] / copy_tb_per_s, 3),
        }
        for kernel in ("shrink", "expand")
    ]


def _show(shape: str, copy_tb_per_s: float, halves: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{shape}, q k v, one layer; the device copies {copy_tb_per_s:.2f} TB/s"
    table = Table(title=title, title_justify="left")
    for heading in ("adapters", "rank", "kernel", "MB", "µs", "TB/s", "of copy"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for half in halves:
        table.add_row(
            str(half["adapters"]),
            str(half["rank"]),
            half["kernel"],
            f"{half['mb']:.2f}",
            f"{half['us']:.2f}",
            f"{half['tb_per_s']:.2f}",
            f"{half['share_of_copy']:.0%}",
        )
    Console().print(table)


def _write(path: Path, parameters: dict[str, Any], results: dict[str, Any]) -> None:
    from loraplex.bench.environment import ENGINE_PACKAGES, environment

    document = environment(ENGINE_PACKAGES) | {"parameters": parameters, "results": results}
    write_json(path, document)
