"""Files that anybody may have written: odd traces, reports, databases and costs are refused, in a sentence."""

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.cli import main
from carpool.tools import traces
from carpool.tools.bench.run import BadOption, parse_tiers
from carpool.tools.bench.tally import Segment, SentLoad
from carpool.tools.plan import PlanError, Workload, make_plan
from carpool.tools.simulate import Gpus, Load, recorded_load
from carpool.tools.traces import read_costs, read_trace
from carpool.tools.verify import verify
from carpool.upstream.simulated import SimulationSettings

LOAD = Load(segments=[Segment(1, 1)])
SENT: dict[str, Any] = {
    "segments": [{"rate": 5, "duration_s": 1}],
    "arrivals": "poisson",
    "seed": 1,
    "payload_bytes": 100,
    "sizes": "fixed",
    "tiers": {},
}
COST = {"call_ms": 10, "input_ms": 1, "kb_ms": 0, "padding_kb_ms": 0}
RECORD = {"created_at": "2023-11-14T22:13:20Z", "tier": "paid", "owner": "alice", "model": "m", "cached": False}


def requests(**changed: object) -> str:
    return json.dumps({"requests": [RECORD, RECORD | changed]})


def report(**changed: object) -> str:
    return json.dumps({"load": SENT | changed})


def segment(**changed: object) -> str:
    return report(segments=[SENT["segments"][0] | changed])


def simulated(path: Path) -> Load:
    return recorded_load(read_trace(path, "m"), LOAD, 0.0)


def fleet_of(path: Path) -> Gpus:
    each, count = read_costs(path, "m", SimulationSettings())
    return Gpus(count=count, each=each)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"due_s": 1}\n{"due_s": 1, "bytes": -5}', r"trace, line 2: Expected `int` >= 0 - at `\$\.bytes`"),
        ('{"due_s": 1}\n\n{"due_s": 1, "bytes": 99999999999999999999999}', r"line 3: Expected `int` <= 16777216"),
        ('{"due_s": 1}\n{"due_s": 1e308}', r"line 2: Expected `float` <= .* - at `\$\.due_s`"),
        ('{"due_s": 1}\n{"due_s": 1e999}', r"line 2: Number out of range"),
        ('{"due_s": 1}\n{"due_s": NaN}', r"line 2: JSON is malformed"),
        ('{"due_s": 1}\nhello', r"line 2: JSON is malformed"),
        ('{"due_s": 1, "bytes": -5}', r"nor lines with `due_s`: line 1: Expected `int` >= 0 - at `\$\.bytes`"),
        ('{"due_s": 1}\n{"due_s": 1, "owner": "%s"}' % ("x" * 5000), r"line 2: .* length <= 4096 - at `\$\.owner`"),
        ('{"due_s": 1}\n{"due_s": 1, "x": ' + "[" * 100_000, r"line 2: maximum recursion depth"),
        ('{"x": ' + "[" * 100_000, r"trace is neither tracking\.db"),
        (b'{"due_s": 1}\n{"due_s": 1, "owner": "\xff"}', r"line 2: 'utf-8' codec can't decode"),
        (" \n\n", "no request is in it"),
        (requests(created_at="2023-11-14T22:13:20"), r"`requests`: .* timezone component - at `\$\[1\]\.created_at`"),
        (requests(tier=None), r"`requests`: Expected `str`, got `null` - at `\$\[1\]\.tier`"),
        (report(segments=[]), r"trace, `load`: Expected `array` of length >= 1 - at `\$\.segments`"),
        (segment(rate=-5), r"Expected `float` >= 0.* - at `\$\.segments\[0\]\.rate`"),
        (segment(rate=0), "it never sends anything: every rate is 0"),
        (segment(rate=1e300), "a rate is over 1,000,000/s"),
        (segment(duration_s=0), r"Expected `float` > 0.* - at `\$\.segments\[0\]\.duration_s`"),
        (segment(duration_s=1e-300), r"it goes on for less than 0\.001 s"),
        (segment(duration_s=1e300), "it goes on for over 2,592,000 s"),
        (report(payload_bytes=90_000_000_000), r"Expected `int` <= 16777216 - at `\$\.payload_bytes`"),
        (report(payload_bytes=-7), r"Expected `int` >= 4 - at `\$\.payload_bytes`"),
        (report(tiers={"free": 0}), r"Expected `float` > 0.* - at `\$\.tiers"),
        (report(tiers={"free": 1e308, "paid": 1e308}), r"Expected `float` <= 1000000000.* - at `\$\.tiers"),
        (report(tiers={str(number): 1 for number in range(1001)}), r"length <= 1000 - at `\$\.tiers`"),
        (report(sizes="lognormal:nan,1"), "is not lognormal:MEDIAN,SIGMA"),
        (report(sizes=7), r"Expected `str`, got `int` - at `\$\.sizes`"),
        (report(more="x" * (1 << 20)), r"trace: `load` is over 1 MiB"),
        ('{"due_s": 0}\n{"due_s": 1, "tier": "paid"}\n', "some requests of the trace have a tier, and some have none"),
    ],
)
def test_an_odd_trace_is_refused(text: str | bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadOption, match=told):
        simulated(path)


@pytest.mark.parametrize(
    ("created_at", "tier", "told"),
    [
        (None, "paid", r"request 1 of 'm' by time: Expected `int`, got `null` - at `\$\.created_at`"),
        ("x", "paid", r"request 2 of 'm' by time: Expected `int`, got `str` - at `\$\.created_at`"),
        (5, None, r"request 2 of 'm' by time: Expected `str`, got `null` - at `\$\.tier`"),
        (5, b"\xff", r"Expected `str`, got `bytes` - at `\$\.tier`"),
        (-5, "paid", r"Expected `int` >= 0"),
    ],
)
def test_an_odd_database_is_refused(created_at: object, tier: object, told: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "trace") as connection:
        connection.execute("CREATE TABLE carpool_requests (created_at, tier, owner, model, cached)")
        rows = [(1, "paid", "alice"), (created_at, tier, "eve")]
        connection.executemany("INSERT INTO carpool_requests VALUES (?, ?, ?, 'm', 0)", rows)
    with pytest.raises(BadOption, match=told):
        simulated(tmp_path / "trace")


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "trace") as connection:
        connection.execute("CREATE TABLE others (id)")
    with pytest.raises(BadOption, match="trace cannot be read: no such table: carpool_requests"):
        simulated(tmp_path / "trace")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"slots": -4}, r"costs is not what /internal/fleet says: Expected `int` >= 0 - at `\$\.models\[...\]\.slots`"),
        ({"slots": 10**400}, r"is not what /internal/fleet says: .*slots"),
        ({"slots": 1_000_000_000}, "1 x 1,000,000,000 slots are more than 4,096 GPUs, or than 1,048,576 slots"),
        ({"endpoints": [1] * 5000}, "5,000 x 1 slots are more than 4,096 GPUs"),
        ({"cost": COST | {"call_ms": -5}}, r"Expected `float` >= 0.* - at `\$\.models\[...\]\.cost\.call_ms`"),
        ({"cost": COST | {"kb_ms": 1e300}}, r"Expected `float` <= 3600000.* - at `\$\.models\[...\]\.cost\.kb_ms`"),
        ({"more": "x" * (16 << 20)}, r"costs is over 16 MiB"),
    ],
)
def test_odd_costs_are_refused(model: dict[str, object], told: str, tmp_path: Path) -> None:
    path = tmp_path / "costs"
    path.write_text(json.dumps({"models": {"m": {"slots": 1, "endpoints": [1], "cost": COST} | model}}))
    with pytest.raises(BadOption, match=told):
        fleet_of(path)


@pytest.mark.parametrize("text", ['{"due_s": 1}\n' * 10 + "hello\n", '{"requests": [' + "{}," * 10 + "{}]}"])
def test_requests_are_counted_before_they_are_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "ROWS_MAX", 9)
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadOption, match=r"it has more than [0-9,]+ requests; give a part of it"):
        simulated(path)


def test_a_trace_opens_no_file_that_it_names(tmp_path: Path) -> None:
    sizes, path = tmp_path / "sizes", tmp_path / "trace"
    sizes.write_text("100\n")
    path.write_text(report(sizes=str(sizes)))
    with pytest.raises(BadOption, match=r"its sizes are from '.*sizes', which is not opened: give that as --sizes"):
        simulated(path)
    trace = read_trace(path, "m")
    assert isinstance(trace, SentLoad)
    given = Load(segments=[Segment(1, 1)], sizes=[30, 40, 50])
    # Its first request has number 1.
    assert recorded_load(trace, given, 0.0).sizes == [40, 50, 30]


def test_the_rows_of_a_file_are_sorted_with_all_that_they_have(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    came = [(3.0, "paid", "b", 50), (1.0, "free", "a", 30), (2.0, "paid", "a", 40)]
    path.write_text(
        "\n".join(json.dumps(dict(zip(("due_s", "tier", "owner", "bytes"), row, strict=True))) for row in came)
    )
    rows = read_trace(path, "m")
    assert isinstance(rows, traces.Rows)
    told = [(rows.tiers[tier], rows.owners[owner]) for tier, owner in zip(*rows.picks, strict=True)]
    assert list(zip(rows.times, told, rows.sizes, strict=True)) == [
        (1.0, ("free", "a"), 30),
        (2.0, ("paid", "a"), 40),
        (3.0, ("paid", "b"), 50),
    ]


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), 1e300])
def test_an_absurd_price_is_refused(price: float) -> None:
    with pytest.raises(BadOption, match="--gpu-price is"):
        Gpus(price=price)


@pytest.mark.parametrize("share", ["nan", "inf", "1e308", "0", "-1"])
def test_an_absurd_share_is_refused(share: str) -> None:
    with pytest.raises(BadOption, match="is not a share above 0 and up to 1,000,000,000"):
        parse_tiers(f"a={share},b={share}", with_keys=False)


WORK = {"batch": 1, "target": 0.75, "peak": 1, "payload_kb": 2, "retention_s": 1, "gpu_price": 1, "storage_price": 1}


@pytest.mark.parametrize(
    ("rate", "batch_ms", "p99_ms", "told"),
    [
        (10, 20, float("nan"), "--p99-ms is nan: give the milliseconds"),
        (10, 20, float("inf"), "--p99-ms is inf: give the milliseconds"),
        (1e-6, 20, 500, r"--verify takes 10,000 s, and 5,000 requests and 20 calls are 5,000,000,000 s"),
        (1, 1e6, 2e6, r"--verify takes 10,000 s, and 5,000 requests and 20 calls are 20,000 s"),
    ],
)
def test_what_would_take_for_ever_is_not_verified(rate: float, batch_ms: float, p99_ms: float, told: str) -> None:
    work = Workload(rate=rate, batch_ms=batch_ms, **WORK)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=told):
        verify(work, make_plan(work).usual, p99_ms, lambda rate, checked: None)


def test_the_command_says_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs"
    path.write_text(json.dumps({"models": {"\x1b[2Jm": {"slots": 1, "endpoints": []}}}))
    assert main(["simulate", "--costs", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
    assert "has no model 'default'" in err


# Numbers, texts and keys that the files have, so that what is random gets further than the first line.
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([1, 2.5, "fixed"])
)
FIELDS = (
    "due_s",
    "bytes",
    "owner",
    "created_at",
    "requests",
    "load",
    "models",
    "m",
    *SENT,
    *COST,
    "slots",
    "endpoints",
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
)


def changed(whole: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """What is right, but for some of its values."""
    return st.dictionaries(st.sampled_from(sorted(whole)), TREES, max_size=2).map(lambda other: whole | other)


FILES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda tail: traces.SQLITE + tail),
    st.lists(changed({"due_s": 1, "tier": "paid", "owner": "a", "bytes": 3}) | TREES, max_size=4).map(
        lambda lines: "\n".join(map(json.dumps, lines)).encode()
    ),
    (
        changed(SENT).map(lambda load: {"load": load})
        | st.lists(changed(RECORD), max_size=3).map(lambda rows: {"requests": rows})
        | changed({"slots": 1, "endpoints": [1], "cost": COST}).map(lambda model: {"models": {"m": model}})
        | changed(COST).map(lambda cost: {"models": {"m": {"slots": 1, "endpoints": [], "cost": cost}}})
        | TREES
    ).map(lambda whole: json.dumps(whole).encode()),
)


@settings(max_examples=400, deadline=2000)
@given(text=FILES, read=st.sampled_from([simulated, fleet_of]))
def test_whatever_is_in_a_file_it_is_read_or_refused(text: bytes, read: Callable[[Path], object]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(text)
        try:
            load = read(path)
        except BadOption as fault:
            assert str(fault)  # noqa: PT017 (either is right)
            return
    if isinstance(load, Load):
        assert 0 < load.seconds < sys.maxsize
        assert len(next(load.values())) <= 16 << 20
