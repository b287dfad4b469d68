"""Tickets: whoever has the secret opens them, for a minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import Unauthorized
from carpool.face.http.streams import TICKET_S, Tickets
from carpool.testing import FakeClock

SHOWN = {b"authorization": b"Bearer cp_secret", b"host": b"a", b"cookie": b"c"}


def opens(tickets: Tickets, ticket: str) -> bool:
    try:
        return tickets.open(ticket) == {b"authorization": b"Bearer cp_secret"}
    except Unauthorized:
        return False


def test_without_a_token_it_is_this_process_s_own() -> None:
    tickets = Tickets()
    assert opens(tickets, tickets.give(SHOWN))
    assert not opens(Tickets(), tickets.give(SHOWN))


def test_it_is_good_for_a_minute() -> None:
    clock = FakeClock()
    tickets = Tickets(["t"], clock)
    ticket = tickets.give(SHOWN)
    clock.advance(TICKET_S - 1)
    assert opens(tickets, ticket)
    clock.advance(1)
    assert not opens(tickets, ticket)


def test_nobody_has_a_credential_where_none_is_asked_for() -> None:
    tickets = Tickets()
    assert tickets.open(tickets.give({})) == {}


@given(st.text("Az09-_=+é\0", max_size=200), st.integers(0, 60), st.sampled_from("Az09-_=+é\0"))
def test_any_other_text_is_refused(text: str, place: int, letter: str) -> None:
    tickets = Tickets(["t"])
    with pytest.raises(Unauthorized):
        tickets.open(text)
    ticket = tickets.give(SHOWN)
    changed = ticket[:place] + letter + ticket[place + 1 :]
    same = str.maketrans("+/", "-_")  # both alphabets of base64 are read
    assert changed.translate(same) == ticket.translate(same) or not opens(tickets, changed)
