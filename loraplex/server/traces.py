"""OpenTelemetry traces: a span for each generation request, and below it its phases.

    POST /v1/chat/completions
      ├ queue            until the first step with it began
      ├ adapter load     while it waited, if its adapter had to be loaded; may overlap both others
      ├ prefill          until its first token
      └ decode           until its last

Spans are made when a request is over, from the times that its log line and the metrics have, and those that
the engine reported with its first token. They are sent in batches by a thread of OpenTelemetry's; those that
the collector does not take are dropped. Only servers that are asked for traces import this module.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import loraplex
from loraplex.core.clock import Clock

if TYPE_CHECKING:
    from starlette.types import Scope

    from loraplex.server.metrics import RequestMeter

_CONTEXT_HEADERS: Final = (b"traceparent", b"tracestate")
_TRACES_PATH: Final = "/v1/traces"
_LAST_SPANS_S: Final = 3.0
"""Seconds that a server waits at its end until the collector has the last spans."""


class RequestTrace:
    """The span of a request while it runs. `unix_ns` turns a moment of the server's clock into one of the
    wall clock, the same way for all spans of the request."""

    def __init__(self, span: Span, ahead_ns: int) -> None:
        self.span = span
        self._ahead_ns = ahead_ns

    @property
    def traceparent(self) -> str:
        """The header that makes what it is sent with a part of this span; empty if it is not recorded."""
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if self.is_recorded else ""

    def unix_ns(self, moment_s: float) -> int:
        return self._ahead_ns + round(moment_s * 1e9)

    @property
    def is_recorded(self) -> bool:
        """Return whether it will be sent: a client's or the operator's sampling may leave it out."""
        return bool(self.span.is_recording())


class _BriefSession(requests.Session):
    """Reads nothing of a collector's answer but its head: one without end would fill the memory."""

    def post(self, *args: Any, **options: Any) -> requests.Response:
        answer = super().post(*args, **{**options, "stream": True})
        answer.close()
        head = requests.Response()
        head.status_code, head.reason, head.headers = answer.status_code, answer.reason, answer.headers
        head._content = b""
        return head


class Traces:
    """Makes spans and sends them. `clock`: that of the records whose times it gets."""

    def __init__(self, clock: Clock, endpoint: str | None = None) -> None:
        """`endpoint`: the collector's base URL; by default that of OTEL_EXPORTER_OTLP_ENDPOINT or
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT."""
        self._clock = clock
        url = None if endpoint is None else endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
        attributes = {SERVICE_VERSION: loraplex.__version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes[SERVICE_NAME] = "loraplex"
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url, session=_BriefSession()))
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("loraplex", loraplex.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, arrival_s: float) -> RequestTrace:
        """Begin the span of a request, as a part of the trace that its headers name, if they do."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CONTEXT_HEADERS
        }
        ahead_ns = time.time_ns() - round(self._clock.now_s() * 1e9)
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            start_time=ahead_ns + round(arrival_s * 1e9),
        )
        return RequestTrace(span, ahead_ns)

    def end(
        self, trace: RequestTrace, line: Mapping[str, Any], meter: RequestMeter | None, *, failed: bool
    ) -> None:
        """End a request's span. `line`: the fields of its line in the log."""
        if not trace.is_recorded:
            return
        if meter is not None and meter.first_token_s is not None:
            self._add_phases(trace, meter, meter.first_token_s)
        span = trace.span
        span.set_attributes(_attributes(line))
        if failed:
            span.set_status(StatusCode.ERROR, line.get("error"))
        span.end(trace.unix_ns(self._clock.now_s()))

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS_S)

    def _add_phases(self, trace: RequestTrace, meter: RequestMeter, first_s: float) -> None:
        context = set_span_in_context(trace.span)

        def add(name: str, begin_s: float, end_s: float) -> None:
            span = self._tracer.start_span(name, context=context, start_time=trace.unix_ns(begin_s))
            span.end(trace.unix_ns(max(begin_s, end_s)))

        times = meter.phases
        if times is None or times.started_s is None:  # a server behind --backend says nothing of its phases
            add("queue and prefill", meter.arrival_s, first_s)
        else:
            add("queue", first_s - times.queued_s, first_s - times.started_s)
            if times.load_begun_s is not None:
                add("adapter load", first_s - times.load_begun_s, first_s - (times.load_ended_s or 0.0))
            add("prefill", first_s - times.started_s, first_s)
        add("decode", first_s, meter.last_token_s)


def _attributes(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line under the names that OpenTelemetry has for them, and the others under
    ours. The client's address and kind of key stay in the log."""
    found = {f"loraplex.{name}": value for name, value in line.items() if name not in _NOT_OURS}
    found |= {name: line.get(ours) for ours, name in _SEMANTIC.items()}
    if line.get("finish") is not None:
        found["gen_ai.response.finish_reasons"] = [
            each.partition(":")[0] for each in line["finish"].split(",")
        ]
    return {name: value for name, value in found.items() if value is not None}


_SEMANTIC: Final = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "error": "error.type",
    "model": "gen_ai.request.model",
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
_NOT_OURS: Final = frozenset({*_SEMANTIC, "finish", "client", "key", "ttft_ms", "total_ms"})
