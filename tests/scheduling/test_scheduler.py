"""Scheduling decisions, one claim a test. No model: tokens are made up by the test."""

from __future__ import annotations

import pytest

from loraplex.core.errors import CapacityError, ContextLengthError, InvalidRequestError, UnknownModelError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import StepPlan, TokenUpdate
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.work import StepWork

EOS = 2


class Bench:
    """A scheduler with small memory, and the few moves the tests make."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        budget_bytes: int = 100,
        max_step_tokens: int = 32,
        position_cost: float = 0.0,
        max_running: int = 8,
        max_model_len: int = 64,
    ) -> None:
        memory = SeparateMemory(num_blocks=num_blocks, block_size=4, adapter_bytes=budget_bytes)
        self.table = memory.table
        config = SchedulerConfig(
            max_model_len=max_model_len,
            work=StepWork(max_tokens=max_step_tokens, position_cost=position_cost),
            max_running=max_running,
        )
        self.scheduler = Scheduler(config, memory)

    def add(self, request_id: str, num_prompt: int = 5, adapter: str | None = None, **params: object) -> None:
        # Prompts of different requests share no prefix, unless a test gives its own tokens.
        tokens = [1000 * (ord(request_id[0]) + 1) + index for index in range(num_prompt)]
        self.add_tokens(request_id, tokens, adapter, **params)

    def add_tokens(
        self,
        request_id: str,
        tokens: list[int],
        adapter: str | None = None,
        cache_salt: str = "",
        **params: object,
    ) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tokens,
                params=SamplingParams(**{"max_tokens": 20, **params}),  # type: ignore[arg-type]
                adapter=adapter,
                eos_token_ids=(EOS,),
                cache_salt=cache_salt,
            )
        )

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return plan

    def run(self, plan: StepPlan, token: int = 7) -> list[TokenUpdate]:
        sampled = {chunk.request_id: token for chunk in plan.chunks if chunk.samples}
        updates = [
            *self.scheduler.take_failures(),
            *(self.scheduler.update(plan, sampled) if plan.chunks else []),
        ]
        self.scheduler.check_integrity()
        return updates

    def step(self, token: int = 7) -> tuple[StepPlan, list[TokenUpdate]]:
        plan = self.schedule()
        return plan, self.run(plan, token)


def sizes(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def loads(plan: StepPlan) -> list[str]:
    return [load.version for load in plan.adapter_loads]


def test_decodes_and_prompts_share_a_step() -> None:
    bench = Bench()
    bench.add("a", 5)
    bench.step()
    bench.add("b", 6)
    plan, _ = bench.step()
    assert sizes(plan) == {"a": 1, "b": 6}


def test_a_long_prompt_is_cut_to_the_token_budget_and_decodes_go_first() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add("a", 3)
    bench.step()
    bench.add("b", 20)
    chunks = []
    for _ in range(3):
        plan, updates = bench.step()
        chunks.append(sizes(plan))
    assert chunks == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}]
    assert [update.request_id for update in updates] == ["a", "b"]


def test_chunks_shrink_as_the_context_before_them_grows() -> None:
    bench = Bench(max_step_tokens=12, position_cost=0.1)
    bench.add("a", 40)
    chunks = [len(bench.step()[0].chunks[0].token_ids) for _ in range(6)]
    assert chunks == [10, 6, 5, 4, 4, 3]


def test_every_decode_runs_and_prompts_still_move_on_when_the_step_is_full() -> None:
    bench = Bench(max_step_tokens=4)
    for name in "abcdef":
        bench.add(name, 2)
        bench.step()
    bench.add("g", 3)
    sizes_of_steps = [sizes(bench.step()[0]) for _ in range(3)]
    decodes = dict.fromkeys("abcdef", 1)
    assert sizes_of_steps == [{**decodes, "g": 1}] * 3


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add("a", 12)
    plan, updates = bench.step()
    assert not plan.chunks[0].samples
    assert updates == []
    plan, updates = bench.step()
    assert plan.chunks[0].samples
    assert updates[0].token_id == 7


def test_requests_run_in_order_of_arrival_up_to_the_limit() -> None:
    bench = Bench(max_running=2)
    for name in "abc":
        bench.add(name, 3)
    plan, _ = bench.step()
    assert list(sizes(plan)) == ["a", "b"]


def test_max_tokens_ends_with_length() -> None:
    bench = Bench()
    bench.add("a", 3, max_tokens=2)
    assert bench.step()[1][0].finish_reason is None
    assert bench.step()[1][0].finish_reason is FinishReason.LENGTH
    assert not bench.scheduler.has_work()


def test_the_context_length_ends_with_length() -> None:
    bench = Bench(max_model_len=6)
    bench.add("a", 4)
    bench.step()
    assert bench.step()[1][0].finish_reason is FinishReason.LENGTH


def test_an_end_token_stops_and_is_not_part_of_the_output() -> None:
    bench = Bench()
    bench.add("a", 3)
    (update,) = bench.step(EOS)[1]
    assert (update.token_id, update.finish_reason, update.stop_token_id) == (None, FinishReason.STOP, EOS)


def test_ignore_eos_goes_on() -> None:
    bench = Bench()
    bench.add("a", 3, ignore_eos=True)
    (update,) = bench.step(EOS)[1]
    assert (update.token_id, update.finish_reason) == (EOS, None)


def test_stop_token_ids_stop_even_when_eos_is_ignored() -> None:
    bench = Bench()
    bench.add("a", 3, ignore_eos=True, stop_token_ids=(7,))
    assert bench.step(7)[1][0].finish_reason is FinishReason.STOP


def test_memory_pressure_preempts_the_youngest_and_it_resumes() -> None:
    bench = Bench(num_blocks=4)  # 16 tokens
    bench.add("a", 7)
    bench.add("b", 7)
    preempted = []
    for _ in range(3):
        plan, _ = bench.step()
        preempted += plan.preempted
    assert preempted == ["b"]
    bench.scheduler.cancel("a")
    plan, _ = bench.step()
    assert plan.chunks[0].request_id == "b"
    assert plan.chunks[0].end == 9  # the prompt and its output so far are computed again


def test_the_preempted_request_comes_before_those_that_wait() -> None:
    bench = Bench(num_blocks=4, max_running=2)
    for name in "abc":
        bench.add(name, 7)
    while not bench.step()[0].preempted:
        pass
    bench.scheduler.cancel("a")
    assert list(sizes(bench.schedule())) == ["b"]


def test_a_prompt_is_not_begun_before_there_is_memory_for_all_of_it() -> None:
    bench = Bench(num_blocks=8, max_step_tokens=8)
    bench.add("a", 7, max_tokens=3)
    bench.step()
    bench.add("b", 28)  # 7 blocks, with 6 free: its first chunk would fit
    for _ in range(2):
        assert list(sizes(bench.step()[0])) == ["a"]
    assert list(sizes(bench.step()[0])) == ["b"]


def test_a_prompt_that_is_being_read_is_promised_the_memory_for_its_rest() -> None:
    bench = Bench(num_blocks=77, max_step_tokens=140, max_model_len=400)
    bench.add("a", 300)  # 75 blocks
    bench.step()
    bench.add("b", 12)  # 3 blocks, with 13 free after this step, of which a will take 11
    assert sizes(bench.schedule()) == {"a": 128}


def test_requests_let_in_by_the_same_step_share_what_there_is() -> None:
    bench = Bench(num_blocks=32, max_step_tokens=100, max_model_len=160)
    bench.add("a", 120)  # 30 blocks, 16 for its first chunk, which leaves room in the step
    bench.add("b", 12)  # 3 blocks
    assert sizes(bench.schedule()) == {"a": 64}


def test_a_request_that_outgrows_all_memory_fails_with_the_reason() -> None:
    bench = Bench(num_blocks=2)
    bench.add("a", 7, max_tokens=30)
    updates: list[TokenUpdate] = []
    while bench.scheduler.has_work():
        updates += bench.step()[1]
    assert updates[-1].finish_reason is FinishReason.ERROR
    assert "KV memory holds 8 tokens" in str(updates[-1].error)


def test_a_repeated_prompt_is_computed_from_where_it_differs() -> None:
    bench = Bench()
    tokens = list(range(10, 22))
    bench.add_tokens("a", tokens, max_tokens=1)
    bench.step()
    bench.add_tokens("b", [*tokens[:9], 99, 98, 97])
    plan, updates = bench.step()
    assert plan.chunks[0].start == 8
    assert updates[0].num_cached_tokens == 8


def test_a_prompt_of_another_salt_is_computed_again() -> None:
    bench = Bench()
    tokens, cached = list(range(10, 22)), []
    for name, salt in (("a", "acme"), ("b", "globex"), ("c", ""), ("d", "acme"), ("e", "")):
        bench.add_tokens(name, tokens, cache_salt=salt, max_tokens=1)
        _, [update] = bench.step()
        cached.append(update.num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", 7)
    bench.add("b", 7)
    while not bench.step()[0].preempted:
        pass
    bench.scheduler.cancel("a")
    _, [update] = bench.step()
    assert update.request_id == "b"
    assert update.num_cached_tokens == 0, "its own output is no cached prompt"


def test_a_request_that_waits_for_memory_is_counted_once_by_the_prefix_cache() -> None:
    bench = Bench(num_blocks=3)
    bench.add("a", 9)
    bench.add("b", 9)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.stats(0).prefix_cache_queries == 8


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    bench = Bench()
    tokens = list(range(10, 22))
    bench.add_tokens("a", tokens, max_tokens=1)
    bench.step()
    bench.add_tokens("b", tokens, prompt_logprobs=0)
    assert bench.schedule().chunks[0].start == 0


def test_a_request_waits_for_its_adapter_and_others_pass_it() -> None:
    bench = Bench()
    bench.table.add("x", 10)
    bench.add("a", 3, "x")
    bench.add("b", 3)
    plan, _ = bench.step()
    assert loads(plan) == ["x"]
    assert list(sizes(plan)) == ["b"]
    bench.scheduler.adapter_loaded("x")
    assert list(sizes(bench.step()[0])) == ["b", "a"]


def test_an_adapter_is_loaded_once_for_all_who_wait() -> None:
    bench = Bench()
    bench.table.add("x", 10)
    bench.add("a", 3, "x")
    bench.add("b", 3, "x")
    assert loads(bench.step()[0]) == ["x"]
    assert loads(bench.step()[0]) == []


def test_a_failed_load_fails_its_requests_and_no_other() -> None:
    bench = Bench()
    bench.table.add("x", 10)
    bench.add("a", 3, "x")
    bench.add("b", 3)
    bench.step()
    bench.scheduler.adapter_failed("x", "file is gone")
    _, updates = bench.step()
    assert {u.request_id: (u.error, u.error_param) for u in updates} == {
        "a": ("file is gone", "model"),
        "b": (None, None),
    }


def test_running_adapters_stay_and_idle_ones_go_oldest_first() -> None:
    bench = Bench(budget_bytes=30)
    for name in "xyz":
        bench.table.add(name, 10)
        bench.add(name, 3, name, max_tokens=1 if name != "x" else 20)
    bench.step()
    for name in "xyz":
        bench.scheduler.adapter_loaded(name)
    bench.step()  # y and z end, x runs on
    bench.table.add("w", 10)
    bench.add("w", 3, "w")
    plan, _ = bench.step()
    assert plan.adapter_evictions == ("y",)
    assert loads(plan) == ["w"]


def test_adapters_beyond_the_budget_are_served_in_turn() -> None:
    bench = Bench(budget_bytes=20)
    for name in "abcdef":
        bench.table.add(name, 10)
        bench.add(name, 3, name, max_tokens=2)
    done = []
    for _ in range(40):
        plan, updates = bench.step()
        for version in loads(plan):
            bench.scheduler.adapter_loaded(version)
        done += [update.request_id for update in updates if update.finish_reason]
    assert done == list("abcdef")


def test_a_large_adapter_is_not_starved_by_small_ones_and_the_base_passes() -> None:
    bench = Bench(budget_bytes=20)
    for name, size in (("small", 10), ("large", 20)):
        bench.table.add(name, size)
    bench.add("a", 3, "small")
    bench.step()
    bench.scheduler.adapter_loaded("small")
    bench.step()
    for request_id, adapter in (("b", "large"), ("c", "small"), ("d", None)):
        bench.add(request_id, 3, adapter)
    assert list(sizes(bench.step()[0])) == ["a", "d"]
    bench.scheduler.cancel("a")
    assert loads(bench.step()[0]) == ["large"]


def test_cancel_frees_blocks_and_pins_in_every_state() -> None:
    bench = Bench()
    bench.table.add("x", 10)
    bench.add("a", 9, "x")
    bench.schedule()
    bench.scheduler.cancel("a")  # while its adapter loads
    bench.scheduler.adapter_loaded("x")
    bench.add("b", 9, "x")
    plan = bench.schedule()
    bench.scheduler.cancel("b")  # between schedule and update
    assert bench.run(plan) == []
    assert not bench.scheduler.has_work()
    assert bench.scheduler.stats(0).num_kv_blocks_used == 0


def test_unload_drains_then_frees() -> None:
    bench = Bench()
    bench.table.add("x", 10)
    bench.add("a", 3, "x", max_tokens=3)
    bench.step()
    bench.scheduler.adapter_loaded("x")
    bench.step()
    bench.scheduler.adapters.remove("x")
    assert bench.scheduler.adapters.take_removed() == []
    with pytest.raises(UnknownModelError):
        bench.add("b", 3, "x")
    while bench.scheduler.has_work():
        bench.step()
    assert bench.scheduler.adapters.take_removed() == ["x"]
    assert bench.table.serving.room.used_bytes == 0


@pytest.mark.parametrize(
    ("num_prompt", "num_blocks", "error", "message"),
    [
        (0, 16, InvalidRequestError, "empty"),
        (64, 16, ContextLengthError, "64 tokens"),
        (20, 4, CapacityError, "--kv-memory"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    num_prompt: int, num_blocks: int, error: type[Exception], message: str
) -> None:
    bench = Bench(num_blocks=num_blocks)
    with pytest.raises(error, match=message):
        bench.add("a", num_prompt)
    assert not bench.scheduler.has_work()


def test_a_request_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add("a")
    with pytest.raises(InvalidRequestError, match="in use"):
        bench.add("a")


def test_a_step_may_be_decided_before_the_tokens_of_the_last_one_are_told() -> None:
    bench = Bench()
    bench.add("a", 5)
    first = bench.schedule()
    second = bench.schedule()
    (chunk,) = second.chunks
    assert chunk.follows
    assert (chunk.start, chunk.end, chunk.samples) == (5, 6, True)
    assert [update.token_id for update in bench.run(first, token=8)] == [8]
    third = bench.schedule()
    assert (third.chunks[0].start, third.chunks[0].follows) == (6, True)
    assert [update.token_id for update in bench.run(second, token=9)] == [9]
    assert [update.token_id for update in bench.run(third, token=9)] == [9]


def test_no_step_is_decided_beyond_the_last_token_a_request_may_have() -> None:
    bench = Bench()
    bench.add("a", 5, max_tokens=2)
    first, second = bench.schedule(), bench.schedule()
    assert bench.schedule().chunks == ()
    bench.run(first)
    (last,) = bench.run(second)
    assert last.finish_reason is FinishReason.LENGTH
    assert not bench.scheduler.has_work()


def test_what_was_computed_beyond_the_end_of_a_request_is_passed_over() -> None:
    bench = Bench()
    bench.add("a", 5)
    first, second = bench.schedule(), bench.schedule()
    (ended,) = bench.run(first, token=EOS)
    assert ended.finish_reason is FinishReason.STOP
    bench.add("a", 3)  # the same id again, before the step that was too much is told
    assert bench.run(second) == []
    plan, updates = bench.step()
    assert sizes(plan) == {"a": 3}
    assert [update.token_id for update in updates] == [7]


def test_a_request_preempted_while_its_step_is_under_way_keeps_the_token() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", 7)
    bench.add("b", 7)
    first, second = bench.schedule(), bench.schedule()  # two blocks each: memory is full
    third = bench.schedule()
    assert third.preempted == ("b",)
    bench.run(first, token=8)
    updates = bench.run(second, token=9)
    assert [(update.request_id, update.token_id) for update in updates] == [("a", 9), ("b", 9)]
    bench.run(third)
    bench.scheduler.cancel("a")
    plan = bench.schedule()
    assert plan.chunks[0].token_ids[-2:] == [8, 9]


def test_a_request_is_not_failed_for_memory_while_its_last_token_may_be_under_way() -> None:
    bench = Bench(num_blocks=2)
    bench.add("a", 7)
    first, second = bench.schedule(), bench.schedule()  # two blocks: memory is full
    assert bench.schedule().chunks == ()
    bench.run(first)
    (ended,) = bench.run(second, token=EOS)
    assert ended.finish_reason is FinishReason.STOP


def test_a_failed_step_fails_its_requests_alone_and_none_that_took_over_their_id() -> None:
    bench = Bench()
    bench.add("a", 5)
    bench.add("b", 5)
    plan = bench.schedule()
    bench.scheduler.cancel("a")
    bench.add("a", 3)
    updates = bench.scheduler.update(plan, {}, {"a": "not finite", "b": "not finite"})
    assert updates == []
    assert [failure.request_id for failure in bench.scheduler.take_failures()] == ["b"]
    assert bench.scheduler.request_ids == {"a"}
