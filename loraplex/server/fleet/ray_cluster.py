"""The front's connection to Ray, through a process that talks to it (`ray_driver`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from loraplex.core.errors import UserError
from loraplex.server.fleet.ray_messages import (
    Connect,
    Connected,
    Ended,
    Order,
    Place,
    Placed,
    Refused,
    Release,
    Released,
    Resources,
    Run,
    Running,
    decode_report,
    line_of,
)
from loraplex.server.private_folder import PrivateFolder

logger = logging.getLogger(__name__)

_DRIVER_MODULE: Final = "loraplex.server.fleet.ray_driver"
_PROBE_S: Final = 5.0
_CONNECT_S: Final = 30.0
_START_S: Final = 120.0
"""Seconds that Ray may take to start; on an idle machine it takes a few."""
_AGAIN_S: Final = 2.0
_RELEASE_S: Final = 5.0
_CLOSE_S: Final = 12.0
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds without its head after which a part of Ray exits; the default is a minute. This applies to the
    # driver, and to a Ray that it starts; a cluster's nodes have their own setting.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "31536000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOCAL_ENVIRONMENT: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on loopback only, as it does on these systems
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_AUTH_MODE": "token",
}


@dataclass(frozen=True, kw_only=True)
class RayPlace:
    """The cluster that a fleet's replicas are placed on: HOST:PORT of its head, "auto" for one that runs on
    this machine, None to start one."""

    address: str | None = None


class Seat:
    """An engine process that Ray has placed or is asked to place. `ended` yields the reason of its end."""

    def __init__(self, cluster: RayCluster, engine_id: int, replica: int) -> None:
        loop = asyncio.get_running_loop()
        self._cluster = cluster
        self._id = engine_id
        self.replica = replica
        self.placed: asyncio.Future[Placed] = loop.create_future()
        self.pid: int | None = None
        self.ended: asyncio.Future[str] = loop.create_future()
        self.released = asyncio.Event()

    def run(self, launch: str) -> None:
        self._cluster.send(Run(id=self._id, replica=self.replica, launch=launch))

    def release(self) -> None:
        """Release the place."""
        self._cluster.send(Release(id=self._id, replica=self.replica))

    async def wait_released(self) -> None:
        """Wait until Ray has released it, but not long if Ray does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self.released.wait()

    def hear(self, report: Placed | Running | Ended | Released) -> None:
        match report:
            case Placed():
                self.placed.set_result(report)
            case Running(_, pid):
                self.pid = pid
            case Ended(_, reason):
                self.end(reason)
            case Released():
                self.end("its place was given up")
                self.released.set()

    def end(self, reason: str) -> None:
        """Report to waiters that there is no engine process, or no longer."""
        if not self.ended.done():
            self.ended.set_result(reason)


class RayCluster:
    """A Ray cluster, joined or started here. Created by `connect`."""

    def __init__(self, place: RayPlace) -> None:
        self._address = place.address
        self._ids = itertools.count()
        self._seats: dict[int, Seat] = {}
        self._folder: PrivateFolder | None = None
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._connected: asyncio.Future[Connected] | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def connect(cls, place: RayPlace) -> RayCluster:
        """Join the cluster, or start Ray. Raises UserError if it is not installed, or does not answer."""
        if find_spec("ray") is None:
            raise UserError("--ray needs Ray, which is not installed: pip install 'loraplex[ray]'")
        if place.address is not None:
            _check_address(place.address)
        cluster = cls(place)
        try:
            await cluster.about()
        except BaseException:
            await cluster.close()
            raise
        return cluster

    async def about(self, wait_s: float = 0.0) -> Connected:
        """Return what is known of the cluster. It is joined again if the driver has ended; `wait_s`: seconds
        for which that is tried."""
        deadline_s = asyncio.get_running_loop().time() + wait_s
        async with self._connecting:
            while self._connected is None:
                self._connected = asyncio.get_running_loop().create_future()
                try:
                    await self._start_driver(self._connected)
                except BaseException as error:
                    self._connected = None
                    is_late = asyncio.get_running_loop().time() + _AGAIN_S > deadline_s
                    if is_late or not isinstance(error, UserError):
                        raise
                    logger.warning("%s", error)
                    await asyncio.sleep(_AGAIN_S)
            return self._connected.result()

    async def place(self, replica: int, resources: Resources, wait_s: float) -> Seat:
        """Have Ray place an engine process of this replica. Raises UserError if there is no Ray."""
        await self.about(wait_s)
        # Earlier seats of this replica that ended by themselves were not released: this one replaces them.
        for engine_id, each in list(self._seats.items()):
            if each.replica == replica and each.ended.done():
                del self._seats[engine_id]
        engine_id = next(self._ids)
        seat = self._seats[engine_id] = Seat(self, engine_id, replica)
        self.send(Place(id=engine_id, replica=replica, resources=resources, wait_s=wait_s))
        return seat

    def send(self, order: Order) -> None:
        """Send an order. It is lost if the driver has ended, which ends all seats."""
        stdin = None if self._process is None else self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(line_of(order))

    async def close(self) -> None:
        """Leave the cluster, which ends this front's actors; stop Ray if it was started here."""
        self._is_closed = True
        await self._end_driver()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    async def _start_driver(self, connected: asyncio.Future[Connected]) -> None:
        is_local = self._address is None
        if self._is_closed:
            raise UserError("the server is shutting down")
        await self._end_driver()
        if is_local and self._folder is None:
            # Always in /tmp: the names of its sockets are near the length limit.
            self._folder = PrivateFolder("/tmp", "ray")
        logger.info("%s", "starting Ray on this machine" if is_local else f"joining Ray at {self._address}")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(() if "" in sys.path or os.getcwd() in sys.path else ("-P",)),
            "-m",
            _DRIVER_MODULE,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **_ENVIRONMENT, **(_local_environment() if is_local else {})},
            start_new_session=True,  # Ctrl-C is for the front, which ends the rest in order
        )
        self._tasks = [
            asyncio.create_task(self._read_reports(self._process, connected)),
            asyncio.create_task(_log_lines(self._process)),
        ]
        folder = "" if self._folder is None else self._folder.name
        self.send(Connect(address=self._address, folder=folder, wait_s=_PROBE_S))
        wait_s = _START_S if is_local else _CONNECT_S
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(connected)
        except TimeoutError:
            await self._end_driver(wait_s=0.0)
            raise UserError(self._unreachable(f"nothing for {wait_s:g} s")) from None

    async def _read_reports(self, process: Process, connected: asyncio.Future[Connected]) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                match decode_report(line):
                    case Connected() as about:
                        connected.set_result(about)
                    case Refused(message):
                        connected.set_exception(UserError(self._unreachable(message)))
                    case Placed() | Running() | Ended() | Released() as report:
                        if (seat := self._seats.get(report.id)) is not None:
                            seat.hear(report)
                        if isinstance(report, Released):
                            self._seats.pop(report.id, None)
        finally:
            if self._connected is connected:  # else another driver was started since
                self._connected = None
            if not connected.done():
                connected.set_exception(UserError(self._unreachable("the process that spoke to it ended")))
                connected.exception()
            for seat in self._seats.values():
                seat.end("the process that spoke to Ray ended, and its actors with it")
                seat.released.set()
            self._seats.clear()

    async def _end_driver(self, wait_s: float = _CLOSE_S) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(wait_s):
                await process.wait()
        except TimeoutError:
            process.kill()  # everything it started on this machine ends with it
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _unreachable(self, reason: str) -> str:
        if self._address is None:
            return f"Ray could not be started on this machine: {reason}"
        return (
            f"no Ray answers at {self._address} ({reason}); give the address of its head as HOST:PORT, run "
            "this on a machine of the cluster with the same versions of Python and Ray, or leave the "
            "address out to start Ray on this machine"
        )


def _check_address(address: str) -> None:
    """Raise UserError for an address that is invalid, or of a kind that cannot be used."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            f"--ray {address}: give the head's HOST:PORT (6379 unless it was started with another), or auto "
            "for a Ray that runs on this machine"
        )


def _local_environment() -> dict[str, str]:
    """Return the settings of a Ray that is started here for this front alone."""
    return {**_LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}


async def _log_lines(process: Process) -> None:
    """Log what the driver writes to stderr: Ray's own messages, of which there are many."""
    assert process.stderr is not None
    with contextlib.suppress(ValueError):  # a line beyond the length limit
        while line := await process.stderr.readline():
            logger.debug("%s", line.decode(errors="replace").rstrip())
