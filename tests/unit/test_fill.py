"""The line that says when there will be no room for tasks."""

import pytest

from carpool.broker.fill import QUIET_S, FillWatch


class Watched:
    """A watch over 1,000 bytes, looked at every five seconds."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.watch, self.now, self.caplog = FillWatch(1000), 100.0, caplog

    def look(self, *used: int) -> list[str]:
        """The lines that come of it."""
        self.caplog.clear()
        for number in used:
            self.now += 5.0
            self.watch.look(number, self.now)
        return [record.getMessage() for record in self.caplog.records]


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    return Watched(caplog)


def test_it_says_when_it_will_be_full_at_the_present_pace(watched: Watched) -> None:
    assert watched.look(0, 500, 799) == []
    (line,) = watched.look(850)
    assert "have 85 % of tasks.stored_bytes_max (1000 bytes)" in line
    assert "full in 15 s" in line  # 51 bytes in five seconds, and 150 are left
    assert watched.look(900, 950) == []  # it was said
    watched.now += QUIET_S
    assert len(watched.look(990, 1000)) == 1


def test_what_does_not_grow_is_no_news(watched: Watched) -> None:
    assert watched.look(900, 900, 880, 880) == []
    watched.watch = FillWatch(10**9)
    assert watched.look(8 * 10**8, 8 * 10**8 + 1, 8 * 10**8) == []  # nor what takes weeks


def test_it_is_said_again_when_there_was_room_meanwhile(watched: Watched) -> None:
    assert len(watched.look(700, 900)) == 1
    assert watched.look(500, 700) == []
    assert len(watched.look(900)) == 1
