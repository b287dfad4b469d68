"""What clients from a plain description need of the parts: whose requests are tasks, ids, versions of a model."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from carpool.core.outcome import CallFacts
from carpool.core.ports import Caller
from carpool.face import intake
from carpool.face.http.gateway import GatewayRoutes
from carpool.face.intake import ServedModel
from carpool.upstream.codecs.base import Decoded
from carpool.upstream.dispatch import outputs_of

PLAIN = ServedModel("plain", 1000, bytes)
LATER = ServedModel("later", 1000, bytes, task_tiers=frozenset({1}))


@pytest.mark.parametrize(
    ("tier", "of_key", "headers", "body", "may_be"),
    [
        (0, "", {}, b"{}", False),
        (1, "", {}, b"{}", True),  # of one of the models
        (1, "sync", {}, b"{}", False),
        (0, "async", {}, b"{}", True),
        (0, "sync", {}, b'{"mode":"async"}', True),
        (0, "sync", {b"prefer": b"respond-async"}, b"{}", True),
    ],
)
def test_a_task_is_not_refused_before_its_body_was_read(
    tier: int, of_key: Any, headers: dict[bytes, bytes], body: bytes, may_be: bool
) -> None:
    way_in: Any = SimpleNamespace(early=None, models=lambda: [PLAIN, LATER])
    routes = GatewayRoutes(way_in, b"")
    caller = Caller("alice", tier, default_mode=of_key)
    assert routes.may_be_task(caller, headers, body) is may_be


def test_request_ids_can_be_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_prefix", "_numbers"):  # they are put back
        monkeypatch.setitem(vars(intake), name, vars(intake)[name])
    assert intake.new_request_id().startswith("req_")
    intake.make_uuids()
    ids = [intake.new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(str(UUID(each)) == each and UUID(each).version == 4 for each in ids)


def test_each_output_has_the_version_that_answered_it() -> None:
    facts = CallFacts(3, 0.2, "a", endpoint="e", batch_id="b")
    parts = [Decoded(b"1", 5, "a"), Decoded(b"2", None, "b"), Decoded(b"3", 7, "a")]
    outputs = outputs_of(parts, facts)
    assert [(each.value, each.tokens_used, each.call.model_version) for each in outputs] == [
        (b"1", 5, "a"),
        (b"2", None, "b"),
        (b"3", 7, "a"),
    ]
    assert outputs[0].call is outputs[2].call and {each.call.batch_id for each in outputs} == {"b"}
    for version in (None, "a"):
        same = outputs_of([Decoded(b"1", None, version)] * 2, CallFacts(2, 0.2, version))
        assert same[0].call is same[1].call
