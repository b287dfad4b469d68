"""The rows of FAULTS.md that hold so far, in a short form; `make chaos` runs them long, and says how quick they are."""

from pathlib import Path

import pytest

from support.checker import Checker
from support.scenarios.bad_upstream import (
    ATTEMPTS,
    ENDPOINT_DOWN,
    FAILED_ATTEMPTS,
    FAULTS_OF_THE_PROTOCOL,
    REFUSALS,
    any_fault_under_load,
    attempts_of_one_request,
    bad_upstream,
    endpoint_down,
    huge_answers,
    null_elements,
    pipelined_neighbours,
)
from support.scenarios.clients_leave import half_of_all_cancel, hang_up_in_waves
from support.scenarios.drain import (
    first_moments_of_a_drain,
    received_before_the_listener_closes,
    rolling_restarts,
    second_sigterm,
)
from support.scenarios.embedded_kill import (
    deadline_counts_uptime_only,
    kill_at_random,
    terminate_while_the_upstream_hangs,
    terminate_with_a_queue,
)
from support.scenarios.overload import BODY_BYTES, WAITING_MAX, overload

# F8: the embedded gateway is killed or told to go, with tasks accepted


async def test_f8_every_accepted_task_has_its_outcome_after_kill_9(tmp_path: Path) -> None:
    verdict, checker = await kill_at_random(tmp_path, rounds=3)
    assert verdict.is_clean, verdict
    assert checker.tally.keys() == {"ok"}


async def test_f8_queued_tasks_survive_sigterm_and_run_once(tmp_path: Path) -> None:
    verdict, checker, sent_before = await terminate_with_a_queue(tmp_path, count=60)
    assert verdict.is_clean and verdict.duplicate_work == 0, verdict
    assert checker.tally == {"ok": 60}
    assert sent_before < 60


async def test_f8_tasks_of_a_hanging_batch_survive_sigterm(tmp_path: Path) -> None:
    verdict, checker = await terminate_while_the_upstream_hangs(tmp_path)
    assert verdict.is_clean, verdict
    assert checker.tally == {"ok": 4}


async def test_f8_the_deadline_of_a_task_counts_uptime_only(tmp_path: Path) -> None:
    answered, stuck, _ = await deadline_counts_uptime_only(tmp_path, timeout_s=4.0)
    assert (answered, stuck) == ("SUCCESS", "FAILED")


# U1 (reduced), U2, U3: the fixed API is down, hangs, or answers nonsense


async def test_u1_an_endpoint_that_is_down_gives_502_and_recovers_by_itself(tmp_path: Path) -> None:
    checker = Checker("U1", ENDPOINT_DOWN)
    refused, after, _ = await endpoint_down(tmp_path, checker)
    assert checker.verdict().is_clean, checker.verdict()
    assert (refused, after) == ({502: 8}, {200: 8})


# In two parts: for more a fresh gateway has too few retries in its budget.
@pytest.mark.parametrize("behaviours", [FAILED_ATTEMPTS[:3], (*FAILED_ATTEMPTS[3:], "hang")])
async def test_u1_failed_attempts_are_repeated_and_end_in_time(tmp_path: Path, behaviours: tuple[str, ...]) -> None:
    async with bad_upstream(tmp_path, "U1") as clients:
        for behaviour in behaviours:
            status, attempts, _ = await attempts_of_one_request(clients, behaviour)
            assert (status in (502, 504), attempts) == (True, ATTEMPTS), (behaviour, status, attempts)
        assert clients.checker.verdict().is_clean, clients.checker.verdict()


async def test_u2_u3_wrong_answers_are_faults_and_never_a_guess(tmp_path: Path) -> None:
    async with bad_upstream(tmp_path, "U2") as clients:
        for behaviour in FAULTS_OF_THE_PROTOCOL:
            assert await clients.statuses_when(behaviour, 8) == {502: 8}, behaviour
        for behaviour in REFUSALS:
            assert (await clients.statuses_when(behaviour, 8)).keys() <= {502, 422}, behaviour
        await null_elements(clients, 24)
        await any_fault_under_load(clients, seconds=1.5)
        await pipelined_neighbours(clients)
        verdict = clients.checker.verdict()
        assert verdict.is_clean, verdict
        known = ("protocol fault", "an endpoint sent bytes that were no answer")
        assert all(message.startswith(known) for message in clients.gateway.log_messages("error"))


async def test_u3_huge_answers_are_read_to_a_bound(tmp_path: Path) -> None:
    async with bad_upstream(tmp_path, "U3") as clients:
        await huge_answers(clients)
        assert clients.checker.verdict().is_clean, clients.checker.verdict()
        # What one attempt may read, and what waits in the buffers of the kernel on the way.
        assert 0 < clients.upstream.parts_taken_max < 100


# O3: overload with large bodies


async def test_o3_what_is_held_is_bounded_and_the_admitted_succeed(tmp_path: Path) -> None:
    seen = await overload(tmp_path, warm_up_s=1.0, seconds=2.0)
    assert seen.verdict.is_clean, seen.verdict
    assert seen.statuses.keys() == {"ok", "503"}
    # Each of those who wait has its body; the frame around an input is small.
    assert 0 < seen.held_max <= WAITING_MAX
    assert seen.held_bytes_max <= WAITING_MAX * (BODY_BYTES + 1000)


# C1, C2: clients hang up


async def test_c1_a_hang_up_frees_its_place_and_is_never_sent(tmp_path: Path) -> None:
    seen = await hang_up_in_waves(tmp_path, waves=5, clients=100)
    assert seen.verdict.is_clean and seen.verdict.duplicate_work == 0, seen.verdict
    assert seen.sent_after_leaving == 0
    assert not any(seen.held.values()), seen.held


async def test_c2_half_of_all_clients_cancel(tmp_path: Path) -> None:
    seen = await half_of_all_cancel(tmp_path, clients=50, seconds=2.5)
    assert seen.verdict.is_clean and seen.verdict.duplicate_work == 0, seen.verdict
    assert seen.tally.keys() == {"ok", "left"}
    assert not any(seen.held.values()), seen.held


# C3: SIGTERM under load


async def test_c3_rolling_restarts_are_not_noticed(tmp_path: Path) -> None:
    verdict, checker, _ = await rolling_restarts(tmp_path, rounds=3, clients=30)
    assert verdict.is_clean, verdict
    assert checker.tally.keys() == {"ok"}


async def test_c3_the_first_moments_of_a_drain(tmp_path: Path) -> None:
    await first_moments_of_a_drain(tmp_path)


async def test_c3_what_was_received_is_answered(tmp_path: Path) -> None:
    assert await received_before_the_listener_closes(tmp_path) == [200] * 4


async def test_c3_a_second_sigterm_does_not_wait_for_a_call_that_hangs(tmp_path: Path) -> None:
    await second_sigterm(tmp_path)
