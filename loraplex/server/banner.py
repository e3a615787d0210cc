"""Messages of `serve` to the person at the terminal."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from loraplex.core.progress import shown_progress
from loraplex.core.words import plural

if TYPE_CHECKING:
    from rich.console import Console

    from loraplex.server.protocol_ipc import StartProgress

_SHOWN_SHARE: Final = 0.05
"""Share of the start's time above which a phase is named."""
_MAX_NAMES_SHOWN: Final = 8
_EXAMPLE_MAX_TOKENS: Final = 128


class PhaseTimes:
    """The time that each phase of a start took."""

    def __init__(self, phase: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = now_s()
        self._phase = phase
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the current phase, and begin or resume this one."""
        now_s = self._now_s()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._begun_s
        self._phase, self._begun_s = phase, now_s

    def summary(self) -> str:
        """Return the total time so far, and the phases that took a noticeable share of it."""
        self.begin(self._phase)
        whole_s = sum(self._seconds.values())
        long = [f"{phase} {s:.1f} s" for phase, s in self._seconds.items() if s >= _SHOWN_SHARE * whole_s]
        return f"{whole_s:.1f} s: {', '.join(long)}"


class Announcer:
    """Prints progress while loading, the banner, and the shutdown. `prompts`: examples by model name, best
    first."""

    def __init__(self, prompts: dict[str, str] | None = None, console: Console | None = None) -> None:
        from rich.console import Console as RichConsole

        self._console = console or RichConsole(highlight=False, soft_wrap=True)
        self._prompts = prompts or {}
        self.is_ready = False

    @contextmanager
    def loading(self, model: str) -> Iterator[Callable[[StartProgress], None]]:
        """Show the progress of the start, with the last part of the model's name, as lines are short; and at
        the end the time of its phases. Yields the function to call with the engine's progress."""
        times = PhaseTimes("starting the engine process")
        with shown_progress(f"loading {PurePath(model).name}", self._console, left=None) as report:

            def show(progress: StartProgress) -> None:
                times.begin(progress.phase)
                report(progress.phase, progress.fraction)

            yield show
        self._console.print(f"loaded {model} in {times.summary()}", style="dim", markup=False)

    def registered(self, num_adapters: int) -> None:
        self._console.print(f"registered {num_adapters:,} {plural('adapter', num_adapters)}", style="dim")

    def ready(
        self,
        *,
        host: str,
        port: int,
        base_model: str,
        adapters: Sequence[str],
        num_skipped: int,
        needs_key: bool,
        has_chat: bool,
        replicas: str | None = None,
        batching: str | None = None,
    ) -> None:
        """Print the banner: address, models, and commands to paste.

        `num_skipped`: adapters that were left out; the log has the details. `has_chat`: the base model has a
        chat template. `replicas`: a fleet's replicas and policy in words. `batching`: the batching policy, if
        it is not the default.
        """
        self.is_ready = True
        show = self._console.print
        url = f"http://{_reachable(host)}:{port}"
        show(f"\nloraplex is ready at {url}/v1", style="bold green")
        show(f"  page        {url}/", markup=False)
        show(f"  base model  {base_model}", markup=False)
        show(f"  adapters    {_summary(adapters)}", markup=False)
        if replicas is not None:
            show(f"  replicas    {replicas}", markup=False)
        if batching is not None:
            show(f"  batching    {batching}", markup=False)
        if num_skipped:
            show(
                f"  left out    {num_skipped:,} {plural('adapter', num_skipped)}; the log says why",
                style="yellow",
            )
        show("\nTry it:", style="bold")
        for model in self._examples(base_model, adapters):
            show(self._curl(url, model, needs_key=needs_key, has_chat=has_chat), markup=False)
        show()

    def stopping(self, *, num_in_flight: int, grace_s: float) -> None:
        """Report that a shutdown signal arrived and which requests it waits for, so that nobody sends a
        second one."""
        waiting = ""
        if num_in_flight:
            requests = plural("request", num_in_flight)
            waiting = f": waiting up to {grace_s:g} s for {num_in_flight} {requests} in flight"
        self._console.print(f"shutting down{waiting}", style="yellow")

    def stopped(self) -> None:
        self._console.print("shut down", style="yellow")

    def _curl(self, url: str, model: str, *, needs_key: bool, has_chat: bool) -> str:
        """Return a command line that sends a request to one model."""
        # Small models rarely stop early, and a first try should not take a minute. They make most sense when
        # decoding greedily.
        body: dict[str, object] = {"model": model, "max_tokens": _EXAMPLE_MAX_TOKENS, "temperature": 0}
        if has_chat:
            content = self._prompts.get(model, "Tell me about yourself.")
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = self._prompts.get(model, "Once upon a time")
        path = "/v1/chat/completions" if has_chat else "/v1/completions"
        key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
        return f"  curl {url}{path}{key} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"

    def _examples(self, base_model: str, adapters: Sequence[str]) -> list[str]:
        preferred = [name for name in self._prompts if name in adapters] or list(adapters)
        return [base_model, *preferred[:2]]


def _summary(names: Sequence[str]) -> str:
    if not names:
        return "none yet; POST /v1/load_lora_adapter, or start with --adapters FOLDER"
    more = "" if len(names) <= _MAX_NAMES_SHOWN else f", ... ({len(names)} in all)"
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more


def _reachable(host: str) -> str:
    """Return the address that a client on this machine can use."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
