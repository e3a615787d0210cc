from __future__ import annotations

import pytest

from loraplex.bench.sse import StreamTally, error_text

TOKEN = b'data: {"id":"1","choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"id":"1","choices":[],"usage":{"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_each_chunk_is_timed_and_usage_is_not_a_token() -> None:
    tally = StreamTally()
    for now_s in (1.0, 2.0, 3.0):
        tally.feed(TOKEN, now_s)
    tally.feed(USAGE % 3 + DONE, 4.0)
    tally.close()
    assert tally.error is None
    assert tally.chunk_times_s == [1.0, 2.0, 3.0]
    assert tally.output_tokens == 3


def test_usage_inside_the_last_token_chunk_keeps_that_token() -> None:
    tally = StreamTally()
    tally.feed(TOKEN, 1.0)
    tally.feed(b'data: {"choices":[{"text":"b"}],"usage":{"completion_tokens":2}}\n\n' + DONE, 2.0)
    tally.close()
    assert (tally.chunk_times_s, tally.output_tokens) == ([1.0, 2.0], 2)


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    stream = b": comment\r\n\r\n" + TOKEN * 3 + USAGE.replace(b"\n", b"\r\n") % 3 + DONE
    tally = StreamTally()
    for start in range(0, len(stream), size):
        tally.feed(stream[start : start + size], float(start))
    tally.close()
    assert tally.error is None
    assert len(tally.chunk_times_s) == tally.output_tokens == 3


def test_a_stream_without_done_was_cut() -> None:
    tally = StreamTally()
    tally.feed(TOKEN * 2, 1.0)
    tally.close()
    assert tally.error == "the stream ended without [DONE] after 2 chunks"


def test_an_error_event_is_the_requests_error() -> None:
    tally = StreamTally()
    tally.feed(TOKEN + b'data: {"error": {"message": "engine died"}}\n\n' + DONE, 1.0)
    tally.close()
    assert tally.error == "engine died"


def test_generated_text_cannot_pass_for_an_error() -> None:
    tally = StreamTally()
    tally.feed(b'data: {"choices":[{"text":"{\\"error\\": 1}"}]}\n\n' + USAGE % 1 + DONE, 1.0)
    tally.close()
    assert tally.error is None


@pytest.mark.parametrize("stream", [TOKEN + DONE, DONE, b"data: nonsense\n\n" + DONE])
def test_a_stream_without_usage_is_an_error(stream: bytes) -> None:
    tally = StreamTally()
    tally.feed(stream, 1.0)
    tally.close()
    assert tally.error is not None
    assert "usage" in tally.error


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "other"}', '{"detail": "other"}'),
        (b"<html>", "<html>"),
        (b"\xff", "\ufffd"),
        (b"", "(empty body)"),
    ],
)
def test_error_text_finds_the_message(body: bytes, text: str) -> None:
    assert error_text(body) == text
