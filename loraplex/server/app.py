"""The HTTP application, assembled from its parts; it has no sockets, processes or signals."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import loraplex
from loraplex.server.auth import Administrators, ApiKeyMiddleware
from loraplex.server.batches.routes import batch_router
from loraplex.server.deps import ServerDeps
from loraplex.server.errors import install_error_handlers
from loraplex.server.fleet_routes import fleet_router
from loraplex.server.generation_routes import generation_router
from loraplex.server.model_routes import model_router
from loraplex.server.openapi import install_openapi
from loraplex.server.pacing import PacingMiddleware
from loraplex.server.page.routes import page_router
from loraplex.server.request_log import RequestLogMiddleware
from loraplex.server.tenant_routes import tenant_router
from loraplex.server.utility_routes import utility_router
from loraplex.server.web_guard import WebGuardMiddleware


def create_app(deps: ServerDeps) -> FastAPI:
    """Return an ASGI application that serves `deps`. It starts and stops nothing itself."""
    # No pages of FastAPI: they fetch scripts from elsewhere, at the origin where keys are typed in.
    app = FastAPI(title="loraplex", version=loraplex.__version__, docs_url=None, redoc_url=None)
    app.include_router(generation_router(deps))
    app.include_router(model_router(deps))
    app.include_router(utility_router(deps))
    app.include_router(page_router(deps))
    if deps.fleet is not None:
        app.include_router(
            fleet_router(
                deps.fleet,
                deps.adapters,
                Administrators(deps.admin_keys, has_tenants=deps.tenants is not None),
                deps.bodies,
                deps.metrics.clock,
                deps.placement_file,
            )
        )
    if deps.batches is not None:
        app.include_router(batch_router(deps, deps.batches))
    if deps.tenants is not None:
        app.include_router(tenant_router(deps.tenants, deps.waiting))
    install_error_handlers(app)
    install_openapi(app)
    # The middleware added last sees a request first.
    if deps.api_keys or deps.tenants is not None:
        app.add_middleware(
            ApiKeyMiddleware, api_keys=deps.api_keys, admin_keys=deps.admin_keys, tenants=deps.tenants
        )
    if deps.web.allowed_origins:
        # Outside the key check: browsers send no key with a preflight request.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=deps.web.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    app.add_middleware(WebGuardMiddleware, access=deps.web)
    app.add_middleware(PacingMiddleware, pacer=deps.pacer)
    # Outside Starlette's own middleware, so that responses to internal errors also have a request id. No
    # middleware can be added after this.
    app.middleware_stack = RequestLogMiddleware(
        app.build_middleware_stack(), clock=deps.metrics.clock, traces=deps.traces
    )
    return app
