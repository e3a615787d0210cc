"""The process that renders chat templates of requests: it may be killed, whatever a template does.

Messages on stdin and stdout are JSON with their length before them. transformers renders in a sandbox.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from loraplex.server.child_python import ignore_interrupts

HEAD: Final = struct.Struct(">I")
_MAX_SECONDS: Final = 10
"""The child ends itself after this, should its parent be gone."""
_MEMORY_BYTES: Final = 512 << 20
"""Memory for a template, beyond what the process has when it starts."""


def _main() -> None:
    ignore_interrupts()
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    cast(dict[str, object], sys.modules).setdefault("torch", None)  # not needed, and slow to import
    from transformers.utils.chat_template_utils import render_jinja_template

    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    size_bytes = num_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + _MEMORY_BYTES,) * 2)
    _send(answers, {})
    while head := given.read(HEAD.size):
        request = json.loads(given.read(HEAD.unpack(head)[0]))
        signal.alarm(_MAX_SECONDS)
        _send(answers, _rendered(render_jinja_template, request))
        signal.alarm(0)


def _rendered(render: Any, request: dict[str, Any]) -> dict[str, str]:
    try:
        (text,), _ = render(
            conversations=[request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            **request["variables"],
        )
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    if len(text) > request["max_chars"]:
        return {"error": f"it makes a prompt of {len(text):,} characters, more than {request['max_chars']:,}"}
    return {"text": text}


def _send(answers: BinaryIO, message: dict[str, str]) -> None:
    body = json.dumps(message).encode()
    answers.write(HEAD.pack(len(body)) + body)
    answers.flush()


if __name__ == "__main__":
    _main()
