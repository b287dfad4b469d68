"""The load of a whole fleet, from its heartbeats; and that its gateways decide one after the other."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.scale import (
    SharedDecisions,
    batcher_load,
    gateway_load,
    model_loads,
    waiting_by_model,
)
from carpool.broker.redis.fleet.view import FleetMember, FleetView, Heartbeat, ModelHeartbeat
from carpool.broker.redis.keys import Keys
from carpool.core.scaling import BATCHER_RPS, Decision, Decisions, Demand, ModelLoad
from carpool.core.snapshot import EndpointHealth

TIERS = ("paid", "free")


def view_of(gateways: list[Heartbeat], batchers: list[Heartbeat], *, silent: int = 0) -> FleetView:
    def members(role: str, heartbeats: list[Heartbeat]) -> tuple[FleetMember, ...]:
        return tuple(
            FleetMember(f"host{n}-{role}-{n}", 0.1, n >= silent, "", heartbeat)
            for n, heartbeat in enumerate(heartbeats)
        )

    return FleetView(0.0, 1.5, members("g", gateways), members("b", batchers), 0, 1_000.0)


def serving(*endpoints: str, model: str = "m", cores: float = 0.0, **facts: Any) -> Heartbeat:
    """A batcher of one model, whose endpoints each take a batch of 32 in 100 ms."""
    count = len(endpoints)
    shown = tuple(
        EndpointHealth(
            endpoint=each,
            state="healthy",
            utilization=0.5,
            in_flight=0,
            limit=1,
            slots=1,
            breaker="closed",
            last_heartbeat=None,
        )
        for each in endpoints
    )
    known: dict[str, Any] = {
        "slots": count,
        "healthy_slots": count,
        "works": count,
        "capacity_rps": 320.0 * count,
        "batch_s": 0.1,
    }
    return Heartbeat("ok", models={model: ModelHeartbeat(endpoints=shown, **(known | facts))}, cores=cores)


def load_of(view: FleetView, unread: int = 0, model: str = "m") -> ModelLoad:
    load = model_loads(view, [model], unread, TIERS, drain_s=300.0, wait_max_s=2.0)[model]
    assert load is not None
    return load


def shown_as(said: Heartbeat, **facts: Any) -> Heartbeat:
    """The same batcher with this to be seen of its endpoints."""
    heartbeat = said.models["m"]
    endpoints = tuple(replace(each, **facts) for each in heartbeat.endpoints)
    return replace(said, models={"m": replace(heartbeat, endpoints=endpoints)})


def test_what_comes_to_all_gateways() -> None:
    gateways = [
        Heartbeat("ok", demand={"m": Demand(300.0, 1.0, (0.0, 50.0), 1.0)}),
        Heartbeat("ok", demand={"m": Demand(100.0, 2.0, (5.0, 10.0), 0.2), "other": Demand(9.0)}),
        Heartbeat("ok"),  # an older version
    ]
    load = load_of(view_of(gateways, [serving("http://a/", "http://b/"), serving("http://c/")]), unread=7)
    assert (load.works, load.failing, load.waiting) == (3, 0, 7)
    assert load.gpu_rps == pytest.approx(320.0)
    assert (load.sync_rps, load.task_rps, load.demand_rps) == (400.0, 3.0, 403.0)
    assert load.refused_rps == {"paid": 5.0, "free": 60.0}
    assert load.wait_s == pytest.approx(0.8)  # most find that wait


def test_silent_processes_count_for_nothing() -> None:
    gateways = [Heartbeat("ok", demand={"m": Demand(300.0)}), Heartbeat("ok", demand={"m": Demand(1.0)})]
    load = load_of(view_of(gateways, [serving("http://a/"), serving("http://b/")], silent=1))
    assert (load.sync_rps, load.works) == (1.0, 1)
    assert load_of(view_of(gateways, [])).works == 0


def test_an_endpoint_of_several_batchers_is_one_gpu() -> None:
    shared = view_of([], [serving("http://a/", "http://b/"), serving("http://a/", "http://b/")])
    assert load_of(shared).works == 2
    assert load_of(shared).gpu_rps == pytest.approx(640.0)  # as two callers see it
    beside_each = view_of([], [serving("http://localhost:8000/"), serving("http://127.0.0.1:8000/")])
    assert load_of(beside_each).works == 2
    of_one_machine = FleetView(
        0.0,
        1.5,
        (),
        tuple(FleetMember(f"host-{n}-x", 0.1, True, "", serving("http://localhost:8000/")) for n in range(2)),
        0,
    )
    assert load_of(of_one_machine).works == 1
    assert load_of(view_of([], [serving("sim:?slots=1"), serving("sim:?slots=1")])).works == 2


def test_how_busy_they_are_by_the_slots_that_work() -> None:
    busy = serving("http://a/", "http://b/", "http://c/", current_utilization=0.9, fill=1.0)
    idle = serving("http://d/", current_utilization=0.1, fill=0.2)
    load = load_of(view_of([], [busy, idle]))
    assert load.busy_share == pytest.approx(0.7)
    assert load.fill == pytest.approx(0.8)


def test_what_waits_is_parted_as_batchers_see_it() -> None:
    view = view_of([], [serving("http://a/", waiting=30), serving("http://b/", model="n", waiting=10)])
    assert waiting_by_model(view, ["m", "n"], 400) == {"m": 300, "n": 100}
    assert waiting_by_model(view, ["m"], 400) == {"m": 400}
    unseen = view_of([], [serving("http://a/"), serving(model="n")])
    # Nobody asks for a model that has no GPU.
    assert waiting_by_model(unseen, ["m", "n"], 400) == {"m": 0, "n": 1}
    assert waiting_by_model(unseen, ["m", "n"], 0) == {"m": 0, "n": 0}


def test_batchers_with_gpus_of_their_own_come_with_them() -> None:
    own = view_of([], [serving("http://localhost/", cores=0.1), serving("http://localhost/", cores=0.2)])
    load = batcher_load(own, {"m": 7})
    assert (load.live, load.least) == (2, 7)
    assert load.cores == pytest.approx(0.3)
    shared = view_of([], [serving("http://a/", cores=0.1, rate=40.0), serving("http://a/", rate=2.0)])
    load = batcher_load(shared, {"m": 7})
    assert (load.least, load.rps, load.rps_each) == (1, 42.0, BATCHER_RPS)
    assert load.cores == pytest.approx(0.2)  # one does not say


@pytest.mark.parametrize("failing", [0, 1], ids=["starts", "fails"])
def test_a_gpu_that_does_not_work_takes_no_batcher_away(failing: int) -> None:
    well = [serving("http://localhost/") for _ in range(9)]
    unwell = serving("http://localhost/", works=0, healthy_slots=0, capacity_rps=0.0, failing=failing)
    unwell = shown_as(unwell, state="offline", breaker="open")
    view = view_of([], [*well, unwell])
    assert load_of(view).works == 9
    assert batcher_load(view, {"m": 10}).least == 10


def test_a_batcher_without_endpoints_takes_no_other_away() -> None:
    assert batcher_load(view_of([], [serving("http://a/"), serving("http://b/"), serving()]), {"m": 7}).least == 7


@pytest.mark.parametrize(
    ("endpoints", "least"),
    [
        (["sim:"], 4),
        (["http://localhost:8000/"], 4),
        (["http://127.0.0.1:1/", "http://127.0.0.1:2/"], 2),
        (["http://a/"], 1),  # others would call it, too
        (["http://localhost:8000/", "http://a/"], 1),
        ([], 1),
    ],
)
def test_a_batcher_that_is_alone_has_what_is_on_its_machine(endpoints: list[str], least: int) -> None:
    assert batcher_load(view_of([], [serving(*endpoints)]), {"m": 4}).least == least


def test_batchers_that_do_not_tell_how_many_endpoints_work() -> None:
    addresses = [[f"http://{batcher}{number}/" for number in range(4)] for batcher in "abcd"]
    all_tell = load_of(view_of([], [serving(*each) for each in addresses]))
    for new in range(4):
        batchers = [serving(*each, works=4 if n < new else 0) for n, each in enumerate(addresses)]
        assert load_of(view_of([], batchers)) == all_tell
    # They show which ones do.
    broken = serving("http://e/", works=0, healthy_slots=0, capacity_rps=0.0)
    for facts in ({"breaker": "open"}, {"state": "offline"}):
        assert load_of(view_of([], [serving("http://f/"), shown_as(broken, **facts)])).works == 1


def test_what_is_neither_told_nor_shown_is_not_known() -> None:
    untold = serving(healthy_slots=2000, slots=2000, capacity_rps=640_000.0)  # too many to be shown
    view = view_of([], [serving("http://a/"), untold])
    assert model_loads(view, ["m"], 0, TIERS, drain_s=300.0, wait_max_s=2.0) == {"m": None}


def test_gateways_by_their_cores() -> None:
    load = gateway_load(view_of([Heartbeat("ok", rate=10.0, cores=0.5), Heartbeat("ok", rate=5.0, cores=0.25)], []))
    assert (load.live, load.rps, load.cores) == (2, 15.0, 0.75)
    assert gateway_load(view_of([Heartbeat("ok", rate=10.0)], [])).cores == 0.0


class OneKey:
    """Redis with the script of scale.lua, which answers when it is let."""

    def __init__(self) -> None:
        self.kept = b""
        self.is_away = False
        self._asked: list[Callable[[], None]] = []

    def run(self, script: object, slot: int, keys: object, args: tuple[bytes, bytes, int], on_reply: Any) -> None:
        def answer() -> None:
            if self.is_away:
                on_reply(RedisFailure("gone"))
                return
            known, proposed, _ = args
            if self.kept == known and proposed:
                self.kept = proposed
            on_reply(self.kept)

        self._asked.append(answer)

    def answer(self) -> None:
        asked, self._asked = self._asked, []
        for each in asked:
            each()


def deciders(count: int) -> tuple[OneKey, list[SharedDecisions]]:
    redis = OneKey()
    view = view_of([], [])
    return redis, [SharedDecisions(cast(Nodes, redis), Keys(), lambda: view) for _ in range(count)]


def wanting(number: int) -> Decisions:
    return Decisions(gateways=Decision(wanted=number, why="", needed_at=0.0, sync_at=0.0))


def wanted(decisions: Decisions) -> int | None:
    return None if decisions.gateways is None else decisions.gateways.wanted


def test_gateways_decide_one_after_the_other() -> None:
    redis, (first, second) = deciders(2)
    first.propose(wanting(10))
    second.propose(wanting(20))  # it has not heard of the first one's yet
    redis.answer()
    assert [wanted(each.decisions) for each in (first, second)] == [10, 10]
    assert first.now() == 1_000.0


def json_of(redis: OneKey) -> Decisions:
    found = json.loads(redis.kept)
    return wanting(found["gateways"]["wanted"])


def test_the_one_that_decided_last_goes_on_until_it_is_gone() -> None:
    redis, (first, second) = deciders(2)
    for number in (10, 9, 8):
        first.propose(wanting(number))
        redis.answer()
        second.propose(wanting(99))  # after a decision that it has not heard of
        redis.answer()
        assert wanted(json_of(redis)) == number
        assert wanted(second.decisions) == number
    second.propose(wanting(7))
    redis.answer()
    assert wanted(json_of(redis)) == 7


def test_a_batcher_only_listens() -> None:
    redis, (gateway, batcher) = deciders(2)
    batcher.propose(None)
    redis.answer()
    assert (redis.kept, wanted(batcher.decisions)) == (b"", None)
    gateway.propose(wanting(5))
    batcher.propose(None)
    redis.answer()
    assert wanted(batcher.decisions) == 5


def test_an_emptied_redis_gets_them_again_and_one_that_is_away_later() -> None:
    redis, (gateway,) = deciders(1)
    gateway.propose(wanting(5))
    redis.answer()
    redis.is_away = True
    gateway.propose(wanting(6))
    redis.answer()
    assert wanted(gateway.decisions) == 6
    redis.is_away, redis.kept = False, b""
    for _ in range(2):
        gateway.propose(gateway.decisions)
        redis.answer()
    assert wanted(json_of(redis)) == 6


def test_those_of_another_version_are_replaced() -> None:
    redis, (gateway,) = deciders(1)
    redis.kept = b'{"gateways": {"wanted": "many"}}'
    for _ in range(2):
        gateway.propose(wanting(5))
        redis.answer()
    assert wanted(json_of(redis)) == 5
