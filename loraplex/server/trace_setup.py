"""Set up traces if they are asked for. OpenTelemetry is imported only then."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from loraplex.core.clock import Clock
from loraplex.core.errors import OptionError, UserError
from loraplex.core.url_secrets import without_secrets

if TYPE_CHECKING:
    from loraplex.server.traces import Traces

logger = logging.getLogger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_GRPC_PORT: Final = 4317


def traces_of(endpoint: str | None, clock: Clock) -> Traces | None:
    """Return what sends traces, if that is asked for: by `--otlp-endpoint`, or by OpenTelemetry's variables.
    Raises UserError if OpenTelemetry is not installed, but only logs that for variables, which may be meant
    for other programs."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None and (is_off or not any(os.environ.get(name) for name in _ENDPOINTS)):
        return None
    try:
        from loraplex.server.traces import Traces
    except ImportError:
        missing = "traces need OpenTelemetry, which is not installed; pip install 'loraplex[otel]'"
        if endpoint is not None:
            raise UserError(f"--otlp-endpoint: {missing}") from None
        logger.warning("%s, or unset %s", missing, " and ".join(_ENDPOINTS))
        return None
    return Traces(clock, endpoint)


def parse_endpoint(text: str) -> str:
    """Return a collector's base URL. Raises OptionError."""
    try:
        url = urlsplit(text)
        is_http, port = url.scheme in ("http", "https") and bool(url.hostname), url.port
    except ValueError:
        is_http, port = False, None
    if not is_http or url.query or url.fragment:
        raise OptionError(f"{without_secrets(text)!r} is no URL of a collector; write http://collector:4318")
    if port == _GRPC_PORT:
        raise OptionError(
            f"{without_secrets(text)!r} is the port of OTLP over gRPC; traces are sent over HTTP, usually to "
            "4318"
        )
    return text
