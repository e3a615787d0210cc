"""Lines of the log: their two formats, what cannot be smuggled into them, and a stream that nobody reads."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings

import pytest

from loraplex.core import logs
from loraplex.core.logs import LogFormat, LogLevel, StderrHandler, fields, logging_to_stderr


def written(log_format: LogFormat, *args: object, process: str = "", **options: object) -> str:
    """Return the output of one call of a logger."""
    stream = io.StringIO()
    handler = StderrHandler(stream, log_format, process)
    logger = logging.Logger("loraplex.request", logging.DEBUG)
    logger.addHandler(handler)
    logger.warning(*args, **options)  # type: ignore[arg-type]
    handler.close()
    return stream.getvalue()


def test_a_text_line_has_level_logger_message_and_fields() -> None:
    line = written(LogFormat.TEXT, "answered %d", 3, extra=fields(status=200, model="a b", error=None))
    assert line.endswith(' WARNING request: answered 3 status=200 model="a b"\n')
    assert " WARNING engine request: " in written(LogFormat.TEXT, "x", process="engine")


def test_a_json_line_is_one_object_with_fields_as_keys() -> None:
    line = written(LogFormat.JSON, "answered %d", 3, extra=fields(status=200, model="a b", error=None))
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "WARNING",
        "logger": "loraplex.request",
        "process": "server",
        "message": "answered 3",
        "status": 200,
        "model": "a b",
    }


@pytest.mark.parametrize("log_format", LogFormat)
@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\x1b[2Kb", "a\u2028b", "a\x85b", "a\u202eb"])
def test_no_text_starts_a_line_or_controls_the_terminal(log_format: LogFormat, text: str) -> None:
    line = written(log_format, "message %s", text, extra=fields(model=text))
    assert len(line.splitlines()) == 1
    assert line.rstrip("\n").isprintable()


def test_a_traceback_is_indented_in_text_and_a_field_in_json() -> None:
    def fail(log_format: LogFormat) -> str:
        try:
            raise ValueError("first\n2026-11-16 12:31:02 INFO request: forged")
        except ValueError:
            return written(log_format, "it failed", exc_info=True)

    first, *others = fail(LogFormat.TEXT).splitlines()
    assert first.endswith("it failed")
    assert others
    assert all(line.startswith("    ") for line in others)
    found = json.loads(fail(LogFormat.JSON))
    assert found["message"] == "it failed"
    assert found["exception"].startswith("Traceback")


def test_fields_of_the_context_are_in_every_record() -> None:
    token = logs.log_context.set({"request_id": "abc"})
    try:
        assert json.loads(written(LogFormat.JSON, "x"))["request_id"] == "abc"
    finally:
        logs.log_context.reset(token)


def test_a_stream_that_nobody_reads_holds_up_nobody_and_drops_are_counted() -> None:
    read_fd, write_fd = os.pipe()
    with open(read_fd, encoding="utf-8") as reader, open(write_fd, "w", encoding="utf-8") as writer:
        handler = StderrHandler(writer, LogFormat.TEXT, max_lines=100)
        logger = logging.Logger("loraplex.x", logging.INFO)
        logger.addHandler(handler)
        num_lines = 2000  # of more than 100 characters each: a pipe holds 64 KiB
        for number in range(num_lines):
            logger.info("%d %s", number, "x" * 100)
        num_read, dropped = 0, 0
        while num_read + dropped < num_lines:
            line = reader.readline()
            if "dropped: stderr was not read fast enough" in line:
                dropped += int(line.split("log: ")[1].split()[0])
            else:
                num_read += 1
        assert dropped > 0
        handler.close()


@pytest.mark.filterwarnings("always")  # not errors, as elsewhere in tests
def test_logging_to_stderr_is_undone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    library, ours = logging.getLogger("some.library"), logging.getLogger("loraplex.x")
    before = logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("loraplex").level
    with logging_to_stderr(LogLevel.INFO.number, LogFormat.JSON, "engine"):
        assert logs.current_format() is LogFormat.JSON
        assert logs.current_level() == logging.INFO
        ours.info("ours")
        ours.debug("too much")
        library.info("noise")
        library.warning("theirs")
        warnings.warn("careful", stacklevel=1)
    ours.warning("later")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages[:2] == ["ours", "theirs"]
    assert "careful" in messages[2]
    assert len(messages) == 3
    after = logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("loraplex").level
    assert before == after
    assert logs.current_format() is LogFormat.TEXT


def test_libraries_with_handlers_of_their_own_are_written_in_our_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    library = logging.getLogger("transformers")
    before = library.handlers[:], library.propagate
    try:
        library.propagate = False
        library.addHandler(logging.StreamHandler(stream))
        with logging_to_stderr(logging.INFO, LogFormat.JSON):
            library.warning("of a library")
        [line] = stream.getvalue().splitlines()
        assert json.loads(line)["logger"] == "transformers"
    finally:
        library.handlers[:], library.propagate = before
