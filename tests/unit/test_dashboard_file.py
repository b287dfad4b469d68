"""The dashboard that is shipped is about metrics that there are. `make eyes` tries its queries."""

import json
import re
from pathlib import Path
from typing import Any

from support.metric_names import SHOWN, named_in

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "grafana" / "carpool.json"


def shown() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(SHIPPED.read_text(encoding="utf-8"))["panels"]
    return panels


def test_it_is_about_metrics_that_there_are() -> None:
    assert named_in(SHIPPED) - SHOWN == set()


def test_no_two_panels_lie_on_one_another_or_have_one_name() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in shown():
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        cells = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not cells & taken, panel["title"]
        taken |= cells
    for name in ("title", "id"):
        values = [panel[name] for panel in shown()]
        assert len(set(values)) == len(values)


def test_the_panels_of_which_the_runbooks_speak_are_there() -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    named = set(re.findall(r'[Pp]anel "([^"]+)"', runbooks))
    assert named
    assert named <= {panel["title"] for panel in shown()}
