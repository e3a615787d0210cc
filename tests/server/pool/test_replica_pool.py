"""Slabs that are copied between replicas, and holders that die, stall or lie."""

from __future__ import annotations

import collections
import hashlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from pools import KEY, LOOPBACK, NUM_BYTES, SlabBytes, fetch, joined, slab

from loraplex.engine.peers import ComesLaterError, SlabKey
from loraplex.server.engine_sockets import KEY_ENCODING, CurveKeys, bind_any_port
from loraplex.server.pool import replica_pool, slab_client
from loraplex.server.pool.messages import (
    PIECE_BYTES,
    Answer,
    Ask,
    Holder,
    SlabState,
    decode_answer,
    decode_ask,
    encode,
)
from loraplex.server.pool.slab_client import CopyError, Link, NoAnswerError, SlabCopy


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pool, "_WAIT_S", {SlabState.COMES: 30.0, SlabState.ABSENT: 0.05})


def test_a_slab_is_copied_byte_for_byte() -> None:
    with joined(3) as ((first, address), (second, other_address), (third, _)):
        source = slab()
        first.offer(KEY, source, None)
        found = fetch(second, address)
        assert found is not None
        assert np.array_equal(found, source)
        # It can be copied on, with the hash that it was verified with.
        second.offer(KEY, found, hashlib.sha256(source.data).digest())
        again = fetch(third, other_address)
        assert again is not None
        assert np.array_equal(again, source)
        assert [pool.num_failures for pool in (first, second, third)] == [0, 0, 0]


def test_a_replica_that_does_not_have_it_is_left_for_the_next() -> None:
    with joined(3) as ((_, empty), (second, address), (third, _)):
        second.offer(KEY, slab(), None)
        assert fetch(third, empty, address) is not None
        assert fetch(third, empty) is None
        assert fetch(third, address, key=SlabKey("v1", "another layout")) is None
        assert third.num_failures == 0


def test_a_slab_that_is_being_read_is_waited_for() -> None:
    with joined(2) as ((first, address), (second, _)):
        first.reading(KEY)
        found: list[SlabBytes | None] = []
        waiting = threading.Thread(target=lambda: found.append(fetch(second, address)))
        waiting.start()
        source = slab()
        first.offer(KEY, source, None)
        first.settle(KEY)
        waiting.join()
        assert np.array_equal(found[0], source)  # type: ignore[arg-type]


def test_a_search_that_nobody_goes_on_with_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(2) as ((first, address), (second, _)):
        for version in ("v1", "v2", "v3"):
            key = SlabKey(version, "float32")
            first.reading(key)
            second.locate(version, [Holder(address)])
            with pytest.raises(ComesLaterError):
                second.fetch(key, slab())
            if version == "v2":
                assert len(second._searches) == 2
                monkeypatch.setattr(replica_pool, "_ABANDONED_S", 0.0)
        assert [key.version for key in second._searches] == ["v3"]


def test_a_replica_that_does_not_begin_to_read_is_not_waited_for_for_ever() -> None:
    with joined(2) as ((_, address), (second, _)):
        assert fetch(second, address, awaited=True) is None


def test_memory_that_is_filled_again_is_offered_no_more() -> None:
    with joined(2) as ((first, address), (second, _)):
        memory = slab(num_bytes=4 * PIECE_BYTES)
        first.offer(KEY, memory[:PIECE_BYTES], None)
        first.offer(SlabKey("v2", "float32"), memory[PIECE_BYTES:], None)
        first.withdraw(memory[PIECE_BYTES // 2 : PIECE_BYTES])
        assert fetch(second, address, num_bytes=PIECE_BYTES) is None
        beside = fetch(second, address, key=SlabKey("v2", "float32"), num_bytes=3 * PIECE_BYTES)
        assert np.array_equal(beside, memory[PIECE_BYTES:])  # type: ignore[arg-type]
        first.forget("v2")
        assert fetch(second, address, key=SlabKey("v2", "float32"), num_bytes=3 * PIECE_BYTES) is None


def test_a_slab_that_is_withdrawn_in_the_middle_is_copied_from_elsewhere() -> None:
    keys = CurveKeys.make()
    source = slab()

    def let_go(ask: Ask, answer: Answer, piece: bytes) -> tuple[Answer, bytes]:
        return (answer, piece) if ask.begin < 2 * PIECE_BYTES else (Answer(SlabState.ABSENT), b"")

    with joined(2, keys) as ((first, address), (second, _)), holder(keys, source, let_go) as broken:
        first.offer(KEY, source, None)
        assert np.array_equal(fetch(second, broken.address, address), source)  # type: ignore[arg-type]
        assert second.num_failures == 1


class Fake:
    """A holder that follows the protocol except for what a test changes. `begins`: the offsets it was asked
    for."""

    def __init__(self, keys: CurveKeys, source: SlabBytes, change) -> None:
        self._source, self._change = source, change
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.curve_server = True
        self._router.curve_publickey = keys.public.encode(KEY_ENCODING)
        self._router.curve_secretkey = keys.secret.encode(KEY_ENCODING)
        self.address = bind_any_port(self._router, LOOPBACK)
        self.begins: list[int] = []
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._is_stopped.set()
        self._thread.join()
        self._context.destroy()

    def _serve(self) -> None:
        digest = hashlib.sha256(self._source.data).digest()
        while not self._is_stopped.is_set():
            if not self._router.poll(10):
                continue
            reader, body = self._router.recv_multipart()
            ask = decode_ask(body)
            self.begins.append(ask.begin)
            piece = self._source[ask.begin : ask.end].tobytes()
            changed = self._change(ask, Answer(SlabState.HELD, self._source.nbytes, digest), piece)
            if changed is not None:
                self._router.send_multipart([reader, encode(changed[0]), changed[1]])


@contextmanager
def holder(keys: CurveKeys, source: SlabBytes, change) -> Iterator[Fake]:
    fake = Fake(keys, source, change)
    try:
        yield fake
    finally:
        fake.close()


def with_a_byte_changed(ask: Ask, answer: Answer, piece: bytes) -> tuple[Answer, bytes]:
    return answer, (bytes([piece[0] ^ 1]) + piece[1:] if ask.begin == PIECE_BYTES else piece)


LIES = {
    "wrong bytes": with_a_byte_changed,
    "a wrong hash": lambda ask, answer, piece: (Answer(answer.state, answer.num_bytes, b"0" * 32), piece),
    "a short body": lambda ask, answer, piece: (answer, piece[:-1]),
    "a long body": lambda ask, answer, piece: (answer, piece + b"0"),
    "another size": lambda ask, answer, piece: (Answer(answer.state, 5, answer.digest), piece),
    "no hash, ever": lambda ask, answer, piece: None if not piece else (Answer("held", NUM_BYTES), piece),
    "silence": lambda ask, answer, piece: None,
    "silence in the middle": lambda ask, answer, piece: None if ask.begin else (answer, piece),
    "out of range": lambda ask, answer, piece: (Answer(SlabState.OUT_OF_RANGE), b""),
}


SILENT = {"no hash, ever", "silence", "silence in the middle"}


@pytest.mark.parametrize("lie", LIES)
def test_a_holder_that_stalls_or_lies_costs_a_wait_and_never_wrong_bytes(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lie not in SILENT:
        # The threads of both holders may wait for a core.
        monkeypatch.setattr(slab_client.Link.__init__, "__defaults__", (20.0,))
    keys, source = CurveKeys.make(), slab()
    with joined(2, keys) as ((first, address), (second, _)), holder(keys, source, LIES[lie]) as liar:
        first.offer(KEY, source, None)
        assert fetch(second, liar.address) is None
        assert second.num_failures >= 1
        assert np.array_equal(fetch(second, liar.address, address), source)  # type: ignore[arg-type]


def test_a_broken_copy_goes_on_where_it_broke() -> None:
    keys, source = CurveKeys.make(), slab()
    swallowed: list[int] = []

    def swallow_once(ask: Ask, answer: Answer, piece: bytes) -> tuple[Answer, bytes] | None:
        if ask.begin >= PIECE_BYTES and len(swallowed) < 3:
            swallowed.append(ask.begin)
            return None
        return answer, piece

    with joined(1, keys) as ((second, _),), holder(keys, source, swallow_once) as flaky:
        assert np.array_equal(fetch(second, flaky.address), source)  # type: ignore[arg-type]
        assert flaky.begins.count(0) == 1
        assert flaky.begins.count(PIECE_BYTES) == 2


def test_a_holder_that_sends_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_client, "_LEAST_S", 0.1)
    monkeypatch.setattr(slab_client, "_LEAST_BYTES_PER_S", 1e12)
    keys, source, is_late = CurveKeys.make(), slab(), threading.Event()

    def trickle(ask: Ask, answer: Answer, piece: bytes) -> tuple[Answer, bytes]:
        is_late.wait(0.06)  # never set: each piece takes this long
        return answer, piece

    with joined(1, keys) as ((second, _),), holder(keys, source, trickle) as slow:
        assert fetch(second, slow.address, slow.address) is None
        assert len(slow.begins) < 5, "it was asked again"


def test_a_holder_that_does_not_answer_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, source = CurveKeys.make(), slab()
    other = KEY._replace(version="another")
    with zmq.Context() as context, joined(2, keys) as ((first, address), (second, _)):
        silent = context.socket(zmq.ROUTER)  # accepts everything, and answers nothing
        silent.linger = 0
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        for key in (KEY, other):
            first.offer(key, source, None)
            second.locate(key.version, [Holder(f"tcp://127.0.0.1:{port}", number=7), Holder(address)])
        found = [np.zeros(NUM_BYTES, dtype=np.uint8) for _ in range(3)]
        second.fetch(KEY, found[0])
        assert second.num_failures == 1
        assert f"not copied from replica 7 at tcp://127.0.0.1:{port}: it did not answer" in caplog.text
        second.fetch(other, found[1])
        assert second.num_failures == 1, "it was not asked again"
        monkeypatch.setattr(replica_pool, "_SILENT_S", 0.0)
        second.fetch(KEY, found[2])
        assert second.num_failures == 2
        assert all(np.array_equal(each, source) for each in found)
        silent.close()


@pytest.mark.timeout(30)
def test_nobody_waits_to_ask_where_nobody_takes_questions() -> None:
    with zmq.Context() as context:
        silent = context.socket(zmq.ROUTER)
        silent.linger = 0
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        link = Link(context, f"tcp://127.0.0.1:{port}", CurveKeys.make(), stall_s=0.01)
        with pytest.raises(NoAnswerError, match="did not answer"):
            collections.deque((link.ask(KEY, 0, 1) for _ in range(10_000)), maxlen=0)
        link.close()
        silent.close()


def test_who_has_another_key_gets_nothing() -> None:
    with joined(1) as ((first, address),), joined(1) as ((stranger, _),):
        first.offer(KEY, slab(), None)
        assert fetch(stranger, address) is None
        assert stranger.num_failures == 1


@pytest.mark.parametrize("knows_public_key", [True, False])
def test_who_has_no_secret_of_the_fleet_gets_nothing(knows_public_key: bool) -> None:
    keys, own = CurveKeys.make(), CurveKeys.make()
    with joined(1, keys) as ((first, address),):
        first.offer(KEY, slab(), None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        asking = context.socket(zmq.DEALER)
        if knows_public_key:
            asking.curve_serverkey = keys.public.encode(KEY_ENCODING)
            asking.curve_publickey = own.public.encode(KEY_ENCODING)
            asking.curve_secretkey = own.secret.encode(KEY_ENCODING)
        asking.connect(address)
        asking.send(encode(Ask(*KEY, 0, 1)))
        assert not asking.poll(300)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, PIECE_BYTES + 1), (NUM_BYTES, NUM_BYTES + 1), (5, 4), (-1, 5), (1 << 70, 1 << 70)],
)
def test_a_range_that_is_not_there_is_refused_and_others_are_served(begin: int, end: int) -> None:
    keys = CurveKeys.make()
    with joined(1, keys) as ((first, address),):
        first.offer(KEY, slab(), None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = Link(context, address, keys)
        if end < 1 << 64:
            link.ask(KEY, begin, end)
            answer, piece = link.answer()
            assert (answer.state, answer.num_bytes, len(piece)) == (SlabState.OUT_OF_RANGE, NUM_BYTES, 0)
        else:
            link._socket.send(b"\xff" * 20)
            with pytest.raises(CopyError, match="did not answer"):
                link.answer()
        copy = SlabCopy(KEY, np.zeros(NUM_BYTES, dtype=np.uint8), on_first=lambda: None)
        assert copy.go_on(link) is SlabState.HELD
        link.close()
        context.destroy()


HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from pools import KEY, LOOPBACK, NUM_BYTES, slab
from loraplex.server.engine_sockets import CurveKeys
from loraplex.server.pool import slab_server
from loraplex.server.pool.replica_pool import ReplicaPool
pool = ReplicaPool()
address = pool.join(CurveKeys(public=sys.argv[2], secret=sys.argv[3]), LOOPBACK)
pool.offer(KEY, slab(), None)
answer = slab_server.SlabServer._answer
def slow(self, ask):
    if ask.begin:
        print("in the middle", flush=True)
        sys.stdin.read()
    return answer(self, ask)
slab_server.SlabServer._answer = slow
print(address, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_killed_or_stopped_in_the_middle_is_replaced_by_another(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, source, is_in_the_middle = CurveKeys.make(), slab(), threading.Event()
    answer = Link.answer

    def answer_after_the_first(link: Link) -> tuple[Answer, memoryview]:
        """Allow more time for the first piece: a holder on a busy machine that is given up before it has sent
        one is never in the middle of a copy."""
        while not is_in_the_middle.is_set() and not link._socket.poll(10):
            pass
        return answer(link)

    monkeypatch.setattr(Link, "answer", answer_after_the_first)
    monkeypatch.setattr(slab_client, "_LEAST_S", 60.0)
    folder = str(Path(__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder, keys.public, keys.secret],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        dying = child.stdout.readline().strip()
        with joined(2, keys) as ((first, address), (second, _)):
            first.offer(KEY, source, None)
            found: list[SlabBytes | None] = []
            copying = threading.Thread(target=lambda: found.append(fetch(second, dying, address)))
            copying.start()
            assert child.stdout.readline() == "in the middle\n"
            is_in_the_middle.set()
            child.send_signal(how)
            copying.join()
            assert np.array_equal(found[0], source)  # type: ignore[arg-type]
            assert second.num_failures >= 1
    finally:
        child.kill()
        child.communicate()


def test_an_answer_is_read_strictly() -> None:
    answer = Answer(SlabState.HELD, 5, b"1")
    assert decode_answer(encode(answer)) == answer
