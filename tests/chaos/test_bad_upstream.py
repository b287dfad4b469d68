"""U1 (reduced), U2, U3: a fixed API that is down, hangs, or answers nonsense."""

from pathlib import Path

import pytest

from support.checker import Checker
from support.scenarios.bad_upstream import (
    ATTEMPTS,
    ENDPOINT_DOWN,
    FAILED_ATTEMPTS,
    GROWTH_BYTES_MAX,
    NO_END,
    SLACK_S,
    TOTAL_TIMEOUT_S,
    any_fault_under_load,
    attempts_of_one_request,
    bad_upstream,
    endpoint_down,
    huge_answers,
    pipelined_neighbours,
)
from support.upstreams import MIB


async def test_an_endpoint_that_is_down_gives_502_and_recovers_by_itself(tmp_path: Path) -> None:
    checker = Checker("U1", ENDPOINT_DOWN)
    refused, after, seconds = await endpoint_down(tmp_path, checker)
    verdict = checker.verdict()
    passed = verdict.is_clean and refused == {502: 8} and after == {200: 8} and seconds < TOTAL_TIMEOUT_S + SLACK_S
    verdict.report("U1", f"endpoint down: 502 after {seconds:.2f} s, 200 once it is up", passed=passed)
    assert passed


@pytest.mark.parametrize("behaviour", [*FAILED_ATTEMPTS, *NO_END])
async def test_failed_attempts_are_repeated_and_end_in_time(tmp_path: Path, behaviour: str) -> None:
    async with bad_upstream(tmp_path, "U1") as clients:
        status, attempts, seconds = await attempts_of_one_request(clients, behaviour)
        statuses = await clients.statuses_when(behaviour, 48)
        verdict = clients.checker.verdict()
    passed = (
        verdict.is_clean
        and status in (502, 504)
        and statuses.keys() <= {502, 504}
        and attempts == ATTEMPTS
        and seconds < TOTAL_TIMEOUT_S + SLACK_S
    )
    what = f"{behaviour}: {status} after {attempts} attempts and {seconds:.2f} s, then {dict(statuses)}"
    verdict.report("U1", what, passed=passed)
    assert passed


async def test_nobody_gets_anothers_output_while_calls_fail_by_chance(tmp_path: Path) -> None:
    async with bad_upstream(tmp_path, "U2-chance") as clients:
        await any_fault_under_load(clients, seconds=10)
        for _ in range(10):
            await pipelined_neighbours(clients)
        verdict, tally = clients.checker.verdict(), clients.checker.tally
        # What this upstream does is said; nothing else may go wrong.
        said = ("protocol fault", "an endpoint sent bytes that were no answer to a call")
        messages = [m for m in clients.gateway.log_messages("error") if not m.startswith(said)]
    passed = verdict.is_clean and tally["ok"] > 100 and tally["502"] > 100 and messages == []
    verdict.report("U2, U3", f"any fault by chance for 10 s: {dict(tally)}", passed=passed)
    assert passed


async def test_huge_answers_are_read_to_a_bound(tmp_path: Path) -> None:
    async with bad_upstream(tmp_path, "U3") as clients:
        before, most = await huge_answers(clients)
        verdict = clients.checker.verdict()
    passed = verdict.is_clean and most - before < GROWTH_BYTES_MAX
    verdict.report("U3", f"100 MB answers and bombs: {(most - before) // MIB} MiB above idle at most", passed=passed)
    assert passed
