"""Inputs of a batch that are the same are sent once, and each request has its own outcome as before."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import ClientLeft, InputRefused, UpstreamRefused
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.service import ModelFace
from carpool.settings import Settings, models_of
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.testing import (
    FakeUpstream,
    UpstreamCall,
    UpstreamResponse,
    Witness,
    echo,
    inputs_of,
    make_request,
)
from carpool.upstream.same import Merged, fill_up, merge_same, still_there
from support.virtual_gateway import Stand, failing


@given(st.lists(st.tuples(st.sampled_from([b"1", b"2", b"3"]), st.sampled_from("ab"))), st.booleans())
def test_of_each_input_one_is_sent(pairs: list[tuple[bytes, str]], is_owned: bool) -> None:
    members = [make_request(str(n), Witness(), now=0.0, value=v, owner=o) for n, (v, o) in enumerate(pairs)]
    sent, told = merge_same(members, is_owned=is_owned)
    assert told is not None or sent == members
    places = told or range(len(members))
    assert len(places) == len(members)
    for request, place in zip(members, places, strict=True):
        assert sent[place].input == request.input
        assert sent[place].owner == request.owner or not is_owned
    assert len(sent) == len({pair if is_owned else pair[0] for pair in pairs})


def test_who_has_left_does_not_say_how_an_output_is_written() -> None:
    members = [make_request(name, Witness(), now=0.0, value=b"1") for name in ("left", "waits")]
    members.append(make_request("alone", Witness(), now=0.0, value=b"2"))
    merged = merge_same(members, is_owned=False)
    members[0].settle(ClientLeft("left"), 1.0)
    members[2].settle(ClientLeft("left"), 1.0)
    assert [request.id for request in still_there(merged, members)] == ["waits", "alone"]


def values(stand: Stand, requests: list[Request]) -> list[object]:
    outcomes = [stand.witness.outcome(request) for request in requests]
    return [bytes(each.value) if isinstance(each, Output) else type(each) for each in outcomes]


class TestOverTheUpstream:
    def test_each_gets_the_output_of_its_own_input(self) -> None:
        gpu = FakeUpstream(slots=1)
        stand = Stand(gpu, is_cached=True)

        async def main() -> None:
            requests = [stand.send(value, "o", is_same=True) for value in (b'"a"', b'"b"', b'"a"', b'"a"', b'"c"')]
            await asyncio.sleep(0.5)
            assert [call.inputs for call in gpu.calls] == [[b'"a"', b'"b"', b'"c"']]
            assert values(stand, requests) == [b'"a"', b'"b"', b'"a"', b'"a"', b'"c"']
            outcome = stand.witness.outcome(requests[0])
            assert isinstance(outcome, Output)
            assert outcome.call.batch_size == 3

        stand.run(main)

    def test_a_bad_input_is_everybodys_who_sent_it_and_nobody_elses(self) -> None:
        gpu = FakeUpstream(slots=2)
        for _ in range(100):
            gpu.then(failing(422))
        stand = Stand(gpu, is_cached=True)

        async def main() -> None:
            inputs = (b'"bad"', b'"fine"', b'"bad"', b'"good"', b'"fine"', b'"bad"')
            requests = [stand.send(value, "o", is_same=True) for value in inputs]
            await asyncio.sleep(3.0)
            expected = [InputRefused if b"bad" in value else value for value in inputs]
            assert values(stand, requests) == expected

        stand.run(main)


class TestAnApiThatTakesAFixedNumber:
    """`upstream.pad`."""

    @given(st.lists(st.sampled_from([b"1", b"2", b"3"]), min_size=1, max_size=8), st.booleans())
    def test_it_gets_as_many_and_each_member_has_its_own_place(self, inputs: list[bytes], is_cached: bool) -> None:
        members = [make_request(str(number), Witness(), now=0.0, value=value) for number, value in enumerate(inputs)]
        merged = merge_same(members, is_owned=False) if is_cached else Merged(members, None)
        sent, places = fill_up(merged, 8)
        assert len(sent) == 8
        for request, place in zip(members, places or range(8), strict=True):
            assert sent[place].input == request.input

    def test_every_call_is_full_and_each_gets_its_own_output(self) -> None:
        gpu = FakeUpstream(slots=2)
        stand = Stand(gpu, max_batch=4, pad=True)

        async def main() -> None:
            requests = [stand.send(value, "o", is_same=True) for value in (b'"a"', b'"b"', b'"c"', b'"d"', b'"e"')]
            await asyncio.sleep(0.5)
            assert [call.inputs for call in gpu.calls] == [[b'"a"', b'"b"', b'"c"', b'"d"'], [b'"e"'] * 4]
            assert values(stand, requests) == [b'"a"', b'"b"', b'"c"', b'"d"', b'"e"']
            outcome = stand.witness.outcome(requests[4])
            assert isinstance(outcome, Output)
            assert outcome.call.batch_size == 1

        stand.run(main)

    def test_the_shortest_is_repeated(self) -> None:
        members = [make_request(value.decode(), Witness(), now=0.0, value=value) for value in (b"222", b"1", b"55555")]
        sent, _ = fill_up(Merged(members, None), 5)
        assert [request.id for request in sent] == ["222", "1", "55555", "1", "1"]

    @pytest.mark.parametrize("count", [1, 3, 8])
    def test_no_input_is_at_fault_if_the_api_takes_fewer(self, count: int) -> None:
        def takes_4(call: UpstreamCall) -> UpstreamResponse:
            size = len(inputs_of(call))
            return UpstreamResponse(422, b'{"error":"batch size %d > maximum 4"}' % size) if size > 4 else echo(call)

        gpu = FakeUpstream(slots=2)
        stand = Stand(gpu, max_batch=8, pad=True)

        async def main() -> None:
            first = [stand.send(b"a", "o") for _ in range(8)]
            await asyncio.sleep(0.5)
            for _ in range(100):
                gpu.then(takes_4)
            later = [stand.send(b"b", f"o{number}") for number in range(count)]
            await asyncio.sleep(5.0)
            stand.broker.expire(stand.clock())
            assert InputRefused not in values(stand, first + later)
            await asyncio.sleep(120.0)  # by then it has not answered 8 lately
            for _ in range(3):
                last = stand.send(b"c", "o")
                await asyncio.sleep(5.0)
            assert isinstance(stand.witness.outcome(last), Output)
            assert len(gpu.calls[-1].inputs) == 4

        stand.run(main)

    def test_no_call_has_more_bytes_than_a_batch_may(self) -> None:
        """An input that is alone in its call is sent as often as the API wants inputs."""
        batching = BatchingSettings(max_batch=8, batch_bytes_max=4096)
        for pad, most in ((True, 512), (False, 1024 * 1024)):
            settings = Settings(model="m", batching=batching, upstream=UpstreamSettings(endpoints=["sim:"], pad=pad))
            assert ModelFace(models_of(settings)["m"]).body_bytes_max == most

    def test_a_call_that_is_too_large_is_not_made_again(self) -> None:
        """Filled up, it would be as large anywhere."""
        gpu = FakeUpstream(slots=2)
        stand = Stand(gpu, max_batch=4, pad=True)

        async def main() -> None:
            for _ in range(100):
                gpu.then(failing(413))
            requests = [stand.send(b'"bad"', "o", is_same=True)]
            await asyncio.sleep(3.0)
            assert values(stand, requests) == [UpstreamRefused]
            assert len(gpu.calls) == 1

        stand.run(main)

    def test_searches_for_a_bad_input_are_full_calls_too(self) -> None:
        gpu = FakeUpstream(slots=2)
        for _ in range(100):
            gpu.then(failing(422))
        stand = Stand(gpu, max_batch=4, pad=True)

        async def main() -> None:
            requests = [stand.send(value, "o", is_same=True) for value in (b'"a"', b'"bad"', b'"c"', b'"d"')]
            await asyncio.sleep(3.0)
            assert {len(call.inputs) for call in gpu.calls} == {4}
            assert values(stand, requests) == [b'"a"', InputRefused, b'"c"', b'"d"']

        stand.run(main)
