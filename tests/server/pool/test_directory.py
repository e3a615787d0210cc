"""The replicas that the front names to one that wants an adapter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.server.pool.directory import NoPool, PoolDirectory
from loraplex.server.pool.messages import Holder


def stats_of(version: str, tier: str, in_flight: int = 0) -> EngineStats:
    adapter = AdapterStats(version=version, tier=tier, num_bytes=1, in_flight=in_flight, loads=0)
    return EngineStats(adapters=(adapter,))


def directory_of(count: int) -> PoolDirectory:
    directory = PoolDirectory()
    for replica in range(count):
        directory.opened(replica, f"at-{replica}")
    return directory


def addresses(holders: tuple[Holder, ...]) -> list[str]:
    return [holder.address for holder in holders]


def test_the_first_replica_reads_and_the_others_are_sent_to_those_before_them() -> None:
    directory = directory_of(4)
    assert directory.begin(2, "v") == ()
    assert directory.begin(0, "v") == (Holder("at-2", awaited=True, number=2),)
    assert addresses(directory.begin(1, "v")) == ["at-2", "at-0"]
    assert addresses(directory.begin(3, "v")) == ["at-0", "at-2", "at-1"]  # half of them to the second one
    assert directory.begin(2, "v") == (), "the one that reads is sent to nobody, however often it is asked"
    assert directory.begin(1, "other") == ()


def test_a_replica_that_has_an_adapter_without_requests_is_not_waited_for() -> None:
    directory = directory_of(2)
    directory.saw(1, stats_of("v", "host"))
    assert directory.begin(0, "v") == (Holder("at-1", awaited=False, number=1),)


def test_a_replica_that_was_seen_to_have_it_is_not_waited_for_if_its_host_memory_has_it_no_more() -> None:
    directory = directory_of(2)
    directory.begin(1, "v")
    for tier, awaited in (("disk", True), ("loading", True), ("device", False), ("disk", True)):
        directory.saw(1, stats_of("v", tier, in_flight=1))
        assert directory.holders(0, "v") == (Holder("at-1", awaited=awaited, number=1),)


def test_the_first_one_finds_what_it_has_lost_at_those_that_copied_it() -> None:
    directory = directory_of(3)
    for replica in (0, 1, 2):
        directory.begin(replica, "v")
    directory.saw(2, stats_of("v", "host"))
    assert directory.holders(0, "v") == (Holder("at-2", awaited=False, number=2),)


def test_an_adapter_that_was_evicted_is_not_looked_for_there() -> None:
    directory = directory_of(3)
    directory.begin(0, "v")
    directory.saw(0, stats_of("v", "disk"))  # reported before it knew of the request
    assert addresses(directory.begin(1, "v")) == ["at-0"]
    directory.end(0, "v")
    directory.saw(0, stats_of("v", "loading"))
    directory.saw(0, stats_of("v", "disk", in_flight=1))
    assert addresses(directory.holders(2, "v")) == ["at-0", "at-1"]
    directory.saw(0, stats_of("v", "disk"))
    assert addresses(directory.holders(2, "v")) == ["at-1"]


def test_nobody_is_sent_to_a_replica_that_is_gone_or_silent() -> None:
    directory = directory_of(3)
    members = [directory.member(replica) for replica in range(3)]
    for member in members[:2]:
        member.begin("v")
    members[0].closed()
    assert addresses(members[2].begin("v")) == ["at-1"]
    members[1].lost()
    assert members[2].holders("v") == ()
    members[1].saw(stats_of("v", "device"))
    members[0].opened("anew")
    members[0].begin("v")
    assert addresses(members[0].holders("v")) == ["at-2", "at-1"]


def test_a_version_that_is_removed_is_forgotten() -> None:
    directory = directory_of(2)
    for member in map(directory.member, range(2)):
        member.begin("v")
        member.end("v")
        member.forget("v")
    assert not directory._orders
    assert not directory._in_flight


def test_the_base_model_and_a_single_engine_have_nobody_to_copy_from() -> None:
    member = directory_of(2).member(0)
    assert member.begin(None) == ()
    member.end(None)
    assert NoPool().begin("v") == NoPool().holders("v") == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "arrive", "evict", "close", "lose"]), st.integers(0, 4))
    )
)
def test_no_two_replicas_ever_wait_for_each_other(history: list[tuple[str, int]]) -> None:
    directory = directory_of(5)
    in_flight = [0] * 5
    for what, replica in history:
        if what == "begin":
            directory.begin(replica, "v")
            in_flight[replica] += 1
        elif what == "end" and in_flight[replica]:
            directory.end(replica, "v")
            in_flight[replica] -= 1
        elif what == "evict":
            directory.saw(replica, stats_of("v", "disk"))
        elif what == "arrive":
            directory.saw(replica, stats_of("v", "host", in_flight[replica]))
        elif what == "lose":
            directory.lost(replica)
        elif what == "close":
            directory.closed(replica)
            directory.opened(replica, f"at-{replica}")
        places = list(directory._orders.get("v", ()))
        for place, each in enumerate(places):
            holders = directory.holders(each, "v")
            assert f"at-{each}" not in addresses(holders)
            waits_for = {int(h.address.removeprefix("at-")) for h in holders if h.awaited}
            assert waits_for <= set(places[:place])
