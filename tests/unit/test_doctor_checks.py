"""The doctor's judgements, each on facts that call for another one."""

from collections.abc import Callable, Mapping

import pytest

from carpool.broker.redis.fleet.servers import NodeFacts, check_cluster, check_sentinels, parse_info
from carpool.broker.redis.fleet.view import FleetMember, FleetView, Heartbeat, ModelHeartbeat
from carpool.core.finding import Finding, Level, merged, worst
from carpool.tools.doctor import (
    ShardFacts,
    StreamFacts,
    check_answers,
    check_clock,
    check_counts,
    check_fleet,
    check_groups,
    check_letters,
    check_memory,
    check_persistence,
    check_policy,
    check_replicas,
    check_role,
    check_version,
    check_waiting,
)

GIB = 2**30


def judged(finding: Finding) -> Level:
    """Its level; whatever is not well must say what to change."""
    assert finding.says
    assert bool(finding.do) == (finding.level != "ok")
    return finding.level


def fleet(
    *batchers: str, gateways: tuple[str, ...] = ("g",), silent: tuple[str, ...] = (), unreadable: int = 0
) -> FleetView:
    def member(name: str, is_live: bool) -> FleetMember:
        return FleetMember(
            name, 0.1, is_live, "2023-11-14T22:13:20.000Z", Heartbeat(status="ok", models={"m": ModelHeartbeat()})
        )

    return FleetView(
        0.0,
        1.5,
        tuple(member(name, True) for name in gateways),
        (*(member(name, True) for name in batchers), *(member(name, False) for name in silent)),
        unreadable,
    )


def shard(
    *streams: StreamFacts,
    held: int | None = None,
    unread: int | None = None,
    letters: int = 0,
    letter_bytes: int = 0,
    letter_bytes_counted: int = 0,
) -> ShardFacts:
    true_held, true_unread = sum(s.length for s in streams), sum(s.unread for s in streams)
    return ShardFacts(
        3,
        true_held if held is None else held,
        true_unread if unread is None else unread,
        letter_bytes_counted,
        letter_bytes,
        letters,
        3 * 2**20,
        2**30,
        streams,
    )


@pytest.mark.parametrize(
    ("version", "level"),
    [("7.0.15", "ok"), ("8.2.1", "ok"), ("10.0", "ok"), ("6.2.14", "problem"), ("", "problem"), ("new", "problem")],
)
def test_version(version: str, level: Level) -> None:
    assert judged(check_version({"redis_version": version})) == level


def test_role() -> None:
    assert judged(check_role({"role": "master"})) == "ok"
    assert judged(check_role({"role": "slave"})) == "problem"


@pytest.mark.parametrize(
    ("info", "config", "level", "word"),
    [
        ({"aof_enabled": "1"}, {"appendfsync": "always"}, "ok", "nothing"),
        ({"aof_enabled": "1"}, {"appendfsync": "everysec"}, "ok", "second"),
        ({"aof_enabled": "1"}, {"appendfsync": "no"}, "warning", "power cut"),
        ({"aof_enabled": "1"}, None, "warning", "cannot be read"),
        ({"aof_enabled": "0"}, {"save": ""}, "warning", "every accepted task"),
        ({"aof_enabled": "0"}, {"save": "3600 1"}, "warning", "snapshot"),
        ({"aof_enabled": "0"}, None, "warning", "snapshot"),
        ({"aof_enabled": "1", "aof_last_write_status": "err"}, {"appendfsync": "always"}, "problem", "failed"),
        ({"aof_enabled": "0", "rdb_last_bgsave_status": "err"}, {"save": "1 1"}, "problem", "failed"),
    ],
)
def test_persistence(info: Mapping[str, str], config: Mapping[str, str] | None, level: Level, word: str) -> None:
    finding = check_persistence(info, config)
    assert judged(finding) == level
    assert word in finding.says


@pytest.mark.parametrize(
    ("policy", "level"), [("noeviction", "ok"), ("allkeys-lru", "problem"), ("volatile-ttl", "problem")]
)
def test_eviction(policy: str, level: Level) -> None:
    assert judged(check_policy({"maxmemory_policy": policy})) == level


@pytest.mark.parametrize(
    ("used", "own", "level"),
    [(GIB, 0, "warning"), (GIB, 4 * GIB, "ok"), (7 * GIB, 10 * GIB, "warning"), (9 * GIB, 10 * GIB, "problem")],
)
def test_memory(used: int, own: int, level: Level) -> None:
    assert judged(check_memory({"used_memory": str(used), "maxmemory": str(own)})) == level


ONLINE = {"slave0": "ip=10.0.0.1,port=6379,state=online,offset=1,lag=0"}
BEHIND = {"slave0": "ip=10.0.0.1,port=6379,state=wait_bgsave,offset=0,lag=0", "slave_read_repl_offset": "1"}


@pytest.mark.parametrize(
    ("info", "config", "wanted", "is_replicated", "level"),
    [
        ({}, {}, 0, False, "ok"),
        ({}, {}, 0, True, "warning"),
        ({}, {}, 1, True, "problem"),
        (BEHIND, {}, 1, True, "problem"),
        (ONLINE, {}, 1, True, "ok"),
        (ONLINE, None, 1, True, "ok"),
        (ONLINE, {}, 2, True, "problem"),
        (ONLINE, {}, 0, True, "warning"),
        (ONLINE, {"min-replicas-to-write": "1"}, 1, True, "ok"),
        (ONLINE, {"min-replicas-to-write": "2"}, 1, True, "problem"),
    ],
)
def test_replicas(
    info: Mapping[str, str], config: Mapping[str, str] | None, wanted: int, is_replicated: bool, level: Level
) -> None:
    assert judged(check_replicas(info, config, wanted, is_replicated=is_replicated)) == level


def test_latency_and_clock() -> None:
    assert judged(check_answers(NodeFacts("a:1", {}, {}, 0.3, 0.0))) == "ok"
    assert judged(check_answers(NodeFacts("a:1", {}, {}, 30.0, 0.0))) == "warning"
    assert judged(check_clock(-0.9)) == "ok"
    assert "behind" in check_clock(-1.5).says
    assert "ahead of" in check_clock(1.5).says
    assert judged(check_clock(1.5)) == "warning"


@pytest.mark.parametrize(
    ("state", "replicas", "level"),
    [
        ("ok", [1, 1, 2], "ok"),
        ("ok", [1, 0, 2], "warning"),
        ("ok", [1, None, 2], "problem"),
        ("fail", [1, 1, 1], "problem"),
    ],
)
def test_cluster(state: str, replicas: list[int | None], level: Level) -> None:
    finding = check_cluster({"cluster_state": state}, replicas)
    assert judged(finding) == level
    if state == "ok" and level != "ok":
        assert "shards 1" in finding.says


@pytest.mark.parametrize(
    ("answering", "named", "quorum", "known", "level"),
    [(3, 3, 2, 3, "ok"), (2, 3, 2, 3, "warning"), (2, 2, 2, 2, "warning"), (1, 1, 1, 1, "warning"), (1, 1, 2, 3, "ok")],
)
def test_sentinels(answering: int, named: int, quorum: int, known: int, level: Level) -> None:
    assert judged(check_sentinels(answering, named, quorum, known)) == level


@pytest.mark.parametrize(
    ("view", "level"),
    [
        (fleet("b"), "ok"),
        (fleet(), "warning"),
        (fleet(silent=("b",)), "warning"),
        (fleet("b", gateways=()), "warning"),
        (fleet("b", unreadable=1), "warning"),
    ],
)
def test_fleet(view: FleetView, level: Level) -> None:
    assert judged(check_fleet(view)) == level


def test_what_waits_needs_a_live_batcher_of_its_model() -> None:
    waiting = [shard(StreamFacts("s", "m", 5, 2))]
    assert "3 waiting, 2 taken" in check_waiting(waiting, fleet("b")).says
    assert "3.0 MiB without a result, 1.0 GiB of results" in check_waiting(waiting, fleet("b")).says
    assert judged(check_waiting(waiting, fleet("b"))) == "ok"
    assert judged(check_waiting(waiting, fleet(silent=("b",)))) == "problem"
    assert judged(check_waiting([shard(StreamFacts("s", "other", 5, 0))], fleet("b"))) == "problem"
    assert judged(check_waiting([shard(StreamFacts("s", "other", 0, 0))], fleet())) == "ok"


def test_counts() -> None:
    stream = StreamFacts("s", "m", 5, 2)
    assert judged(check_counts([shard(stream), shard()])) == "ok"
    assert judged(check_counts([shard(), shard(stream, held=6)])) == "warning"
    finding = check_counts([shard(stream, unread=-1)])
    assert judged(finding) == "warning"
    assert "shard 3 says 5/-1/0, has 5/3/0" in finding.says
    assert judged(check_counts([shard(letter_bytes=7, letter_bytes_counted=8)])) == "warning"


@pytest.mark.parametrize(
    ("stream", "view", "level"),
    [
        (StreamFacts("s", "m", 2, 2, (("b", 2, 99_000),)), fleet("b"), "ok"),
        (StreamFacts("s", "m", 2, 2, (("gone", 2, 2_000),)), fleet("b"), "ok"),
        (StreamFacts("s", "m", 2, 2, (("gone", 2, 99_000),)), fleet("b"), "warning"),
        (StreamFacts("s", "m", 2, 2, (("gone", 2, 99_000),)), fleet(), "problem"),
        (StreamFacts("s", "m", 2, None), fleet("b"), "problem"),
        (StreamFacts("s", "m", 0, None), fleet("b"), "ok"),
    ],
)
def test_groups(stream: StreamFacts, view: FleetView, level: Level) -> None:
    assert judged(check_groups([shard(stream)], view)) == level


def test_letters() -> None:
    assert judged(check_letters([shard(), shard()])) == "ok"
    kept = [shard(letters=2, letter_bytes=3 * 2**20), shard(letters=3, letter_bytes=2**19)]
    assert check_letters(kept).says == "5 kept, 3.5 MiB"
    assert judged(check_letters([shard(letters=2)])) == "warning"


def test_the_same_finding_of_all_servers_is_told_once() -> None:
    def at(where: str, says: str) -> Finding:
        return Finding("version", "ok", says, "", (where,))

    assert merged([at("a:1", "7.0"), at("b:1", "7.0")], 2) == [Finding("version", "ok", "7.0")]
    assert merged([at("a:1", "7.0"), at("b:1", "7.2"), at("c:1", "7.0")], 3) == [
        Finding("version", "ok", "7.0", "", ("a:1", "c:1")),
        Finding("version", "ok", "7.2", "", ("b:1",)),
    ]


def test_the_worst_counts() -> None:
    make: Callable[[Level], Finding] = lambda level: Finding("x", level, "y")  # noqa: E731
    assert worst([]) == "ok"
    assert worst([make("warning"), make("ok")]) == "warning"
    assert worst([make("warning"), make("problem"), make("ok")]) == "problem"


def test_info() -> None:
    assert parse_info(b"# Server\r\nredis_version:7.0.15\r\n\r\nslave0:ip=::1,port=1\r\n") == {
        "redis_version": "7.0.15",
        "slave0": "ip=::1,port=1",
    }
