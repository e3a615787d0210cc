"""Logging of a loraplex process: one line per record on stderr, as text or as JSON.

    logger.info("answered", extra=fields(status=200, model="pirate"))

    2026-11-16 12:31:02 INFO request: answered status=200 model=pirate
    {"time": "2026-11-16T12:31:02.345Z", "level": "INFO", ..., "message": "answered", "status": 200, ...}

Callers only format and queue a line; a thread writes it. A pipe that is not read therefore never blocks the
event loop or an engine step: lines are dropped instead, and their number is logged once there is room.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, TextIO

_MAX_QUEUED_LINES: Final = 10_000
_FLUSH_TIMEOUT_S: Final = 1.0
_OURS: Final = "loraplex"
_LIBRARIES_WITH_HANDLERS: Final = ("transformers", "huggingface_hub")

# C0 and C1 controls, line and paragraph separators, and characters that change the direction of text.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_CONTROL_IN_LINES: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_PLAIN_VALUE: Final = re.compile(r"[A-Za-z0-9._:@/+,-]+")

log_context: Final[ContextVar[Mapping[str, object]]] = ContextVar("log_context", default=MappingProxyType({}))
"""Fields added to every record logged from this task or thread, e.g. the id of the request it works on."""


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe records that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """The level as a number of the logging module."""
        return logging.getLevelNamesMapping()[self.name]


def fields(**values: object) -> dict[str, Any]:
    """Return the `extra` of a log call that gives a record structured fields; None values are left out."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """Formats a line for people: time, level, logger, message, `key=value` pairs; tracebacks follow,
    indented.

    Nothing in a message or field can start a new line or reach the terminal as a control character.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"{process} " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix(f"{_OURS}.")
        message = _CONTROL.sub(_escape, record.getMessage().strip())
        pairs = "".join(f" {key}={_text_value(value)}" for key, value in _fields_of(record).items())
        line = f"{moment} {record.levelname} {self._process}{name}: {message}{pairs}"
        if traceback := _traceback(self, record):
            lines = _CONTROL_IN_LINES.sub(_escape, traceback).split("\n")
            line += "".join(f"\n    {each}" for each in lines)
        return line


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line, in ASCII; a traceback is the field `exception`."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process or "server"

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage().strip(),
        }
        if traceback := _traceback(self, record):
            line["exception"] = traceback
        for key, value in _fields_of(record).items():
            line.setdefault(key, value)
        return json.dumps(line, default=str)


class StderrHandler(logging.Handler):
    """Queues formatted lines for a thread that writes them; never waits for the stream."""

    def __init__(
        self, stream: TextIO, log_format: LogFormat, process: str = "", *, max_lines: int = _MAX_QUEUED_LINES
    ) -> None:
        super().__init__()
        self.log_format = log_format
        self.setFormatter(JsonFormatter(process) if log_format is LogFormat.JSON else TextFormatter(process))
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write_lines, name="log-writer", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1  # under the handler's lock
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, for at most a second: the stream may be stuck."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Write the remaining lines and end the thread, unless the stream is stuck."""
        if self._writer.is_alive():
            self.flush()
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                pass
            else:
                self._writer.join(_FLUSH_TIMEOUT_S)
        super().close()

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if count := self._take_dropped():
                self._write(self.format(_dropped_record(count)))
            self._lines.task_done()

    def _take_dropped(self) -> int:
        if not self._num_dropped:
            return 0
        self.acquire()
        try:
            count, self._num_dropped = self._num_dropped, 0
        finally:
            self.release()
        return count

    def _write(self, line: str) -> None:
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # closed, or its reader is gone: there is nowhere else to report it


@contextmanager
def logging_to_stderr(level: int, log_format: LogFormat, process: str = "") -> Iterator[None]:
    """Write this process's log to stderr. Libraries log from WARNING on, or from INFO when debugging.

    `process` is put into each line, to tell several processes on one terminal apart.
    """
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    before = root.level, ours.level
    handler = StderrHandler(sys.stderr, log_format, process)
    root.addHandler(handler)
    root.setLevel(logging.INFO if level < logging.INFO else max(level, logging.WARNING))
    ours.setLevel(level)
    logging.captureWarnings(True)
    adopt_library_loggers()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(before[0])
        ours.setLevel(before[1])
        handler.close()


def adopt_library_loggers() -> None:
    """Remove the handlers that some libraries install, so that their records reach ours; a no-op without
    ours.

    Call it again after such a library is imported.
    """
    if _our_handler() is None:
        return
    for name in _LIBRARIES_WITH_HANDLERS:
        library = logging.getLogger(name)
        for handler in library.handlers[:]:
            library.removeHandler(handler)
        library.propagate = True


def current_level() -> int:
    """Return the level that child processes should log at."""
    return logging.getLogger(_OURS).getEffectiveLevel()


def current_format() -> LogFormat:
    """Return the format that child processes should log in."""
    handler = _our_handler()
    return LogFormat.TEXT if handler is None else handler.log_format


def flush_logs() -> None:
    """Wait until everything logged so far is written, for at most a second."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _our_handler() -> StderrHandler | None:
    handlers = logging.getLogger().handlers
    return next((handler for handler in handlers if isinstance(handler, StderrHandler)), None)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    own: Mapping[str, object] = getattr(record, "fields", {})
    context = {key: value for key, value in log_context.get().items() if key not in own}
    return {key: value for key, value in {**own, **context}.items() if value is not None}


def _text_value(value: object) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _dropped_record(count: int) -> logging.LogRecord:
    lines = "line was" if count == 1 else "lines were"
    return logging.LogRecord(
        name=f"{_OURS}.log",
        level=logging.WARNING,
        pathname=__file__,
        lineno=0,
        msg=f"{count} log {lines} dropped: stderr was not read fast enough",
        args=None,
        exc_info=None,
    )
