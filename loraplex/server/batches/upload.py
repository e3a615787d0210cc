"""Read an uploaded file from a multipart form: a part at a time, to the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam
from starlette.requests import ClientDisconnect, Request

from loraplex.core.errors import InvalidRequestError
from loraplex.server.batches.objects import FileObject
from loraplex.server.batches.store import OwnedFiles, storage_errors
from loraplex.server.errors import BodyTimeoutError, BodyTooLargeError, ContentEncodingError

_BUFFER_BYTES: Final = 2**18
_CHUNK_BYTES: Final = 2**18
_MAX_FIELD_BYTES: Final = 256
_MAX_FIELDS: Final = 8
_FORM_OVERHEAD_BYTES: Final = 2**16
"""Bytes of a form beside its file."""
_FORM: Final = (
    'send the file as a form: curl -F purpose=batch -F file=@batch.jsonl, or client.files.create(file=open("'
    'batch.jsonl", "rb"), purpose="batch")'
)
_UNNAMED: Final = "upload.jsonl"

_BAD_FORM: Final = (
    *(HttpProcessingError, ValueError, LookupError, RuntimeError, AssertionError, EOFError),
    *(BadContentDispositionHeader, BadContentDispositionParam),  # where warnings are errors
)
# Python would print each of them, and keep its text for good; the form is refused anyway.
warnings.filterwarnings("ignore", category=BadContentDispositionHeader)
warnings.filterwarnings("ignore", category=BadContentDispositionParam)


class _Inlet(BaseProtocol):
    """Stands between the request and the form's parser: its buffer stays small."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.connection_made(asyncio.Transport())  # the stream wants one; nothing is sent through it
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.stream = StreamReader(self, _BUFFER_BYTES, loop=asyncio.get_running_loop())

    def pause_reading(self) -> None:
        self._reading_paused = True
        self._has_room.clear()

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = False
        self._has_room.set()

    async def feed(self, parts: AsyncIterator[bytes], *, idle_timeout_s: float, max_bytes: int) -> None:
        """Feed the request's body to the parser. Its errors reach the reader of the stream."""
        num_bytes = 0
        try:
            while True:
                async with asyncio.timeout(idle_timeout_s):
                    part = await anext(parts, None)
                if part is None:
                    break
                num_bytes += len(part)
                if num_bytes > max_bytes + _FORM_OVERHEAD_BYTES:
                    raise too_large(max_bytes)
                if part:
                    self.stream.feed_data(part)
                await self._has_room.wait()
        except TimeoutError:
            self.stream.set_exception(
                BodyTimeoutError(f"the upload stopped for {idle_timeout_s:g} seconds; send it again")
            )
        except (BodyTooLargeError, ClientDisconnect) as error:
            self.stream.set_exception(error)
        else:
            self.stream.feed_eof()


@dataclass
class _Form:
    purpose: str | None = None
    filename: str = _UNNAMED
    num_bytes: int | None = None


async def receive_file(request: Request, owned: OwnedFiles, *, idle_timeout_s: float) -> FileObject:
    """Write the file of a form to the disk, and list it. Raises InvalidRequestError and what
    `OwnedFiles.new_content` raises; nothing is left of a file that is refused."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ContentEncodingError("the form is compressed, which this server does not decode")
    max_bytes = owned.store.limits.max_file_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes + _FORM_OVERHEAD_BYTES:
        raise too_large(max_bytes)
    content_type = request.headers.get("content-type", "")
    inlet = _Inlet()
    try:
        if not content_type.lower().startswith("multipart/form-data"):
            raise ValueError
        reader = MultipartReader({"Content-Type": content_type}, inlet.stream)
    except ValueError:
        raise InvalidRequestError(f"the body is not a multipart form; {_FORM}", param="file") from None
    file_id, path = await asyncio.to_thread(owned.new_content)
    form = _Form()
    feeding = asyncio.create_task(
        inlet.feed(request.stream(), idle_timeout_s=idle_timeout_s, max_bytes=max_bytes)
    )
    unfinished = path.with_suffix(".part")
    try:
        await _read_form(reader, form, unfinished, max_bytes)
        while await inlet.stream.readany():
            pass  # whatever comes after the form: the connection can be used again
        if form.num_bytes is None:
            raise InvalidRequestError(f"the form has no file; {_FORM}", param="file")
        _check(form)
        file = FileObject(
            id=file_id,
            bytes=form.num_bytes,
            created_at=int(owned.store.wall_clock_s()),
            filename=form.filename,
            purpose="batch",
        )
        with storage_errors(path):
            unfinished.rename(path)
        return await asyncio.to_thread(owned.add, file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        feeding.cancel()
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the file is larger than the {max_bytes:,} bytes that one may have; split it, and make a batch of "
        "each part"
    )


async def _read_form(reader: MultipartReader, form: _Form, path: Path, max_bytes: int) -> None:
    try:
        for _ in range(_MAX_FIELDS):
            part = await reader.next()
            if part is None:
                return
            if not isinstance(part, BodyPartReader):
                raise InvalidRequestError(f"the form has a form in it; {_FORM}", param="file")
            await _read_part(part, form, path, max_bytes)
    except _BAD_FORM as error:
        raise InvalidRequestError(f"the form cannot be read; {_FORM}", param="file") from error
    raise InvalidRequestError(f"the form has more than {_MAX_FIELDS} fields; {_FORM}", param="file")


async def _read_part(part: BodyPartReader, form: _Form, path: Path, max_bytes: int) -> None:
    name = part.name or ""
    if name == "file":
        if form.num_bytes is not None:
            raise InvalidRequestError("the form has two files; send one at a time", param="file")
        form.filename = _shown_name(part.filename)
        form.num_bytes = await _write(part, path, max_bytes)
        return
    value = bytearray()
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        value += chunk
        if len(value) > _MAX_FIELD_BYTES:
            raise InvalidRequestError("a field of the form is too long", param=name[:64])
    if name == "purpose":
        form.purpose = value.decode()
        _check(form)
    else:
        raise InvalidRequestError(
            f"the form's field {name[:64]!r} is not supported; send file and purpose", param=name[:64]
        )


async def _write(part: BodyPartReader, path: Path, max_bytes: int) -> int:
    num_bytes = 0
    with storage_errors(path), open(path, "xb", opener=_private) as file:
        while chunk := await part.read_chunk(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise too_large(max_bytes)
            await asyncio.to_thread(file.write, chunk)
        await asyncio.to_thread(_sync, file)
    return num_bytes


def _check(form: _Form) -> None:
    if form.purpose != "batch":
        said = "missing" if form.purpose is None else repr(form.purpose[:64])
        raise InvalidRequestError(
            f"the form's purpose is {said}; files are for batches here: send purpose=batch", param="purpose"
        )


def _shown_name(given: str | None) -> str:
    """Return a client's name of a file, which is only shown."""
    name = (given or "").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in name if char.isprintable())[:128] or _UNNAMED


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
