"""Log records that a test waits for."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from typing import Any

from loraplex.core.logs import TextFormatter


class Lines(logging.Handler):
    """Log records as they arrive, for a test to wait for; `text` is all of them as they would be written."""

    def __init__(self) -> None:
        super().__init__()
        self._records: queue.Queue[logging.LogRecord] = queue.Queue()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += TextFormatter().format(record) + "\n"
        self._records.put(record)

    def take(self) -> dict[str, Any]:
        """Return the next line: its level, its message, and those fields that have a value."""
        record = self._records.get(timeout=30)
        values: dict[str, Any] = record.fields  # type: ignore[attr-defined]
        known = {key: value for key, value in values.items() if value is not None}
        return {"level": record.levelname, "message": record.getMessage(), **known}

    def assert_none(self) -> None:
        assert self._records.empty(), self.text


def listening(name: str) -> Iterator[Lines]:
    logger, lines = logging.getLogger(name), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(logging.NOTSET)
