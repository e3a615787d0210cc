"""The options about tenants that commands which serve or simulate have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NoReturn

import typer

from loraplex.cli.durations import Duration, duration_option, parse_duration
from loraplex.core.tenants import TENANT_NAMES, TenantPolicy, is_tenant_name

MaxBorrowing = Annotated[
    str | None,
    typer.Option(
        "--max-borrowing",
        metavar="SHARE",
        help="By how much a tenant that asks for more than its share may make the steps of others longer, "
        "e.g. 10%; default: no bound, so that no place stays empty while anybody waits.",
    ),
]
Tenants = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant",
        metavar="NAME[:KEY=VALUE,...]",
        help="The rights of a tenant of the workload: share=2, priority=1, slo-ttft=2s, slo-tpt=50ms; may be "
        "given again. Others have a share of 1.",
    ),
]
MaxTtft = Annotated[
    Duration | None,
    duration_option(
        "--max-ttft",
        may_be_least=False,
        text="Refuse requests whose first token is predicted to take longer, e.g. 2s, as a server does.",
    ),
]


def parse_borrowing(text: str | None) -> float | None:
    """Return the share that `--max-borrowing` stands for, if given. Raises a usage error."""
    if text is None:
        return None
    number, percent = _number(text.strip().removesuffix("%")), text.strip().endswith("%")
    if number is None or not 0 <= number < math.inf:
        raise typer.BadParameter(f"{text!r} is no share; write it like 10%", param_hint="--max-borrowing")
    return number / 100 if percent else number


def parse_tenants(texts: Sequence[str] | None) -> tuple[TenantPolicy, ...]:
    """Return the rights that `--tenant` gives. Raises a usage error."""
    found = [_parse_tenant(text) for text in texts or ()]
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"tenant {twice!r} is given twice", param_hint="--tenant")
    return tuple(found)


def _parse_tenant(text: str) -> TenantPolicy:
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        parse = _KEYS.get(key.strip())
        if parse is None or (field := key.strip().replace("-", "_")) in fields:
            _refuse(text, f"{part!r} is unknown or given twice; there are {', '.join(_KEYS)}")
        parsed = parse(value)
        if parsed is None:
            _refuse(text, f"{value!r} is no {key.strip()}")
        fields[field] = parsed
    if not is_tenant_name(name):
        _refuse(text, f"it has no name of {TENANT_NAMES}")
    return TenantPolicy(name=name, **fields)


def _refuse(text: str, reason: str) -> NoReturn:
    raise typer.BadParameter(
        f"{text!r}: {reason}; write it like acme:share=2,slo-ttft=2s", param_hint="--tenant"
    )


def _share(text: str) -> float | None:
    number = _number(text)
    return number if number is not None and 0 < number < math.inf else None


def _priority(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _time(text: str) -> float | None:
    return parse_duration(text, "--tenant")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_KEYS: Final[dict[str, Callable[[str], Any]]] = {
    "share": _share,
    "priority": _priority,
    "slo-ttft": _time,
    "slo-tpt": _time,
}
