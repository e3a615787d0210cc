"""The replicas that the request of this context was sent to, for its line in the log."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

sent_to: Final[ContextVar[list[int] | None]] = ContextVar("sent_to", default=None)
"""Numbers of the replicas, filled in by the fleet; None outside of requests."""
