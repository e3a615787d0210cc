"""Errors while the demo base model is prepared."""

from __future__ import annotations

from loraplex.core.errors import LoraplexError


class DemoBaseError(LoraplexError):
    """The demo base model could not be prepared; the message says what to do."""
