"""docs/gpu.md is made of what was measured, and of nothing else."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec

sys.path.append(str(Path(__file__).parents[2] / "bench" / "gpu"))

from figures import ALONE, CURVE, MIXED, ONE_BY_ONE, RATE, REDIS, SATURATION, Options, Point, Row, Section
from report import page, pictures, read

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = Options(["minilm", "bert"], "", "", 1, 2, 4, 2, 10.0, 1.0, 60.0, 1.0)


def row(system: str, load: str, rate: float, p99_ms: float | None = 20.0) -> Row:
    return Row("bert", system, load, rate, 10.0, p99_ms, 0, 0, 0.97, 0.91, 63.5, 4.2, 0.3, 0.4)


def section(*rows: Row, points: tuple[Point, ...] = ()) -> Section:
    return Section("a GPU", "16 cores", OPTIONS, list(points), list(rows))


def fits(system: str, auto: float) -> list[Row]:
    rates = {"off": 4000.0, "auto": auto}
    return [
        *(row(f"{system}, fit {fit}", SATURATION, rate) for fit, rate in rates.items()),
        *(row(f"{system}, fit {fit}", "80%", 3200.0) for fit in rates),
        *(row(ALONE, f"the batches of fit {fit}", rate) for fit, rate in (("off", 4100.0), ("auto", 9000.0))),
    ]


def loads(system: str, rate: float, p99_ms: float) -> list[Row]:
    return [row(system, "1,000/s", 1000.0, p99_ms), row(system, SATURATION, rate, p99_ms)]


WHOLE = {
    CURVE: section(
        points=tuple(
            Point(shape, size, batch, 2.0, 1.5, batch * 500.0)
            for shape in OPTIONS.shapes
            for size in (240, 2000)
            for batch in (1, 8, 64)
        )
    ),
    ONE_BY_ONE: section(
        *loads(ALONE, 700.0, 2500.0),
        *loads("Carpool, batches of 1", 800, 2100),
        *loads("Carpool, batches of 64", 7200, 90),
    ),
    RATE: section(row("Carpool", "10,000/s of 2 KB", 9998.7)),
    MIXED: section(row(ALONE, "as they come", 4200.0), *fits("Carpool", 8800.0)),
    REDIS: section(*fits("Carpool over Redis", 8000.0)),
}


def test_without_data_there_is_no_section() -> None:
    text = page({})
    assert text.startswith("# ")
    assert "\n## " not in text
    assert "|" not in text
    assert not pictures({})


def test_what_was_measured_is_said() -> None:
    text = page(WHOLE)
    assert text.count("\n## ") == len(WHOLE)
    assert "a GPU, 16 cores." in text
    assert "64.0 (MiniLM-L6, 60 tokens)" in text
    assert "9.0 times the throughput at saturation; p99 at 1,000/s 2,100 ms one by one and 90 ms batched" in text
    assert "9,999" in text
    assert "BERT-base: `auto` answers 2.20 times as many as `off`" in text
    assert "97% (91%)" in text


def test_a_share_of_the_server_alone_that_is_too_small_is_said() -> None:
    said = page({MIXED: WHOLE[MIXED], REDIS: WHOLE[REDIS]}).splitlines()
    shares = [line for line in said if "very same batches" in line]
    assert [line.endswith("that it should have.") for line in shares] == [False, False, False, True]
    assert "88.9%" in shares[-1]


def test_a_load_that_was_never_answered_has_no_latency() -> None:
    silent = msgspec.structs.replace(row("Carpool", "10,000/s of 2 KB", 0.0, None), p50_ms=None)
    assert "| 0 | -, - |" in page({RATE: section(silent)})


def test_pictures_have_a_bar_for_each_system() -> None:
    drawn = {name: ElementTree.fromstring(picture) for name, picture in pictures(WHOLE).items()}
    assert set(drawn) == {CURVE, ONE_BY_ONE, MIXED, REDIS}
    # At a rate, what was answered is what was sent: no bar of a comparison.
    bars = {name: len(svg.findall("{http://www.w3.org/2000/svg}rect")) for name, svg in drawn.items() if name != CURVE}
    assert bars == {ONE_BY_ONE: 3, MIXED: 5, REDIS: 4}


def test_the_page_is_that_of_the_data_beside_it() -> None:
    data = read(DOCS / "gpu")
    assert (DOCS / "gpu.md").read_text(encoding="utf-8") == page(data), "python bench/gpu/report.py docs/gpu writes it"
    for name, picture in pictures(data).items():
        assert (DOCS / "gpu" / f"{name}.svg").read_text(encoding="utf-8") == picture
