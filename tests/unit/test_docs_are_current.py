"""The generated pages say what the code says."""

import re
from pathlib import Path

import pytest

from carpool.core.errors import all_errors
from carpool.settings.keys import KEYS
from carpool.telemetry.metrics import METRICS
from carpool.tools.docs import CLASSIC, PAGES, QUESTIONS, START_HERE, main
from support.metric_names import SHOWN, named_in

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_make_docs_writes(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_every_error_and_every_key_has_its_row() -> None:
    errors, keys = PAGES["errors.md"](), PAGES["configuration.md"]()
    assert all(errors.count(f"\n| `{error.code}` | {error.status} |") == 1 for error in all_errors())
    # Those to start with are told twice: all ten together, and each in its section.
    assert all(keys.count(f"| `{key.variable}`") == 1 + (key.path in START_HERE) for key in KEYS.values())


def test_ten_settings_are_to_start_with() -> None:
    assert len(set(START_HERE)) == 10
    assert PAGES["configuration.md"]().count("` **start here** |") == 10


def test_check_tells_a_page_that_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--check"]) == 1
    assert not list(tmp_path.iterdir())
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "errors.md").write_text("old")
    capsys.readouterr()
    assert main([str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    assert "errors.md is out of date" in said and "configuration.md" not in said


def test_every_metric_answers_one_question() -> None:
    answering = [f"carpool_{name}" for _, names in QUESTIONS for name in names]
    assert sorted(answering) == sorted(metric.name for metric in METRICS)
    here = {name for _, text in CLASSIC for name in re.findall(r"carpool_\w+", text)}
    assert here <= SHOWN | set(answering)


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_a_page_names_metrics_that_there_are(page: Path) -> None:
    families = {metric.name for metric in METRICS if metric.kind != "counter"}
    tables = {"carpool_requests", "carpool_batches"} if page.name in ("tracking.md", "observe.md") else set()
    whole = {metric.name for metric in METRICS} if page.name == "metrics.md" else set()
    assert named_in(page) <= SHOWN | families | tables | whole


@pytest.mark.parametrize("page", [DOCS.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")], ids=lambda page: page.name)
def test_a_page_names_files_that_there_are(page: Path) -> None:
    root, text = DOCS.parent, page.read_text(encoding="utf-8")
    files = {f"/{path.relative_to(root)}" for path in root.glob("[!.]*/**/*") if path.suffix in (".py", ".lua")}
    maps = {"CONTRIBUTING.md", "life-of-a-request.md"}
    named = set(re.findall(r"`([\w/]+\.(?:py|lua))`" if page.name in maps else r"`(tests/[\w/]+\.py)", text))
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)] == []
