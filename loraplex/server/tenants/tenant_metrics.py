"""The part of the /metrics page about tenants. A tenant's own page has its own series and nothing else.

Names of tenants need no escaping. As many tenants have series as the operator has put in the file.
"""

from __future__ import annotations

from collections.abc import Callable

from loraplex.server.tenants.account import Account, OverQuota
from loraplex.server.tenants.objective import attainment
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.waiting import WaitingBook


def render_tenants(tenants: Tenants | None, waiting: WaitingBook, *, only: str | None = None) -> bytes:
    """Return the series of all tenants, and whether their file is in force; or those of one tenant."""
    if tenants is None:
        return b""
    accounts = {
        each.name: tenants.account(each) for each in tenants.all() if only is None or each.name == only
    }

    def family(name: str, kind: str, text: str, value: Callable[[Account], int]) -> str:
        lines = [f'{name}{{tenant="{tenant}"}} {value(account)}\n' for tenant, account in accounts.items()]
        return _family(name, kind, text, "".join(lines))

    refused, reached = "loraplex:tenant_refused_total", "loraplex:tenant_slo_requests_total"
    page = [
        family(
            "loraplex:tenant_requests_total",
            "counter",
            "Requests within the tenant's limits",
            lambda account: account.num_requests,
        ),
        _family(
            refused,
            "counter",
            "Requests refused with 429 for a limit of the tenant or of the server",
            "".join(
                f'{refused}{{reason="{reason}",tenant="{tenant}"}} {count}\n'
                for tenant, account in accounts.items()
                for reason, count in (
                    *((each, account.num_refused[each]) for each in OverQuota),
                    *waiting.num_refused_of(tenant).items(),
                )
            ),
        ),
        _family(
            reached,
            "counter",
            "Requests by target (time to the first token, for each later token) and whether they reached it",
            "".join(
                f'{reached}{{result="{result}",target="{target}",tenant="{tenant}"}} {count}\n'
                for tenant, account in accounts.items()
                for target, result, count in attainment(account.num_reached)
            ),
        ),
        family(
            "loraplex:tenant_prompt_tokens_total",
            "counter",
            "Prompt tokens, as they count against the tenant's limit",
            lambda account: account.num_prompt_tokens,
        ),
        family(
            "loraplex:tenant_generation_tokens_total",
            "counter",
            "Tokens generated for the tenant",
            lambda account: account.num_generated_tokens,
        ),
        family(
            "loraplex:tenant_in_flight",
            "gauge",
            "Choices in flight",
            lambda account: account.num_in_flight,
        ),
    ]
    if only is None:
        in_force, changes = "loraplex:tenants_file_in_force", "loraplex:tenants_file_changes_total"
        page.append(
            _family(
                in_force,
                "gauge",
                "1 if the tenants file as it is now is in force; 0 if it cannot be used",
                f"{in_force} {int(tenants.trouble is None)}\n",
            )
        )
        page.append(
            _family(
                changes, "counter", "Changed tenants files put in force", f"{changes} {tenants.num_changes}\n"
            )
        )
    return "".join(page).encode()


def _family(name: str, kind: str, text: str, lines: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{lines}"
