"""The demo's control panel, by HTTP: each control does what it says; there is none without the demo."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.demo import Demo, running_demo
from support.gateway import ask, eventually, serving
from support.live import viewing

GPUS = 3

pytestmark = pytest.mark.xdist_group("demo_panel")


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with running_demo(GPUS) as running:
        yield running


def test_the_banner_says_where_to_look(demo: Demo) -> None:
    page = ask(demo.admin_port, "GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_load_comes_from_every_tier_and_is_compared(demo: Demo) -> None:
    with viewing(demo.admin_port) as viewer:
        first = viewer.next()
        assert (first["demo"]["rate"], first["demo"]["comparison"]) == (0, None)
        assert demo.grant(rate=60)["rate"] == 60
        seen: set[str] = set()

        def is_all(event: dict[str, Any]) -> bool:
            seen.update(tier["name"] for tier in event["tiers"] if tier["answered"])
            return seen == {"enterprise", "paid", "free"} and event["demo"]["comparison"] is not None

        found = viewer.until(is_all)["demo"]["comparison"]
        assert (found["rate"], found["gpus"]) == (60, GPUS)
        assert found["carpool"]["gpus_needed"] <= found["one_by_one"]["gpus_needed"]
        demo.grant(rate=0)
        viewer.until(lambda event: not any(tier["offered"] for tier in event["tiers"]))


def test_a_gpu_dies_and_comes_back(demo: Demo) -> None:
    assert demo.grant(kill=1)["dead"] == [1]
    assert eventually(lambda: demo.states() == ["healthy", "offline", "healthy"])
    assert {demo.infer(f"{n}").status for n in range(10)} == {200}
    assert demo.grant(revive=1)["dead"] == []
    # If its breaker is open, the next call tries it.
    assert eventually(lambda: demo.infer("again").status == 200 and demo.states() == ["healthy"] * GPUS)


@pytest.mark.parametrize(
    "wish", [{"rate": -1}, {"rate": 1e9}, {"kill": GPUS}, {"policy": "none"}, {"other": 1}, {"revive": "x"}]
)
def test_other_wishes_are_refused(demo: Demo, wish: dict[str, Any]) -> None:
    assert demo.wish(**wish).status == 400


def test_another_origin_has_no_wishes(demo: Demo) -> None:
    body = json.dumps({"rate": 5}).encode()
    assert ask(demo.admin_port, "POST", "/internal/demo", body, "Origin: http://evil.example").status == 403


def test_there_is_no_panel_without_the_demo(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("gateway")) as gateway:
        assert ask(gateway.admin_port, "POST", "/internal/demo", {"rate": 5}).status == 404
        with viewing(gateway.admin_port) as viewer:
            assert "demo" not in viewer.next()
