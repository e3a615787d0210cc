"""The route that shows tenants what they may do and have used."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.server.adapter_responses import Attainment, TenantInfo, TenantList
from loraplex.server.model_routes import json_response
from loraplex.server.openapi import operation
from loraplex.server.tenants.access import access_of
from loraplex.server.tenants.objective import Reached, Target
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.tenants.tenants_file import Tenant
from loraplex.server.waiting import WaitingBook


def tenant_router(tenants: Tenants, waiting: WaitingBook) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/v1/tenants",
        **operation(summary="Rights and use of the key's tenant", answer=TenantList, errors=(401,)),
    )
    async def list_tenants(request: Request) -> Response:
        access = access_of(request.scope)
        shown = [each for each in tenants.all() if access.is_operator or each.name == access.tenant]
        trouble = tenants.trouble if access.is_operator else None
        data = [_info(tenants, waiting, each) for each in shown]
        return json_response(TenantList(data=data, trouble=trouble))

    return router


def _info(tenants: Tenants, waiting: WaitingBook, tenant: Tenant) -> TenantInfo:
    account, limits = tenants.account(tenant), tenant.limits
    refused = [*account.num_refused.items(), *waiting.num_refused_of(tenant.name).items()]
    return TenantInfo(
        name=tenant.name,
        adapters=list(tenant.adapters.texts),
        base_model=tenant.uses_base,
        administers=list(tenant.administers.texts),
        operator=tenant.is_operator,
        metrics=tenant.reads_metrics,
        share=tenant.policy.share,
        priority=tenant.policy.priority,
        requests_per_minute=limits.requests_per_minute,
        requests_left=account.requests_left,
        tokens_per_minute=limits.tokens_per_minute,
        tokens_left=account.tokens_left,
        max_in_flight=limits.max_in_flight,
        in_flight=account.num_in_flight,
        requests=account.num_requests,
        prompt_tokens=account.num_prompt_tokens,
        generated_tokens=account.num_generated_tokens,
        refused={reason.value: count for reason, count in sorted(refused) if count},
        slo_ttft=tenant.policy.slo_ttft,
        slo_tpt=tenant.policy.slo_tpt,
        slo_requests={
            target.value: Attainment(
                attained=account.num_reached[Reached(target, True)],
                missed=account.num_reached[Reached(target, False)],
            )
            for target in Target
        },
    )
