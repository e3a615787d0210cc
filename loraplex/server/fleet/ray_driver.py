"""The process that talks to Ray for the front: `python -m loraplex.server.fleet.ray_driver`.

It is a separate process because Ray ends its drivers when the cluster's head is gone for too long, and
because Ray's calls block: the front keeps serving in either case. It follows the protocol in `ray_messages`,
with one thread for each engine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import loraplex
from loraplex.engine.machine import max_threads
from loraplex.server.fleet.ray_actor import EngineActor
from loraplex.server.fleet.ray_messages import (
    Connect,
    Connected,
    Ended,
    Node,
    Place,
    Placed,
    Refused,
    Release,
    Released,
    Report,
    Resources,
    Run,
    Running,
    decode_order,
    line_of,
)

_OBJECT_STORE_BYTES: Final = 80 * 2**20
"""Bytes of Ray's object store, about its minimum: nothing large goes through it."""
_ACTOR_S: Final = 60.0
"""Seconds that a node may take to start the actor's process, and to import loraplex there."""
_PROBE_S: Final = 2.0
_RETRY_S: Final = 1.0
_LEAVE_S: Final = 10.0
"""Seconds that an orderly shutdown may take; without Ray's head it would never end."""
_MAX_REASON_CHARS: Final = 300
EXIT_OTHER_CLUSTER: Final = 4
_OTHER_CLUSTER: Final = "WrongClusterID"
"""Text in Ray's errors when its head was restarted and has lost its state."""
_NO_TOKEN: Final = "InvalidAuthToken"
_OUT_OF_MEMORY: Final = "running low on memory"


class PlacingError(Exception):
    """A replica cannot be placed; the message is meant for users."""


class Seat:
    """The place of a replica: a placement group and the actor in it. Used by several threads; only one at a
    time creates it."""

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._is_released = False
        self._about: tuple[str, str, str] | None = None

    def take(self, resources: Resources, wait_s: float) -> Placed:
        """Create the actor, unless it exists. Raises PlacingError, and RayError of all kinds."""
        deadline_s = time.monotonic() + wait_s
        if self._about is None:
            _wait_for_head(deadline_s)
            self._make(resources, deadline_s)
            self._about = ray.get(self._actor.about.remote(), timeout=_ACTOR_S)
        host, version, public_key = self._about
        if version != loraplex.__version__:
            raise PlacingError(
                f"node {host} has loraplex {version}, this is {loraplex.__version__}; install the same there"
            )
        return Placed(id=0, host=host, public_key=public_key)

    def _make(self, resources: Resources, deadline_s: float) -> None:
        self._group = placement_group([resources])
        self._drop_if_released()
        if not self._group.wait(max(deadline_s - time.monotonic(), 1.0)):
            raise PlacingError(
                f"Ray has no node with {_words(resources)} free; other replicas or programs hold them"
            )
        self._actor = (
            ray.remote(EngineActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote()
        )
        self._drop_if_released()

    def run(self, launch: str) -> int:
        return int(ray.get(self._actor.run.remote(launch), timeout=_ACTOR_S))

    def wait(self) -> str:
        return str(ray.get(self._actor.wait.remote()))

    def release(self) -> None:
        """End the actor, and with it the engine process. Waiters get a RayActorError."""
        self._is_released = True
        if self._actor is not None:
            ray.kill(self._actor)
        if self._group is not None and _head_answers():
            remove_placement_group(self._group)

    def _drop_if_released(self) -> None:
        """If the seat was released by another thread, release what was created since, and raise
        PlacingError."""
        if self._is_released:
            self.release()
            raise PlacingError("the replica was closed")


class Driver:
    """Carries out the front's orders. `send` may be called by any thread."""

    def __init__(self, send: Callable[[Report], None]) -> None:
        self._send = send
        self._seats: dict[int, Seat] = {}  # by replica
        self._releases: list[threading.Thread] = []

    def connect(self, order: Connect) -> None:
        """Connect to the cluster or start one. Raises ConnectionError, OSError, ValueError or RuntimeError if
        that fails."""
        if order.address is None:
            where: dict[str, Any] = {
                "address": "local",
                "num_cpus": max_threads(),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": order.folder,
            }
        else:
            if order.address != "auto":
                _probe(order.address, order.wait_s)
            where = {"address": order.address}
        ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=True, **where)
        nodes = [
            _node(each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"]
        ]
        free = _node("", ray.available_resources())
        self._send(Connected(host=str(ray.util.get_node_ip_address()), nodes=nodes, free=free))

    def place(self, order: Place) -> None:
        seat = self._seats.setdefault(order.replica, Seat())
        self._begin(lambda: self._place(seat, order), order.id, order.replica, seat)

    def _place(self, seat: Seat, order: Place) -> None:
        placed = seat.take(order.resources, order.wait_s)
        self._send(Placed(id=order.id, host=placed.host, public_key=placed.public_key))

    def run(self, order: Run) -> None:
        seat = self._seats.get(order.replica)
        if seat is None:
            self._send(Ended(id=order.id, reason="its place was given up"))
            return
        self._begin(lambda: self._run(seat, order), order.id, order.replica, seat)

    def _run(self, seat: Seat, order: Run) -> None:
        self._send(Running(id=order.id, pid=seat.run(order.launch)))
        self._send(Ended(id=order.id, reason=seat.wait()))

    def _begin(self, work: Callable[[], None], engine_id: int, replica: int, seat: Seat) -> None:
        """Run work in a thread; if it fails, release the seat, and report the reason to the front."""

        def do() -> None:
            try:
                work()
            except Exception as error:  # Ray raises most kinds
                if _OTHER_CLUSTER in str(error):
                    os._exit(EXIT_OTHER_CLUSTER)  # the front restarts this process, which rejoins
                self._give_up(replica, seat)
                self._send(Ended(id=engine_id, reason=_reason(error)))

        threading.Thread(target=do, name=f"replica-{replica}", daemon=True).start()

    def release(self, order: Release) -> None:
        seat = self._seats.pop(order.replica, None)

        def do() -> None:
            if seat is not None:
                _release(seat)
            self._send(Released(id=order.id))

        self._releases = [each for each in self._releases if each.is_alive()]
        self._releases.append(threading.Thread(target=do, daemon=True))
        self._releases[-1].start()

    def _give_up(self, replica: int, seat: Seat) -> None:
        if self._seats.get(replica) is seat:
            del self._seats[replica]
        _release(seat)

    def close(self) -> None:
        for each in self._releases:
            each.join(_LEAVE_S / 2)
        if _head_answers():
            ray.shutdown()
        _sweep()


def _release(seat: Seat) -> None:
    with contextlib.suppress(RayError, ValueError, RuntimeError):  # it is gone already
        seat.release()


def _probe(address: str, wait_s: float) -> None:
    """Raise OSError or ValueError unless something listens there: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=wait_s).close()


def _head_answers() -> bool:
    """Return whether Ray's head answers: calls that need it would block while it does not."""
    try:
        _probe(str(ray.get_runtime_context().gcs_address), _PROBE_S)
    except OSError:
        return False
    return True


def _wait_for_head(deadline_s: float) -> None:
    while not _head_answers():
        if time.monotonic() + _RETRY_S > deadline_s:
            address = ray.get_runtime_context().gcs_address
            raise PlacingError(
                f"Ray's head at {address} does not answer; replicas that run serve on, new ones need it"
            )
        time.sleep(_RETRY_S)


def _node(host: str, resources: Resources) -> Node:
    return Node(host=host, cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0))


def _words(resources: Resources) -> str:
    return " and ".join(f"{number:g} {kind}" for kind, number in resources.items())


def _reason(error: Exception) -> str:
    """Return an error in words."""
    if isinstance(error, PlacingError):
        return str(error)
    if isinstance(error, GetTimeoutError):
        return f"the node did not start the replica's actor within {_ACTOR_S:g} s; see Ray's logs there"
    text = str(error)
    if "No module named" in text:
        return (
            "the node cannot import loraplex; install the same version of it there, in the Python that runs "
            "Ray (pip install 'loraplex[ray]')"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, RayActorError):
        if _OUT_OF_MEMORY in text:
            return (
                "its node ran out of memory, and Ray ended its actor; give it fewer replicas, or more memory"
            )
        # Ray's lines are: which actor it was, why it died, possible causes.
        return f"its actor died: {lines[-1].split('. ')[0]}"[:_MAX_REASON_CHARS]
    return f"{type(error).__name__}: {lines[0]}"[:_MAX_REASON_CHARS]


def _refusal(error: Exception) -> str:
    """Return in words why there is no connection."""
    if any(_NO_TOKEN in str(each) for each in (error, error.__cause__)):
        return "it wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:_MAX_REASON_CHARS]


def main() -> NoReturn:
    # The front ends this process by closing its stdin, after it has handled its replicas.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of libraries is not a report
    sending = threading.Lock()

    def send(report: Report) -> None:
        with sending, contextlib.suppress(BrokenPipeError):
            reports.write(line_of(report))

    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    connected = threading.Event()
    threading.Thread(target=_read, args=(orders, connected), daemon=True).start()
    driver = Driver(send)
    connect = decode_order(orders.get())
    assert isinstance(connect, Connect)
    try:
        # In the main thread: what Ray starts here ends with the thread that starts it.
        driver.connect(connect)
    except Exception as error:  # Ray raises most kinds
        send(Refused(message=_refusal(error)))
        os._exit(1)
    connected.set()
    while line := orders.get():
        match decode_order(line):
            case Place() as place:
                driver.place(place)
            case Run() as run:
                driver.run(run)
            case Release() as release:
                driver.release(release)
    driver.close()
    os._exit(0)  # without Ray's own shutdown, which needs its head


def _read(orders: queue.SimpleQueue[bytes], connected: threading.Event) -> None:
    """Pass the front's lines on, and its end as an empty one. Then exit by force if the shutdown takes too
    long, or at once if there is no connection to close."""
    while line := sys.stdin.buffer.readline():
        orders.put(line)
    orders.put(b"")
    if connected.is_set():
        time.sleep(_LEAVE_S)
    _sweep()
    os._exit(1)


def _sweep() -> None:
    """Kill what is left of a Ray that was started here, which is all in this process's session: without its
    head some of it does not end by itself."""
    own = os.getpid()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            if (pid := int(name)) != own and os.getsid(pid) == own:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
