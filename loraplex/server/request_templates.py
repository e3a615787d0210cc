"""Chat templates that requests bring, rendered in a process of their own.

A template is a program of the client's: one that does not end, or takes all memory, must not stop the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from loraplex.core.errors import InvalidRequestError, LoraplexError
from loraplex.engine.prompt_encoder import MAX_TEXT_CHARS
from loraplex.engine.tool_traits import PROBES, ToolTraits, traits_of
from loraplex.server.child_python import interrupts_blocked, same_python
from loraplex.server.errors import BusyError
from loraplex.server.template_child import HEAD

_START_S: Final = 60.0
_TIMEOUT_S: Final = 2.0
"""Seconds that one conversation may take."""
_MAX_WAITING: Final = 4
MAX_TRAITS: Final = 64
"""Templates whose traits with tools are remembered."""
_PARAM: Final = "chat_template"


class RequestTemplates:
    """Renders one template after the other. The process starts with the first, and again after one that had
    to be stopped."""

    def __init__(self, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._process: Process | None = None
        self._traits: dict[bytes, ToolTraits] = {}

    async def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt. Raises InvalidRequestError if the template fails, or takes too much time or
        memory, and BusyError if too many wait."""
        variables = {**variables, "add_generation_prompt": add_generation_prompt}
        with self._waiting():
            answer = await self._rendered(template, messages, tools, variables)
        if "error" in answer:
            raise _refused(answer["error"])
        return answer["text"]

    async def tool_traits(self, template: str, variables: Mapping[str, Any]) -> ToolTraits:
        """Return how the template renders tools, which is remembered for the last templates. Raises as
        `render` does, but not if the template fails."""
        key = hashlib.sha256(json.dumps([template, variables]).encode()).digest()
        traits = self._traits.pop(key, None)
        if traits is None:
            with self._waiting():
                answers = [
                    await self._rendered(template, probe.messages, probe.tools, variables) for probe in PROBES
                ]
            traits = traits_of([answer.get("text") for answer in answers])
        self._traits[key] = traits  # the last one in the order of use
        if len(self._traits) > MAX_TRAITS:
            del self._traits[next(iter(self._traits))]
        return traits

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._num_waiting >= _MAX_WAITING:
            raise BusyError("too many chat templates of requests wait to be rendered; send it again later")
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def _rendered(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> dict[str, str]:
        """Return the conversation's text, or an error."""
        request = {
            "template": template,
            "messages": messages,
            "tools": tools or None,
            "variables": variables,
            "max_chars": MAX_TEXT_CHARS,
        }
        message = json.dumps(request).encode()
        async with self._turn:
            try:
                return await self._ask(await self._started(), message)
            except TimeoutError:
                await self.close()
                raise _refused(f"it takes longer than {self._timeout_s:g} seconds") from None
            except (OSError, asyncio.IncompleteReadError):
                await self.close()
                raise _refused("it ended the process that renders it") from None
            except BaseException:
                await self.close()  # its answer would be taken for the next one's
                raise

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()  # closes the pipes

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            command = [*same_python(), "-m", "loraplex.server.template_child"]
            with interrupts_blocked():
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
                )
            try:
                async with asyncio.timeout(_START_S):
                    await _read(self._process)
            except (TimeoutError, asyncio.IncompleteReadError):
                await self.close()
                raise LoraplexError("the process that renders chat templates does not start") from None
        return self._process

    async def _ask(self, process: Process, request: bytes) -> dict[str, str]:
        assert process.stdin is not None
        async with asyncio.timeout(self._timeout_s):
            process.stdin.write(HEAD.pack(len(request)) + request)
            await process.stdin.drain()
            return await _read(process)


async def _read(process: Process) -> dict[str, str]:
    assert process.stdout is not None
    (num_bytes,) = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
    answer: dict[str, str] = json.loads(await process.stdout.readexactly(num_bytes))
    return answer


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the request's chat template failed: {reason}; correct it", param=_PARAM)
