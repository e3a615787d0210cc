"""An HTTP server in this process that answers as it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

Canned = Mapping[str, tuple[int, Any]]
"""Status and body by path; a body of another type than str is sent as JSON. Other paths are answered 404."""


@contextmanager
def answering(canned: Canned) -> Iterator[str]:
    """Answer GET requests while the block runs; yields the URL. Changes of `canned` count at once."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = canned.get(self.path, (404, {}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def demand_of(rates_rps: Mapping[str, float], *, rank: int = 8, seconds: float = 1000.0) -> dict[str, Any]:
    """Return what a server answers that measured these rates over some time."""
    rows = [
        {"name": name, "rank": rank, "requests": round(rate * seconds)} for name, rate in rates_rps.items()
    ]
    return {
        "object": "demand",
        "seconds": seconds,
        "base_requests": 0,
        "prompt_tokens": 200.0,
        "output_tokens": 30.0,
        "data": rows,
    }
