"""The script that holds versions against promises finds every kind of wrong answer, and only those."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import live_tables, version_changes
from benchmarks.fleet_versions import TINY, Load
from benchmarks.version_changes import Fleet, Rollouts
from benchmarks.version_checkpoint import (
    LONG_TOKENS,
    SHORT_TOKENS,
    AdapterVersion,
    VersionCheckpoint,
    version_checkpoint,
)
from benchmarks.version_promises import NOT_SERVED, WRONG, Answer, Change, Judge, Listing, Promises, Standing

OLD, NEW, OTHER = "old" * 10, "new" * 10, "other" * 10


def version(name: str, *tokens: int) -> AdapterVersion:
    return AdapterVersion(version=name, folder=Path(name), answers=(tokens,))


SERVED = VersionCheckpoint(
    base=Path("base"),
    prompts=((1, 2, 3),),
    base_answers=((0, 0, 0),),
    versions={"a": (version(OLD, 1, 2, 3), version(NEW, 4, 5, 6)), "b": (version(OTHER, 7, 8, 9),)},
)


def promises() -> Promises:
    """`a` is loaded by a call from 0 to 1 s and reloaded by one from 10 to 11 s; `b` is never loaded."""
    found = Promises()
    found.changed(Standing(name="a", version=OLD), began_s=0.0, ended_s=1.0)
    found.changed(Standing(name="a", version=NEW), began_s=10.0, ended_s=11.0)
    return found


def answer(**fields: Any) -> Answer:
    """One of the old version, as it should be."""
    good = Answer(
        request_id="r",
        name="a",
        key="r",
        prompt=0,
        num_tokens=3,
        is_stream=False,
        sent_s=5.0,
        headers_s=6.0,
        header=OLD,
        usage=OLD,
        token_ids=[1, 2, 3],
    )
    return replace(good, **fields)


def judge_of(*answers: Answer) -> Judge:
    judge = Judge(promises=promises(), served=SERVED)
    for each in answers:
        judge.judge(each)
    return judge


@pytest.mark.parametrize(
    ("since_s", "until_s", "versions"),
    [
        (-2.0, -1.0, {None}),
        (0.5, 0.6, {None, OLD}),
        (2.0, 9.0, {OLD}),
        (9.0, 10.5, {OLD, NEW}),
        (10.2, 10.3, {OLD, NEW}),
        (12.0, 13.0, {NEW}),
    ],
)
def test_a_change_counts_from_the_beginning_of_its_call_and_what_was_before_until_its_end(
    since_s: float, until_s: float, versions: set[str | None]
) -> None:
    assert {each.version for each in promises().between("a", since_s, until_s)} == versions


def test_a_canary_is_promised_to_the_keys_that_it_answers() -> None:
    trial = Standing(name="a", version=OLD, canary=NEW, share=0.25)
    keys = [f"user-{number}" for number in range(400)]
    assert {trial.version_for(key) for key in keys} == {OLD, NEW}
    assert 60 < sum(trial.version_for(key) == NEW for key in keys) < 140
    found = Promises()
    found.changed(trial, began_s=0.0, ended_s=0.0)
    judge = Judge(promises=found, served=SERVED)
    for key in keys:
        judge.judge(answer(key=key))
    assert judge.wrong == {
        "another version than promised": sum(trial.version_for(key) == NEW for key in keys)
    }


@pytest.mark.parametrize(
    "given",
    [
        answer(),
        answer(sent_s=10.2, headers_s=10.3),
        answer(sent_s=10.2, headers_s=10.3, header=NEW, usage=NEW, token_ids=[4, 5, 6]),
        answer(num_tokens=2, token_ids=[1, 2]),
        answer(name=None, header=None, usage=None, token_ids=[0, 0, 0]),
        answer(name="b", error=NOT_SERVED, header=None, usage=None, token_ids=[]),
        answer(error="503 engine_down", header=None, usage=None, token_ids=[]),
        answer(error="in the stream: engine_down", usage=None, token_ids=[1]),
    ],
)
def test_what_was_promised_is_not_wrong(given: Answer) -> None:
    assert judge_of(given).wrong == {}


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (answer(sent_s=12.0, headers_s=13.0), ["another version than promised"]),
        (answer(header=NEW, usage=NEW, token_ids=[4, 5, 6]), ["another version than promised"]),
        (answer(header=OTHER, usage=OTHER, token_ids=[7, 8, 9]), ["another version than promised"]),
        (answer(header=None, usage=None, token_ids=[0, 0, 0]), ["another version than promised"]),
        (
            answer(name="b", header=None, usage=None, token_ids=[0, 0, 0]),
            ["another version than promised"],
        ),
        (answer(usage=NEW), ["header and usage differ"]),
        (answer(token_ids=[4, 5, 6]), ["tokens of another version"]),
        (answer(token_ids=[0, 0, 0]), ["tokens of another version"]),
        (answer(token_ids=[1, 2]), ["tokens of no version"]),
        (answer(token_ids=[1, 2, 6]), ["tokens of no version"]),
        (
            answer(error="in the stream: engine_down", usage=None, token_ids=[4]),
            ["tokens of another version"],
        ),
        (answer(error=NOT_SERVED, header=None, usage=None, token_ids=[]), ["refused though served"]),
    ],
)
def test_what_was_not_promised_is_wrong(given: Answer, wrong: list[str]) -> None:
    judge = judge_of(given)
    assert list(judge.wrong) == wrong
    assert [each["what"] for each in judge.examples] == wrong


def test_lists_and_log_lines_are_held_against_promises_as_well() -> None:
    judge = judge_of()
    judge.judge_listing(Listing(since_s=2.0, until_s=3.0, found={"a": (OLD, None)}))
    answers = [answer(), answer(request_id="r2"), answer(request_id="r3")]
    done = Change(request_id="c", verb="reload", version=NEW, is_done=True)
    changes = [done, replace(done, request_id="c2"), replace(done, request_id="c3", is_done=False)]
    request, audit = {"logger": "loraplex.request"}, {"logger": "loraplex.audit", "message": "adapter reload"}
    lines: list[dict[str, Any]] = [
        {**request, "request_id": "r", "version": OLD[:12]},
        {**request, "request_id": "r2", "version": NEW[:12]},
        {**audit, "request_id": "c", "result": "done", "new_version": NEW[:12]},
        {**audit, "request_id": "c2", "result": "done", "new_version": OLD[:12]},
        {**audit, "request_id": "c3", "result": "failed"},
    ]
    judge.judge_log(lines, answers, changes)
    assert judge.wrong == {"request lines that differ": 2, "audit lines that differ": 1}
    judge.judge_listing(Listing(since_s=2.0, until_s=3.0, found={"a": (OLD, NEW), "b": (OTHER, None)}))
    assert judge.wrong["lists unlike what was promised"] == 2
    assert set(judge.wrong) <= set(WRONG)


class _Asked(Fleet):
    """Does whatever is asked for, until it is told to refuse."""

    error: str | None = None

    async def call(self, path: str, body: dict[str, Any], request_id: str = "") -> str | None:
        return self.error


def test_changes_of_versions_are_promised_when_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_changes, "_UNLOADED_S", 0.0)

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            fleet = _Asked(url="http://127.0.0.1", session=session)
            rollouts = Rollouts(fleet, SERVED, [], tmp_path)
            await rollouts.load_all()
            assert fleet.promises.now("a").version == OLD
            await rollouts._reload("a", SERVED.versions["a"][1])
            await rollouts._roll_back("a", SERVED.versions["a"][1])
            assert fleet.promises.now("a").version == OLD
            fleet.error = "503 engine_down"
            await rollouts._reload("a", SERVED.versions["a"][1])
            assert fleet.promises.now("a").version == OLD, "it was refused"
            assert fleet.refused == {"reload: 503 engine_down": 1}
            assert fleet.done == {"load": 2, "reload": 1, "rollback": 1}
            fleet.error = None
            rng = random.Random(0)
            for _ in range(300):
                await rollouts._change("a", rng)
            verbs = {"load", "reload", "canary", "canary share", "promote", "abort", "rollback", "unload"}
            assert fleet.done.keys() == verbs

    asyncio.run(scenario())


def test_every_kind_of_request_is_sent() -> None:
    load = Load(SERVED, 400)
    sent = [each for _ in range(400) if (each := load.take()) is not None]
    assert len(sent) == 400
    assert load.take() is None
    assert {each.name for each in sent} == {None, "a", "b"}
    assert {each.num_tokens for each in sent} == {SHORT_TOKENS, LONG_TOKENS}
    assert {(each.is_stream, each.key == each.request_id) for each in sent} == {
        (stream, own) for stream in (True, False) for own in (True, False)
    }


def test_versions_of_a_checkpoint_answer_differently(tmp_path: Path) -> None:
    served = version_checkpoint(tmp_path, num_adapters=1, num_versions=2)
    assert served == version_checkpoint(tmp_path, num_adapters=1, num_versions=2), "it is read, not written"
    first, second = served.versions["lora-0000"]
    assert first.version != second.version
    for answers in zip(served.base_answers, first.answers, second.answers, strict=True):
        assert {len(each) for each in answers} == {LONG_TOKENS}
        assert len({each[:SHORT_TOKENS] for each in answers}) == 3


def test_a_result_makes_a_table() -> None:
    judge = judge_of(answer(), answer(name="b", error=NOT_SERVED, header=None, token_ids=[]))
    result = {
        **judge.summary(),
        "date": "2026-11-17T00:00:00+00:00",
        "machine": {"cores": 2, "cpu": "a CPU"},
        "git_commit": "abc",
        "seconds": 60.0,
        "requests_per_s": 2.0,
        "parameters": {"replicas": 3, "clients": 16, "adapters": 24, "versions": 4, "overwritten": 2},
        "kills": 5,
        "changes": {"reload": 3, "canary": 2, "rollback": 1, "restart --move": 1},
        "changes_refused": {"reload: 503 engine_down": 1},
        "moves": {
            "plans": 4,
            "adapters_brought": 9,
            "requests_after_a_death": 2,
            "requests_moved": 1,
        },
    }
    table = live_tables.versions_table(result)
    assert "| requests | 2 | 100,000 |" in table
    assert "| answers of another version than promised | 0 | 0 |" in table
    assert "2 cores of a CPU" in live_tables.versions_note(result)
    assert TINY.requests < 1000
