"""The threads that the steps of a CPU engine get, on machines that are tables: seconds by threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from loraplex.perf.thread_governor import StepUsage, ThreadChange, ThreadGovernor, thread_levels

QUIET_2 = {1: 0.100, 2: 0.055}
BUSY_2 = {1: 0.130, 2: 1.400}
QUIET_16 = {level: 0.200 / level for level in range(1, 17)}
ONE_CORE_BUSY_16 = {level: 0.200 / level if level < 16 else 0.100 for level in range(1, 17)}
ALL_CORES_BUSY_16 = {level: 0.02 + 0.1 * level for level in range(1, 17)}


class Machine:
    """Runs steps as a table says. `cpu_share` of the time that threads ask for is theirs."""

    def __init__(
        self, max_threads: int, step_s: Mapping[int, float], cpu_share: float, num_preemptions: int = 0
    ) -> None:
        self.governor = ThreadGovernor(max_threads)
        self.changes: list[ThreadChange] = []
        self.now_s = 0.0
        self.run_on: list[int] = []
        self.set(step_s, cpu_share, num_preemptions)

    def set(self, step_s: Mapping[int, float], cpu_share: float, num_preemptions: int = 0) -> None:
        self.step_s, self.cpu_share, self.num_preemptions = step_s, cpu_share, num_preemptions

    def step(self, num_tokens: int = 1, scale: float = 1.0, work: float | None = None) -> None:
        threads = self.governor.num_threads
        wall_s = self.step_s[threads] * scale
        self.now_s += wall_s
        self.run_on.append(threads)
        step = StepUsage(
            num_tokens=num_tokens,
            work=num_tokens if work is None else work,
            wall_s=wall_s,
            cpu_s=wall_s * threads * self.cpu_share,
            num_preemptions=self.num_preemptions,
        )
        change = self.governor.observe(step, self.now_s)
        if change is not None:
            self.changes.append(change)

    def steps(self, count: int) -> list[int]:
        """Run so many steps; the threads that each of them had."""
        for _ in range(count):
            self.step()
        return self.run_on[-count:]

    def run_for(self, seconds: float, step: Callable[[], None] | None = None) -> list[int]:
        first, end_s = len(self.run_on), self.now_s + seconds
        while self.now_s < end_s:
            (step or self.step)()
        return self.run_on[first:]


@pytest.mark.parametrize(
    ("max_threads", "levels"),
    [(2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 3, 4)), (16, (1, 2, 4, 8, 12, 15, 16))],
)
def test_levels_are_dense_near_all_threads(max_threads: int, levels: tuple[int, ...]) -> None:
    assert thread_levels(max_threads) == levels


def test_a_machine_without_other_programs_keeps_all_threads_and_tries_nothing() -> None:
    for table, count in ((QUIET_2, 2), (QUIET_16, 16)):
        machine = Machine(count, table, cpu_share=0.95)
        assert set(machine.steps(2000)) == {count}


@pytest.mark.parametrize(
    ("max_threads", "step_s", "best"),
    [(2, BUSY_2, 1), (16, ONE_CORE_BUSY_16, 15), (16, ALL_CORES_BUSY_16, 1)],
)
def test_threads_that_are_held_up_become_as_many_as_are_fastest(
    max_threads: int, step_s: dict[int, float], best: int
) -> None:
    machine = Machine(max_threads, step_s, cpu_share=0.15)
    machine.steps(30)
    assert machine.governor.num_threads == best
    [change] = machine.changes
    assert (change.old_threads, change.new_threads) == (max_threads, best)
    assert change.old_step_s == pytest.approx(step_s[max_threads])
    assert change.new_step_s == pytest.approx(step_s[best])


def test_two_very_slow_steps_are_enough() -> None:
    machine = Machine(2, BUSY_2, cpu_share=0.15)
    assert machine.steps(26) == [2, 2] + [1] * 24


def test_threads_that_spin_while_one_is_preempted_are_noticed_too() -> None:
    machine = Machine(16, ONE_CORE_BUSY_16, cpu_share=0.97, num_preemptions=10)
    machine.steps(30)
    assert machine.governor.num_threads == 15


def test_fewer_threads_that_are_not_faster_are_given_up_at_once() -> None:
    # The CPU time is short for another reason, such as work between the kernels.
    machine = Machine(16, QUIET_16, cpu_share=0.3)
    used = machine.run_for(60.0)
    assert not machine.changes
    assert machine.governor.num_threads == 16
    assert min(used) >= 8, "levels beyond one that is much slower are not tried"
    lost_s = sum(QUIET_16[threads] - QUIET_16[16] for threads in used)
    assert lost_s < 0.05 * 60.0


def test_all_threads_come_back_when_the_other_programs_end() -> None:
    machine = Machine(2, BUSY_2, cpu_share=0.15)
    machine.steps(10)
    assert machine.governor.num_threads == 1
    machine.set(QUIET_2, cpu_share=0.95)
    machine.run_for(70.0)
    assert machine.governor.num_threads == 2
    assert [change.new_threads for change in machine.changes] == [1, 2]


@pytest.mark.parametrize("cpu_share", [0.15, 0.9])
def test_trials_of_more_threads_cost_little_while_other_programs_stay(cpu_share: float) -> None:
    """Also where the one thread that is left is held up itself."""
    machine = Machine(2, BUSY_2, cpu_share=0.15)
    machine.steps(10)
    machine.set(BUSY_2, cpu_share=cpu_share)
    used = machine.run_for(600.0)
    tries = used.count(2)
    assert tries >= 5, "more threads are tried again and again"
    assert tries * (BUSY_2[2] - BUSY_2[1]) < 0.06 * 600.0
    assert machine.governor.num_threads == 1


def test_the_first_trial_of_more_threads_waits_for_what_it_will_cost() -> None:
    machine = Machine(2, {1: 0.4, 2: 6.0}, cpu_share=0.15)
    machine.steps(6)
    assert machine.governor.num_threads == 1
    assert set(machine.run_for(20 * (6.0 - 0.4) - 1.0)) == {1}


def test_steps_are_compared_with_steps_of_their_size() -> None:
    """Prompts and decodes in turn: a trial that meets only short steps is not taken to be faster for that."""
    machine = Machine(2, QUIET_2, cpu_share=0.3)
    sizes = [(256, 30.0), (256, 30.0), (256, 30.0), (256, 30.0), (1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)]

    def eight() -> None:
        for num_tokens, scale in sizes:
            machine.step(num_tokens, scale)

    machine.run_for(300.0, eight)
    assert 1 in machine.run_on, "it was tried"
    assert not machine.changes


def test_steps_are_compared_with_steps_of_as_much_context() -> None:
    """Requests with long contexts and with short ones in turn: as many tokens, and fifteen times the time."""
    machine = Machine(2, QUIET_2, cpu_share=0.3)

    def ten() -> None:
        for work in [15.0] * 5 + [1.0] * 5:
            machine.step(num_tokens=1, scale=work, work=work)

    machine.run_for(300.0, ten)
    assert 1 in machine.run_on, "it was tried"
    assert not machine.changes


def test_a_context_that_grows_is_not_taken_for_other_programs() -> None:
    machine = Machine(2, QUIET_2, cpu_share=0.95)
    for position in range(8000):
        work = 1 + position / 500
        machine.step(num_tokens=1, scale=work, work=work)
    assert set(machine.run_on) == {2}


def test_a_trial_without_comparable_steps_ends() -> None:
    machine = Machine(2, BUSY_2, cpu_share=0.15)
    machine.steps(2)
    for index in range(6):
        machine.step(num_tokens=100 << index)
    assert not machine.changes
    assert machine.governor.num_threads == 2
