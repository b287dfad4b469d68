"""Rows of FAULTS.md for which whole processes are needed, in a short form; `make chaos` runs them long.

What another test shows is not here: sick and slow endpoints and clients that leave, on virtual time (`tests/unit`);
tasks that wait at SIGTERM, and one client that hangs up (`tests/contract`); SIGTERM step by step (`test_http_face.py`).
"""

from pathlib import Path

from support.scenarios.bad_upstream import (
    FAULTS_OF_THE_PROTOCOL,
    REFUSALS,
    bad_upstream,
    huge_answers,
    null_elements,
    pipelined_neighbours,
)
from support.scenarios.drain import received_before_the_listener_closes, second_sigterm
from support.scenarios.embedded_kill import kill_at_random
from support.scenarios.resilience import all_are_bad, poison


async def test_f8_every_accepted_task_has_its_outcome_after_kill_9(tmp_path: Path) -> None:
    verdict, checker = await kill_at_random(tmp_path, rounds=2)
    assert verdict.is_clean, verdict
    assert checker.tally.keys() == {"ok"}


async def test_u1_all_bad_fails_fast_and_spares_the_upstream(tmp_path: Path) -> None:
    seen = await all_are_bad(tmp_path, "status 500", per_s=100, seconds=1.5)
    assert seen.verdict.is_clean, seen
    assert seen.statuses <= {502, 503, 504}, seen
    assert seen.sends_per_request <= 1.2, seen


async def test_u2_u3_wrong_answers_are_faults_and_never_a_guess(tmp_path: Path) -> None:
    async with bad_upstream(tmp_path, "U2") as clients:
        for behaviour in FAULTS_OF_THE_PROTOCOL:
            assert await clients.statuses_when(behaviour, 8) == {502: 8}, behaviour
        for behaviour in REFUSALS:
            assert (await clients.statuses_when(behaviour, 8)).keys() <= {502, 422}, behaviour
        await null_elements(clients, 24)
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


async def test_u4_poison_harms_nobody_else(tmp_path: Path) -> None:
    seen = await poison(tmp_path, every=100, per_s=150, seconds=2)
    assert seen.verdict.is_clean, seen
    assert seen.innocents_ok >= 0.999, seen
    assert seen.poison_refused == 1.0, seen
    assert seen.poison_sends_max <= 7, seen
    assert seen.dead_letters == 3, seen
    assert seen.breakers == {"closed"}, seen


async def test_c3_what_was_received_is_answered(tmp_path: Path) -> None:
    assert await received_before_the_listener_closes(tmp_path) == [200] * 4


async def test_c3_a_second_sigterm_does_not_wait_for_a_call_that_hangs(tmp_path: Path) -> None:
    await second_sigterm(tmp_path)
