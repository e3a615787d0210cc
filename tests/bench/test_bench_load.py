from __future__ import annotations

import asyncio

import pytest
from fake_openai import FakeServer

from loraplex.bench.client import BenchRequest, CompletionClient, encode_request
from loraplex.bench.load import closed_loop, open_loop, run
from loraplex.bench.prompts import PromptSource, uniform_requests, workload_requests
from loraplex.bench.records import RequestRecord
from loraplex.workload import WorkloadRequest


class ScriptedClient:
    """Answers at once; time passes only when somebody sleeps."""

    def __init__(self, *, overslept_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.overslept_s = overslept_s
        self.sent: list[tuple[str, float, float | None]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s + self.overslept_s
        await asyncio.sleep(0)

    async def complete(self, request: BenchRequest, *, arrival_s: float | None = None) -> RequestRecord:
        self.sent.append((request.model, self.now_s, arrival_s))
        return RequestRecord(
            model=request.model,
            prompt_tokens=1,
            output_tokens=1,
            arrival_s=self.now_s if arrival_s is None else arrival_s,
            token_times_s=(self.now_s,),
            finish_s=self.now_s,
        )


def named(*names: str) -> list[BenchRequest]:
    return [encode_request(model=name, prompt_token_ids=[10], output_tokens=1) for name in names]


def test_open_loop_sends_in_order_at_the_due_times() -> None:
    client = ScriptedClient()
    requests = named("a", "b", "c")
    arrivals_s = [0.5, 2.0, 2.0]
    records = asyncio.run(open_loop(client, requests, arrivals_s=arrivals_s, sleep=client.sleep))
    assert [record.model for record in records] == ["a", "b", "c"]
    assert [(name, due_s) for name, _, due_s in client.sent] == [("a", 100.5), ("b", 102.0), ("c", 102.0)]


def test_open_loop_counts_its_own_lateness_as_latency() -> None:
    client = ScriptedClient(overslept_s=1.0)
    records = asyncio.run(open_loop(client, named("a"), arrivals_s=[0.5], sleep=client.sleep))
    assert records[0].arrival_s == 100.5
    assert records[0].token_times_s == (101.5,)


def test_open_loop_does_not_wait_for_answers(fake: FakeServer) -> None:
    async def main() -> list[RequestRecord]:
        async with CompletionClient(fake.base_url, timeout_s=0.3) as client:
            return await open_loop(client, named("hang", "ok"), arrivals_s=[0.0, 0.0])

    hung, served = run(main())
    assert hung.error is not None
    assert served.ok
    assert served.finish_s < hung.finish_s


def test_open_loop_refuses_lists_of_different_lengths() -> None:
    client = ScriptedClient()
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(open_loop(client, named("a", "b"), arrivals_s=[0.0], sleep=client.sleep))
    assert isinstance(caught.value.exceptions[0], ValueError)


@pytest.mark.parametrize(("concurrency", "num_requests"), [(1, 3), (4, 20), (16, 5)])
def test_closed_loop_keeps_to_its_concurrency(fake: FakeServer, concurrency: int, num_requests: int) -> None:
    names = [f"m{index}" for index in range(num_requests)]
    seen: list[RequestRecord] = []

    async def main() -> list[RequestRecord]:
        async with CompletionClient(fake.base_url) as client:
            return await closed_loop(client, named(*names), concurrency=concurrency, on_done=seen.append)

    records = run(main())
    assert [record.model for record in records] == names
    assert all(record.ok for record in records)
    assert len(seen) == num_requests
    assert fake.max_open <= concurrency


def test_closed_loop_keeps_going_and_keeps_count_when_requests_fail(fake: FakeServer) -> None:
    requests = [
        encode_request(model=name, prompt_token_ids=[10], output_tokens=4)
        for name in ("refuse", "ok", "die", "ok")
    ]

    async def main() -> list[RequestRecord]:
        async with CompletionClient(fake.base_url) as client:
            return await closed_loop(client, requests, concurrency=2)

    assert [record.ok for record in run(main())] == [False, True, False, True]


def test_prompts_are_seeded_and_within_the_vocabulary() -> None:
    source = PromptSource(seed=7, vocab_low=10, vocab_high=20)
    prompts = source.draw([5, 50, 1])
    assert [len(prompt) for prompt in prompts] == [5, 50, 1]
    assert all(10 <= token_id < 20 for prompt in prompts for token_id in prompt)
    assert prompts == source.draw([5, 50, 1])
    assert prompts != PromptSource(seed=8, vocab_low=10, vocab_high=20).draw([5, 50, 1])


def test_closed_loop_takes_adapters_in_turn() -> None:
    requests = uniform_requests(
        PromptSource(seed=0), num_requests=5, prompt_tokens=3, output_tokens=2, models=["a", "b"]
    )
    assert [request.model for request in requests] == ["a", "b", "a", "b", "a"]
    assert {(request.prompt_tokens, request.output_tokens) for request in requests} == {(3, 2)}


def test_workload_takes_adapters_by_index_modulo_their_number() -> None:
    workload = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=4 + index, output_tokens=9, adapter=index)
        for index in (0, 1, 5)
    ]
    requests = workload_requests(PromptSource(seed=0), workload=workload, models=["a", "b", "c"])
    assert [(request.model, request.prompt_tokens) for request in requests] == [("a", 4), ("b", 5), ("c", 9)]
