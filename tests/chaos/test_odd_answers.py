"""U8, U9, U10: answers that come twice, errors that quote an input, connections that close during a call."""

from pathlib import Path

import pytest

from support.scenarios.closed_calls import connections_close
from support.scenarios.odd_answers import AFTERWARDS, QUOTES, answers_come_twice, errors_quote_the_input

SECONDS = 20


@pytest.mark.parametrize("while_resting", [False, True], ids=["in one piece", "at rest"])
async def test_an_answer_that_comes_twice_is_nobody_elses(tmp_path: Path, while_resting: bool) -> None:
    seen = await answers_come_twice(tmp_path, clients=40, seconds=SECONDS, while_resting=while_resting)
    passed = seen.verdict.is_clean and seen.answers.ok == 1.0 and seen.used_again == 0
    what = (
        f"each answer twice, {'5 ms later, at rest' if while_resting else 'in one piece'}: 40 clients, {seen.answers}; "
        f"{seen.used_again} of {seen.calls} calls on a connection with a repeated answer"
    )
    seen.verdict.report("U8", what, passed=passed)
    assert passed


@pytest.mark.parametrize("quote", QUOTES)
async def test_nothing_is_learned_from_an_error_that_quotes_the_input(tmp_path: Path, quote: str) -> None:
    seen = await errors_quote_the_input(tmp_path, quote, rounds=6)
    passed = (
        seen.verdict.is_clean
        and seen.innocents.ok == 1.0
        and seen.quoted.statuses.keys() == {422}
        and seen.after.statuses == {200: AFTERWARDS}
        and seen.batch_max >= 8
        and seen.batch_mean >= 4
    )
    what = (
        f"errors that quote the input {quote}: innocents {seen.innocents}; quoted {seen.quoted.statuses}; afterwards "
        f"{seen.after}, batches of {seen.batch_mean:.1f} on average, {seen.batch_max} at most"
    )
    seen.verdict.report("U9", what, passed=passed)
    assert passed


@pytest.mark.parametrize(
    ("case", "given_up", "sends_max"),
    [
        ("some leave", set(), 1.5),
        ("some expire", {504}, 1.5),
        ("one attempt", {502}, 1.0),
        ("at rest", set(), 1.0),
        # The budget: a fifth more, and what it has saved up.
        ("every time", set(), 1.4),
    ],
)
async def test_a_connection_that_closes_during_a_call(
    tmp_path: Path, case: str, given_up: set[int], sends_max: float
) -> None:
    seen = await connections_close(tmp_path, case, seconds=SECONDS)
    told = {200, 502} if case == "every time" else {200}
    passed = (
        seen.verdict.is_clean
        and seen.sent_again == 0
        and seen.statuses.keys() <= told
        and seen.given_up.keys() == given_up
        and seen.sends_per_request <= sends_max
    )
    what = (
        f"connections close, {case}: {seen.rounds} rounds, {seen.closed} calls cut off, {dict(seen.statuses)}, "
        f"given up {dict(seen.given_up)}; {seen.sent_again} sent again for nobody, {seen.sends_per_request:.2f} sends "
        f"a request"
    )
    seen.verdict.report("U10", what, passed=passed)
    assert passed
