"""Results that are kept: what makes two requests the same, how long, how many."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.result_cache import ENTRY_BYTES, ResultCache, digest_key, digest_key_of_owner, exact_key
from carpool.core.request import Request
from carpool.testing import Witness, make_output, make_request

Parts = tuple[bytes, bytes, str, bytes]
PARTS = st.tuples(*[st.binary(max_size=3)] * 2, st.text("ab,;1", max_size=3), st.binary(max_size=4))


def request_of(parameters: bytes, lane: bytes, model: str, value: bytes) -> Request:
    request = make_request("r", Witness(), now=0.0, model=model, parameters=parameters, value=value)
    request.lane = lane
    return request


@given(PARTS, PARTS)
def test_only_what_is_the_same_has_the_same_key(one: Parts, two: Parts) -> None:
    first, second = request_of(*one), request_of(*two)
    for key_of in (exact_key, digest_key, digest_key_of_owner):
        assert (key_of(first) == key_of(second)) == (one == two)


def test_an_old_one_is_kept_for_the_rest_of_its_time() -> None:
    cache = ResultCache(bytes_max=10_000, ttl_s=5.0)
    cache.keep(b"k", make_output(b"1"), 10.0, age_s=4.0)
    assert cache.find(b"k", 10.9) is not None
    assert cache.find(b"k", 11.0) is None
    cache.keep(b"k", make_output(b"1"), 10.0, age_s=5.0)
    assert len(cache) == 0


def test_the_one_that_was_unused_for_longest_goes_first() -> None:
    size = ENTRY_BYTES + 2
    cache = ResultCache(bytes_max=3 * size, ttl_s=5.0)
    for key in (b"a", b"b", b"c"):
        cache.keep(key, make_output(b"1"), 0.0)
    assert cache.find(b"a", 0.0) is not None
    cache.keep(b"d", make_output(b"1"), 0.0)
    assert [cache.find(key, 0.0) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.keep(b"e", make_output(b"1" * 3 * size), 0.0)  # it would take all the room
    assert len(cache) == 3


def test_all_of_a_key_is_counted() -> None:
    """What a protocol adds to the lane is written by clients: names of tensors, and shapes."""
    cache = ResultCache(bytes_max=10_000, ttl_s=5.0)
    cache.keep(exact_key(request_of(b"{}", b"l" * 1000, "m", b"12")), make_output(b"1"), 0.0)
    assert cache.bytes == ENTRY_BYTES + 1 + 2 + 1000 + 1 + 2


STEPS = st.tuples(st.integers(0, 30), st.integers(0, 900), st.floats(0, 0.5), st.booleans())


@given(st.lists(STEPS, max_size=200), st.sampled_from([1000, 3000, 20_000]))
def test_bytes_are_bounded_and_what_is_found_is_right(steps: list[tuple[int, int, float, bool]], most: int) -> None:
    cache, now = ResultCache(bytes_max=most, ttl_s=5.0), 0.0
    newest: dict[bytes, tuple[bytes, float]] = {}
    for number, length, seconds, is_kept in steps:
        now += seconds
        key, value = b"key %d" % number, b"%d" % number + b"x" * length
        found = cache.find(key, now)
        if found is not None:
            assert found.value == newest[key][0]
            assert now < newest[key][1] + 5.0
        if is_kept:
            cache.keep(key, make_output(value), now)
            newest[key] = (value, now)
            again = cache.find(key, now)
            assert again is None or again.value == value
            assert (again is None) == (ENTRY_BYTES + len(key) + len(value) > most)
        assert 0 <= cache.bytes <= most
        assert len(cache) * ENTRY_BYTES <= cache.bytes
    for key in newest:
        assert cache.find(key, now + 100.0) is None
    assert len(cache) == 0


@contextmanager
def memory_taken() -> Iterator[Callable[[], tuple[int, int]]]:
    """Bytes that are taken since, and the most that were."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: (tracemalloc.get_traced_memory()[0] - before, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_whatever_the_sizes() -> None:
    most = 4 * 1024 * 1024
    with memory_taken() as taken:
        cache = ResultCache(bytes_max=most, ttl_s=5.0)
        for number, parameters, size in ((9000, 0, 1), (3000, 0, 3000), (40, 0, 150_000), (300, 30_000, 10)):
            for each in range(number):
                key = ("m", bytes(parameters), b"", "", b"%d %d" % (size, each))
                cache.keep(key, make_output(bytes(size)), 0.0)
            assert taken()[0] <= most * 1.15


def test_a_large_one_takes_the_place_of_others_before_it_is_written() -> None:
    most = 1024 * 1024
    values = [bytes(most - 1000), bytes(most - 1000)]
    with memory_taken() as taken:
        cache = ResultCache(bytes_max=most, ttl_s=5.0)
        for number, value in enumerate(values):
            cache.keep(b"%d" % number, make_output(value), 0.0)
        assert taken()[1] <= most * 1.15


def test_long_lanes_are_not_remembered() -> None:
    """Clients write them."""
    with memory_taken() as taken:
        keys = {digest_key(request_of(b"", b"%d" % number + bytes(100_000), "m", b"1")) for number in range(64)}
        assert len(keys) == 64
        assert taken()[0] < 1_000_000
