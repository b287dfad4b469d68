"""The generated pages say what the code says."""

import re
import shutil
from pathlib import Path

import pytest

from carpool.core.errors import all_errors
from carpool.settings.keys import KEYS
from carpool.telemetry.metrics import METRICS
from carpool.tools.docs import MARK, PAGES, START_HERE, errors_tables, settings_tables, write_pages
from support.checker import Promises
from support.metric_names import SHOWN, named_in

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_make_docs_writes(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == PAGES[name](page), "run `make docs`"
    assert page.count(MARK) == name.endswith(".md")


def test_every_error_and_every_key_has_its_row() -> None:
    errors, keys = errors_tables(), settings_tables()
    assert all(errors.count(f"\n| `{error.code}` | {error.status} |") == 1 for error in all_errors())
    # Those to start with are told twice: all ten together, and each in its section.
    assert all(keys.count(f"| `{key.variable}`") == 1 + (key.path in START_HERE) for key in KEYS.values())


def test_ten_settings_are_to_start_with() -> None:
    assert len(set(START_HERE)) == 10
    assert settings_tables().count("` **start here** |") == 10


def test_only_a_page_that_is_out_of_date_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in PAGES:
        shutil.copy(DOCS / name, tmp_path)
    page = tmp_path / "errors.md"
    current = page.read_text(encoding="utf-8")
    page.write_text(current.replace("Malformed request", "Old words"), encoding="utf-8")
    write_pages(tmp_path)
    assert page.read_text(encoding="utf-8") == current
    assert capsys.readouterr().out == f"wrote {page}\n"


def test_the_guarantees_end_with_the_last_chaos_run_as_it_states_itself() -> None:
    *_, line = (DOCS / "guarantees.md").read_text(encoding="utf-8").splitlines()
    told = re.findall(r"\d{4}-\d\d-\d\d|[\d,]*\d", line)
    promises = Promises()
    promises.kept, promises.requests = (int(number.replace(",", "")) for number in told[1:3])
    assert line == promises.stated(told[0], *map(int, told[3:]))
    assert promises.kept <= promises.requests


def test_every_metric_answers_one_question() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    _, questions, classic, _ = re.split(r"\n## .*\n", page)
    answering = re.findall(r"carpool_\w+", questions)
    assert sorted(answering) == sorted(metric.name for metric in METRICS)
    assert set(re.findall(r"carpool_\w+", classic)) <= SHOWN | set(answering)


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_a_page_names_metrics_that_there_are(page: Path) -> None:
    families = {metric.name for metric in METRICS if metric.kind != "counter"}
    tables = {"carpool_requests", "carpool_batches", "carpool_in_flight", "carpool_writers"}
    tables = tables if page.name in ("tracking.md", "observe.md") else set()
    whole = {metric.name for metric in METRICS} if page.name == "metrics.md" else set()
    assert named_in(page) <= SHOWN | families | tables | whole


@pytest.mark.parametrize("page", [DOCS.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")], ids=lambda page: page.name)
def test_a_page_names_files_that_there_are(page: Path) -> None:
    root, text = DOCS.parent, page.read_text(encoding="utf-8")
    files = {f"/{path.relative_to(root)}" for path in root.glob("[!.]*/**/*") if path.suffix in (".py", ".lua")}
    maps = {"CONTRIBUTING.md", "life-of-a-request.md"}
    named = set(re.findall(r"`([\w/]+\.(?:py|lua))`" if page.name in maps else r"`(tests/[\w/]+\.py)", text))
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)] == []
