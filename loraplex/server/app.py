"""The HTTP application, put together from its parts; no sockets, processes or signals here."""

from __future__ import annotations

from fastapi import FastAPI

import loraplex
from loraplex.server.auth import ApiKeyMiddleware
from loraplex.server.deps import ServerDeps
from loraplex.server.errors import install_error_handlers
from loraplex.server.generation_routes import generation_router
from loraplex.server.model_routes import model_router
from loraplex.server.openapi import install_openapi
from loraplex.server.request_log import RequestLogMiddleware
from loraplex.server.utility_routes import utility_router


def create_app(deps: ServerDeps) -> FastAPI:
    """An ASGI application that serves `deps`. It starts and stops nothing itself."""
    app = FastAPI(title="loraplex", version=loraplex.__version__, redoc_url=None)
    app.include_router(generation_router(deps))
    app.include_router(model_router(deps))
    app.include_router(utility_router(deps))
    install_error_handlers(app)
    install_openapi(app)
    if deps.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=deps.api_keys)
    # Around all of Starlette's own, so that the answer to a bug has its request's id as well. Middleware
    # cannot be added after this.
    app.middleware_stack = RequestLogMiddleware(app.build_middleware_stack(), clock=deps.metrics.clock)
    return app
