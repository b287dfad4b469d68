"""The search for bad inputs, step by step."""

from carpool.upstream.bisection import Bisection, Group


def ranges(level: list[Group]) -> list[tuple[int, int]]:
    return [(group.first, group.end) for group in level]


def test_halves_then_quarters_of_what_was_refused() -> None:
    search = Bisection(8)
    left, right = search.take_level()
    assert ranges([left, right]) == [(0, 4), (4, 8)]
    search.answered(left)
    search.refused(right)
    left, right = search.take_level()
    assert ranges([left, right]) == [(4, 6), (6, 8)]
    search.refused(left)
    search.answered(right)
    left, right = search.take_level()
    search.answered(left)
    search.refused(right)
    assert search.take_level() == []
    assert (search.refused_alone, search.any_answered) == ([5], True)
    assert repr(search) == "<Bisection refused_alone=[5] any_answered=True>"


def test_an_odd_batch_is_cut_so_that_nobody_is_lost() -> None:
    search = Bisection(3)
    left, right = search.take_level()
    assert ranges([left, right]) == [(0, 1), (1, 3)]
    search.refused(left)
    search.refused(right)
    assert ranges(search.take_level()) == [(1, 2), (2, 3)]


def test_one_of_whom_nothing_is_known_yet_is_asked_about_alone() -> None:
    search = Bisection(1)
    (group,) = search.take_level()
    assert (group.first, group.end) == (0, 1)
    search.refused(group)
    assert search.take_level() == []
    assert search.refused_alone == [0]


def test_nobody() -> None:
    assert Bisection(0).take_level() == []


def test_with_no_answer_down_to_eighths_the_search_ends() -> None:
    search = Bisection(64)
    calls = 0
    while level := search.take_level():
        calls += len(level)
        for group in level:
            search.refused(group)
    assert calls == 2 + 4 + 8
    assert (search.refused_alone, search.any_answered) == ([], False)
    assert search.take_level() == []  # and stays so


def test_an_answer_in_the_last_eighth_lets_it_go_on() -> None:
    search = Bisection(64)
    for _ in range(3):
        level = search.take_level()
        for group in level:
            if group == Group(56, 64, 3):
                search.answered(group)
            else:
                search.refused(group)
    assert len(search.take_level()) == 14


def test_a_group_of_which_nothing_is_told_is_left_out() -> None:
    search = Bisection(4)
    left, _ = search.take_level()
    search.refused(left)
    assert ranges(search.take_level()) == [(0, 1), (1, 2)]
    assert search.take_level() == []
