"""The dashboard that is shipped: as it is built, and about metrics that there are. `make eyes` tries its queries."""

import re
from pathlib import Path

import pytest

from carpool.tools.dashboard import FILE, ROWS, dashboard, main
from support.metric_names import SHOWN, named_in

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / FILE


def test_it_is_what_make_docs_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(SHIPPED), "--check"]) == 0, "run `make docs`"
    stale = tmp_path / "carpool.json"
    assert main([str(stale), "--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([str(stale)]) == 0
    assert stale.read_text() == SHIPPED.read_text()


def test_it_is_about_metrics_that_there_are() -> None:
    assert named_in(SHIPPED) - SHOWN == set()


def test_no_two_panels_lie_on_one_another_or_have_one_name() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        cells = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not cells & taken, panel["title"]
        taken |= cells
    titles = [panel.title for panels in ROWS.values() for panel in panels]
    assert len(set(titles)) == len(titles)


def test_the_panels_of_which_the_runbooks_speak_are_there() -> None:
    titles = {panel.title for panels in ROWS.values() for panel in panels}
    runbooks = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    named = set(re.findall(r'[Pp]anel "([^"]+)"', runbooks))
    assert named
    assert named <= titles
