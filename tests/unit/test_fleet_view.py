"""Heartbeats, and what is seen of the fleet by them."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from carpool.broker.redis.fleet.view import (
    BEAT_BYTES_MAX,
    FleetView,
    Heartbeat,
    ModelHeartbeat,
    encode_heartbeat,
    fleet_health,
    fleet_state,
    read_view,
)
from carpool.composition.redis_admission import OTHERS_FIRST_MAX, OTHERS_FIRST_S, FleetAvailability
from carpool.core.errors import (
    ClientLeft,
)
from carpool.core.request import Request
from carpool.core.snapshot import EndpointHealth, Health
from carpool.testing import Witness, make_output, make_request

NOW_MS = 1_700_000_000_000


def endpoint(name: str = "http://gpu-1:9000/infer") -> EndpointHealth:
    return EndpointHealth(
        endpoint=name,
        state="healthy",
        utilization=0.5,
        in_flight=1,
        limit=2,
        slots=2,
        breaker="closed",
        last_heartbeat="2023-11-14T22:13:20.000Z",
    )


def model(*endpoints: EndpointHealth, **facts: Any) -> ModelHeartbeat:
    said = ModelHeartbeat(
        slots=4,
        healthy_slots=3,
        in_flight=2,
        current_utilization=0.5,
        rate=100.0,
        mean_batch_size=60.0,
        capacity_rps=640.0,
        endpoints=endpoints,
    )
    return msgspec.structs.replace(said, **facts)


def value(heartbeat: bytes, age_ms: int = 0) -> bytes:
    return b"%d %b" % (NOW_MS - age_ms, heartbeat)


def view(gateways: dict[bytes, bytes] | None = None, batchers: dict[bytes, bytes] | None = None) -> FleetView:
    flat = [[part for pair in (members or {}).items() for part in pair] for members in (gateways, batchers)]
    return read_view([NOW_MS, *flat], seen_at=10.0, stale_s=1.5)


def batcher(age_ms: int = 0, status: str = "ok", **models: ModelHeartbeat) -> bytes:
    return value(encode_heartbeat(Heartbeat(status=status, models=models), with_models=True), age_ms)


def gateway(age_ms: int = 0, **description: Any) -> bytes:
    return value(encode_heartbeat(Heartbeat(status="ok", **description), with_models=False), age_ms)


def test_an_endpoint_that_rests_between_calls_counts_for_its_share() -> None:
    loaded = msgspec.structs.replace(endpoint(), limit=0.7)
    seen = view({}, {b"one": batcher(m=model(loaded, healthy_slots=0.7, capacity_rps=224.0, batch_s=0.2))})
    assert (seen.healthy_slots("m"), seen.capacity_rps("m")) == (0.7, 224.0)
    assert fleet_state(seen).models["m"].endpoints[0].limit == 0.7


def test_older_versions_find_whole_numbers_of_slots() -> None:
    loaded = msgspec.structs.replace(endpoint(), limit=0.7)
    said = Heartbeat(status="ok", models={"m": model(loaded, endpoint(), healthy_slots=2.7)})
    written = json.loads(encode_heartbeat(said, with_models=True))["models"]["m"]
    assert (written["healthy_slots"], [each["limit"] for each in written["endpoints"]]) == (3, [1, 2])
    assert all(isinstance(number, int) for number in (written["healthy_slots"], written["endpoints"][0]["limit"]))
    without_shares = Heartbeat(status="ok", models={"m": model(endpoint())})
    assert b"exact" not in encode_heartbeat(without_shares, with_models=True)


def test_latencies_of_endpoints_stand_where_older_versions_do_not_look() -> None:
    quick = msgspec.structs.replace(endpoint("quick"), call_p50_ms=55.0, call_p99_ms=60.5)
    said = Heartbeat(status="ok", models={"m": model(endpoint("new"), quick)})
    written = encode_heartbeat(said, with_models=True)
    # To an older version an endpoint has these fields, and a heartbeat with an endpoint that has others is malformed.
    assert [each.keys() for each in json.loads(written)["models"]["m"]["endpoints"]] == [
        msgspec.to_builtins(endpoint()).keys()
    ] * 2
    assert list(fleet_state(view({}, {b"one": value(written)})).models["m"].endpoints) == [
        msgspec.structs.replace(each, batcher="one") for each in (endpoint("new"), quick)
    ]
    older = encode_heartbeat(Heartbeat(status="ok", models={"m": model(endpoint())}), with_models=True)
    assert b"call_ms" not in older
    assert fleet_state(view({}, {b"one": value(older)})).models["m"].endpoints[0].call_p50_ms is UNSET


def test_the_share_counts_where_the_endpoints_are_too_many_to_be_written() -> None:
    loaded = msgspec.structs.replace(endpoint("e" * 1000), limit=0.5)
    seen = view({}, {b"one": batcher(m=model(*[loaded] * (BEAT_BYTES_MAX // 1000), healthy_slots=0.5))})
    assert seen.healthy_slots("m") == 0.5
    assert fleet_state(seen).models["m"].endpoints == []


def test_the_silent_are_offline_and_count_for_nothing() -> None:
    said = model(endpoint())
    seen = view({b"g": gateway(1501, rate=5.0)}, {b"old": batcher(1501, m=said), b"new": batcher(1500, m=said)})
    assert [(member.name, member.status) for member in seen.batchers] == [("new", "ok"), ("old", "offline")]
    assert [member.name for member in seen.live_batchers()] == ["new"]
    assert seen.live_gateways() == []
    assert seen.healthy_slots("m") == 3
    shown = fleet_state(seen).models["m"]
    assert (shown.slots, shown.healthy_slots, shown.capacity_rps) == (4, 3, 640.0)
    assert [(row.batcher, row.state, row.in_flight) for row in shown.endpoints] == [
        ("new", "healthy", 1),
        ("old", "offline", 0),
    ]
    gone = msgspec.to_builtins(fleet_state(seen.all_silent()))
    assert gone["models"]["m"]["healthy_slots"] == 0
    assert {row["status"] for row in gone["batchers"] + gone["gateways"]} == {"offline"}
    assert fleet_health(seen, 42, status="healthy", broker="redis") == Health(
        status="healthy",
        gpu_utilization=0.5,
        queue_depth=42,
        requests_per_second=0.0,
        broker="redis",
        healthy_slots=3,
        gateways=0,
        batchers=1,
    )


def test_a_view_grows_old() -> None:
    seen = view()
    assert seen.is_fresh(11.5)
    assert not seen.is_fresh(11.6)


def test_the_page_has_the_shape_of_a_single_gateway_and_the_processes() -> None:
    one = batcher(m=model(endpoint("http://gpu-1/infer")))
    two = batcher(status="draining", m=model(endpoint("http://gpu-2/infer"), healthy_slots=0))
    page = json.loads(
        msgspec.json.encode(fleet_state(view({b"g": gateway(mode="direct")}, {b"one": one, b"two": two})))
    )
    shown = page["models"]["m"]
    assert (shown["slots"], shown["healthy_slots"], shown["capacity_rps"]) == (8, 3, 1280.0)
    assert [row["batcher"] for row in shown["endpoints"]] == ["one", "two"]
    assert shown["endpoints"][0] == {
        "endpoint": "http://gpu-1/infer",
        "state": "healthy",
        "utilization": 0.5,
        "in_flight": 1,
        "limit": 2,
        "slots": 2,
        "breaker": "closed",
        "last_heartbeat": "2023-11-14T22:13:20.000Z",
        "batcher": "one",
    }
    assert [(row["name"], row["status"]) for row in page["batchers"]] == [("one", "ok"), ("two", "draining")]
    assert page["batchers"][0]["current_utilization"] == 0.5
    assert page["batchers"][0]["models"]["m"]["mean_batch_size"] == 60.0
    assert page["gateways"] == [
        {
            "name": "g",
            "status": "ok",
            "current_utilization": 0.0,
            "in_flight": 0,
            "last_heartbeat": "2023-11-14T22:13:20.000Z",
            "mode": "direct",
        }
    ]


def test_utilization_is_weighted_by_slots() -> None:
    said = batcher(a=model(slots=3, current_utilization=1.0), b=model(slots=1, current_utilization=0.0))
    assert fleet_health(view(None, {b"b": said}), 0, status="healthy", broker="redis").gpu_utilization == 0.75


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"status":1}',
        b'{"status":"ok","models":{"m":{"healthy_slots":"many"}}}',
        pytest.param(b'{"status":"ok","x":' + b"[" * 100_000, id="deep"),
    ],
)
def test_an_absurd_beat_is_left_out(body: bytes) -> None:
    seen = view(None, {b"bad": value(body), b"good": batcher()})
    assert [member.name for member in seen.batchers] == ["good"]
    assert seen.unreadable == 1


@pytest.mark.parametrize("stamp", [b"", b"x", b"9" * 18, b"9" * 5000])
def test_an_absurd_stamp_is_left_out(stamp: bytes) -> None:
    seen = view(None, {b"bad": stamp + b' {"status":"ok"}'})
    assert (seen.batchers, seen.unreadable) == ((), 1)


@pytest.mark.parametrize("reply", [None, b"OK", [], [1, []], [b"1", [], []]])
def test_what_is_no_reply_is_refused(reply: Any) -> None:
    with pytest.raises(ValueError, match="no reply"):
        read_view(reply, seen_at=0.0, stale_s=1.5)


def test_where_a_batcher_has_too_many_endpoints_its_slots_count_all_the_same() -> None:
    endpoints = [endpoint(f"http://gpu-{number}/{'x' * 500}") for number in range(1000)]
    heartbeat = encode_heartbeat(Heartbeat("ok", models={"m": model(*endpoints, slots=2000)}), with_models=True)
    assert len(heartbeat) <= BEAT_BYTES_MAX
    (member,) = view(None, {b"b": value(heartbeat)}).batchers
    assert (member.heartbeat.models["m"].slots, member.heartbeat.models["m"].endpoints) == (2000, ())


def a_request(owner: str = "", now: float = 0.0) -> Request:
    return make_request("1", Witness(), now=now, owner=owner)


def test_where_nothing_works_one_request_is_let_in_with_each_view() -> None:
    def heard(**batchers: Any) -> FleetAvailability:
        seen = view(None, {name.encode(): batcher(m=model(**facts)) for name, facts in batchers.items()})
        availability = FleetAvailability()
        availability.heard(seen, "m")
        return availability

    down = {"healthy_slots": 0, "capacity_rps": 0.0}
    pausing = heard(one={**down, "retry_after_s": 9}, two={**down, "retry_after_s": 4})
    assert (pausing.takes_probe(a_request()), pausing.retry_after_s()) == (False, 4)
    tried = heard(one={**down, "probes": 1}, two={**down, "probes": 3}, three={**down, "retry_after_s": 4})
    assert tried.probes == 1
    assert [tried.takes_probe(a_request()) for _ in range(3)] == [True, False, False]
    assert tried.retry_after_s() == 1
    assert (heard().takes_probe(a_request()), heard().retry_after_s()) == (False, 1)


def test_of_owners_who_tell_nothing_so_many_are_remembered() -> None:
    availability = tried_at_last()
    for number in range(OTHERS_FIRST_MAX + 2):  # the last is seen to have left by the next who comes
        hasty = a_request(f"{number}")
        assert availability.takes_probe(hasty)
        hasty.settle(ClientLeft("left"), 0.01)
    assert not availability.takes_probe(a_request("2", now=0.02))
    assert availability.takes_probe(a_request("1", now=0.02))


def test_where_nobody_else_comes_the_same_owner_tries_again() -> None:
    availability = tried_at_last()
    hasty = a_request("hasty")
    assert availability.takes_probe(hasty)
    hasty.settle(ClientLeft("left"), 0.01)
    assert availability.takes_probe(a_request("hasty", now=0.01 + OTHERS_FIRST_S))


def test_who_tries_in_vain_does_not_take_the_next_try_as_well() -> None:
    availability = tried_at_last()
    seen_at = view().seen_at
    assert availability.takes_probe(a_request("poison"))
    tried_at_last(availability)  # the model is down still, and wants another one
    assert not availability.takes_probe(a_request("poison", now=seen_at + 0.01))
    assert availability.takes_probe(a_request("other", now=seen_at + 0.2))
    tried_at_last(availability)
    assert availability.takes_probe(a_request("poison", now=seen_at + OTHERS_FIRST_S))


def test_whose_try_went_well_need_not_let_others_go_first() -> None:
    availability = tried_at_last()
    tried = a_request("good")
    assert availability.takes_probe(tried)
    tried.settle(make_output(b"1"), 0.01)
    tried_at_last(availability)  # it has not been heard yet
    assert availability.takes_probe(a_request("good", now=view().seen_at + 0.01))


def tried_at_last(availability: FleetAvailability | None = None) -> FleetAvailability:
    """It hears that nothing works, and that a batcher would try an endpoint."""
    availability = availability or FleetAvailability()
    availability.heard(view(None, {b"one": batcher(m=model(healthy_slots=0, probes=1))}), "m")
    return availability


def test_what_can_be_served_and_what_is_wanted() -> None:
    seen = view(
        {
            b"a": gateway(wanted={"m": (1.0, 2.0, 30.0)}),
            b"b": gateway(wanted={"m": (4.0, 5.0, 6.0, 7.0), "n": (9.0,)}),
            b"gone": gateway(age_ms=9000, wanted={"m": (99.0, 99.0, 99.0)}),
            b"old": gateway(),
        },
        {
            b"one": batcher(m=model(capacity_rps=300.0, batch_s=0.1)),
            b"two": batcher(m=model(capacity_rps=100.0, batch_s=0.3)),
            b"new": batcher(m=model(capacity_rps=0.0, batch_s=1.0)),
        },
    )
    assert seen.capacity_rps("m") == 600.0  # the new one is like the others
    assert seen.batch_s("m") == pytest.approx(0.15)
    assert seen.wanted("m", 3) == [5.0, 7.0, 36.0]
    assert seen.wanted("m", 3, without="a") == [4.0, 5.0, 6.0]
    assert seen.wanted("other", 3) == [0.0, 0.0, 0.0]
    assert (seen.capacity_rps("other"), seen.batch_s("other")) == (0.0, 0.0)


def test_a_batcher_of_an_older_version_is_taken_to_be_like_the_others() -> None:
    """It tells what full batches would be, and not how long one takes: with that, all that runs would seem to wait."""
    old = batcher(m=model(capacity_rps=9000.0))
    seen = view({}, {b"a": old, b"b": old, b"c": batcher(m=model(capacity_rps=300.0, batch_s=0.2))})
    assert seen.capacity_rps("m") == pytest.approx(900.0)
    assert seen.batch_s("m") == pytest.approx(0.2)
    none_knows = view({}, {b"a": old, b"b": old})
    assert (none_knows.capacity_rps("m"), none_knows.batch_s("m")) == (0.0, 0.0)
