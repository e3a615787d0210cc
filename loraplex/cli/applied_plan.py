"""Says in words which plan a running fleet serves by, and what of it does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from loraplex.core.words import plural

_AGAIN: Final = "plan again with `loraplex plan make --from URL`"


def plan_lines(plan: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield lines about `plan` in the answer of `/v1/fleet`; none if the fleet was never given one."""
    if plan is None:
        return
    name = plan.get("name") or "a plan without a name"
    if plan.get("trouble"):
        yield (
            f"plan: not in force since the fleet was started, though applied before ({name}): "
            f"{plan['trouble']}; `loraplex plan release` forgets it"
        )
        return
    number = plan["adapters"]
    yield f"plan: {name}, {number:,} {plural('adapter', number)}, in force since {_when(plan['since_s'])}"
    not_holding = list(_not_holding(plan))
    yield from (f"  {line}" for line in not_holding or ["all of it holds"])


def _not_holding(plan: Mapping[str, Any]) -> Iterator[str]:
    if missing := plan["missing_replicas"]:
        yield (
            f"{_replicas(missing)} of it {'does' if len(missing) == 1 else 'do'} not serve; others have the "
            "adapters until then"
        )
    if new := plan["new_replicas"]:
        yield f"{_replicas(new)} {'is' if len(new) == 1 else 'are'} not in it; {_AGAIN}"
    if (found := plan["not_in_it"])["number"]:
        yield f"not in it, and placed by the policy: {_adapters(found)}; {_AGAIN}"
    if (found := plan["not_served"])["number"]:
        yield f"in it, and not served: {_adapters(found)}"
    if (found := plan["not_there"])["number"]:
        yield f"not where it has them yet: {_adapters(found)}"


def _replicas(numbers: list[int]) -> str:
    return f"{plural('replica', len(numbers))} {', '.join(map(str, numbers))}"


def _adapters(found: Mapping[str, Any]) -> str:
    number, first = found["number"], found["first"]
    more = f" and {number - len(first):,} more" if number > len(first) else ""
    return f"{number:,} {plural('adapter', number)} ({', '.join(map(repr, first))}{more})"


def _when(since_s: float) -> str:
    return datetime.fromtimestamp(since_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
