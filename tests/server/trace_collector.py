"""An OTLP collector in this process, for servers that are started with its URL."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from server_process import PATIENCE_S

SOON: Final = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "20", "NO_PROXY": "127.0.0.1"}
"""The environment of a server that sends its spans soon."""


@dataclass
class Collector:
    """Decoded requests of OTLP, as they come."""

    url: str
    server: ThreadingHTTPServer
    received: queue.Queue[ExportTraceServiceRequest]
    spans: list[Span] = field(default_factory=list)
    service: dict[str, str] = field(default_factory=dict)

    def trace_of(self, request_id: str) -> tuple[Span, dict[str, Span]]:
        """Wait for a request's span; return it, and its children by name."""
        while not (
            roots := [each for each in self.spans if values(each).get("loraplex.request_id") == request_id]
        ):
            self._take()
        [root] = roots
        return root, {each.name: each for each in self.spans if each.parent_span_id == root.span_id}

    def _take(self) -> None:
        for resource in self.received.get(timeout=PATIENCE_S).resource_spans:
            self.service = values(resource.resource)
            for scope in resource.scope_spans:
                self.spans += scope.spans


def values(holder: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        self.server.received.put(ExportTraceServiceRequest.FromString(body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "100000000000")  # of which nothing comes
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    received: queue.Queue[ExportTraceServiceRequest] = queue.Queue()
    server.received = received  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield Collector(f"http://127.0.0.1:{server.server_address[1]}", server, received)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
