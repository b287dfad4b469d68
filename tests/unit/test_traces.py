"""What was recorded and is simulated: each kind of trace, costs of a running fleet, and what is refused."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from carpool.batching.cost import CostModel
from carpool.broker.redis.fleet.view import ModelHeartbeat, mean_cost
from carpool.cli import main
from carpool.core.snapshot import FleetState, ModelState, call_cost
from carpool.tools.bench.run import BadOption
from carpool.tools.bench.sizes import parse_sizes
from carpool.tools.bench.tally import Segment, SentLoad, Tally
from carpool.tools.simulate import Load, recorded_load
from carpool.tools.traces import Rows, read_costs, read_trace
from carpool.tracking.records import RequestRow
from carpool.tracking.sqlite import SqliteStore
from carpool.upstream.simulated import SimulationSettings

CAME = [(0.5, "paid", "alice"), (0.0, "free", "bob"), (2.25, "free", "alice")]
IN_ORDER = ([0.0, 0.5, 2.25], ["free", "paid", "free"], ["bob", "alice", "alice"])


def tracked(at_s: float, tier: str, owner: str, model: str = "m", cached: bool = False) -> RequestRow:
    created = int((1_700_000_000 + at_s) * 1e6)
    answer = (1.0, "b", 1, "gpu", 1, 9.0, cached, None, 0.01)
    return RequestRow("id", owner, tier, model, False, None, created, created + 10_000, *answer)


ROWS = [
    *(tracked(*each) for each in CAME),
    tracked(1.0, "paid", "eve", "other"),
    tracked(1.0, "paid", "eve", cached=True),
]


def sqlite(path: Path) -> None:
    async def write() -> None:
        store = SqliteStore(path, retention_days=1, bytes_max=1 << 30)
        await store.open()
        await store.write(ROWS, [])
        await store.close()

    asyncio.run(write())


def requests_json(path: Path) -> None:
    """As `carpool requests --json` prints it, the newest first."""
    shown = [
        row._asdict() | {"created_at": f"2023-11-14T22:13:{20 + (row.created_at / 1e6 - 1_700_000_000):09.6f}Z"}
        for row in sorted(ROWS, key=lambda row: -row.completed_at)
    ]
    path.write_text(json.dumps({"requests": shown}, indent=2))


def lines(path: Path) -> None:
    text = [json.dumps({"due_s": at_s, "tier": tier, "owner": owner, "outcome": "200"}) for at_s, tier, owner in CAME]
    path.write_text("\n".join(text) + "\n")


@pytest.mark.parametrize("write", [sqlite, requests_json, lines])
def test_what_came_comes_again(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path)
    trace = read_trace(path, "m")
    assert isinstance(trace, Rows)
    load = recorded_load(trace, Load(segments=[Segment(1, 1)]), 0.0)
    tiers = [tier.name for tier in load.tiers]
    owners = load.owner_names("paid")
    came = [(at_s, tiers[tier], owners[owner]) for at_s, (tier, owner) in zip(load.times(), load.picks(), strict=True)]
    assert [list(each) for each in zip(*came, strict=True)] == [pytest.approx(IN_ORDER[0]), *IN_ORDER[1:]]
    assert load.seconds == pytest.approx(2.25)
    with pytest.raises(BadOption, match=r"the trace has 2\.2 s: give less as --warm"):
        recorded_load(trace, load, 3.0)


def test_lines_may_say_how_long_inputs_were(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"due_s": 1, "bytes": 30}\n{"due_s": 2}\n')
    trace = read_trace(path, "m")
    load = recorded_load(trace, Load(segments=[Segment(1, 1)], payload_bytes=99), 0.0)
    assert [len(value) for value in load.values()] == [30, 99]
    assert (load.tiers, list(load.picks())) == ([], [(0, 0), (0, 0)])


def test_a_report_of_the_bench_makes_the_same_requests_again(tmp_path: Path) -> None:
    sent = SentLoad(
        segments=[Segment(200.0, 1.0), Segment(50.0, 1.0)],
        arrivals="uniform",
        seed=7,
        payload_bytes=10,
        sizes="lognormal:240,0.9",
        tiers={"paid": 1.0, "free": 3.0},
    )
    path = tmp_path / "bench.json"
    report = Tally().report(sending_s=1.0, intended_rate=1.0, generator_busy=0.0, load=sent)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    trace = read_trace(path, "m")
    assert trace == sent
    load = recorded_load(trace, Load(segments=[Segment(1, 1)]), 0.0)
    sizes = parse_sizes(sent.sizes, 7)
    times, values = list(load.times()), load.values()
    # Its first request has number 1.
    assert [len(next(values)) for _ in range(4)] == sizes[1:5]
    assert (len(times), times[0]) == (250, 0.0025)
    assert [tier for _, (tier, owner) in zip(times, load.picks(), strict=False)].count(0) == pytest.approx(62, abs=25)


def learned(padding_ms: float) -> CostModel:
    """From calls of 10 ms, 0.2 ms an input, 0.5 ms a KB and so much for a KB of padding, a little noise in it."""
    model, random = CostModel(), Random(1)
    for _ in range(1000):
        sizes = [random.randint(100, 4000) for _ in range(random.randint(1, 64))]
        padding = len(sizes) * max(sizes) - sum(sizes)
        ms = 10 + 0.2 * len(sizes) + 0.5 * sum(sizes) / 1000 + padding_ms * padding / 1000
        model.seen(len(sizes), sum(sizes), max(sizes), ms * random.uniform(0.98, 1.02) / 1000, "gpu", in_order=True)
    return model


def fleet(path: Path, model: CostModel) -> Path:
    state = ModelState(
        slots=6,
        healthy_slots=6,
        capacity_rps=1.0,
        endpoints=[],
        quarantined=[],
        cost=call_cost(model.seconds_by_term),
    )
    page = msgspec.to_builtins(FleetState(models={"m": state}))
    page["models"]["m"]["endpoints"] = [{"endpoint": "a"}, {"endpoint": "b"}, {"endpoint": "c"}]
    path.write_text(json.dumps(page))
    return path


@pytest.mark.parametrize("padding_ms", [0.0, 0.5])
def test_a_gpu_takes_as_long_as_was_learned(padding_ms: float, tmp_path: Path) -> None:
    model = learned(padding_ms)
    gpu, count = read_costs(fleet(tmp_path / "fleet.json", model), "m", SimulationSettings(jitter=0.1))
    assert (count, gpu.slots, gpu.jitter) == (3, 2, 0.1)
    for sizes in ([2000], [100, 4000, 900], [1000] * 64, [300] * 63 + [4000]):
        kb = sum(sizes) / 1000
        padded = len(sizes) * max(sizes) / 1000
        ms = gpu.latency_ms + gpu.per_item_ms * len(sizes) + gpu.per_kb_ms * kb + gpu.padded_ms_per_kb * padded
        expected = 10 + 0.2 * len(sizes) + 0.5 * kb + padding_ms * (padded - kb)
        assert ms == pytest.approx(expected, rel=0.15)
        assert ms == pytest.approx(1000 * model.seconds(len(sizes), sum(sizes), max(sizes)), rel=1e-3)


def test_over_redis_it_is_the_mean_over_all_slots() -> None:
    heartbeats = [(1, (0.1, 0.0, 0.0, 0.0)), (3, (0.2, 0.004, 0.0, 0.0)), (5, ())]
    found = mean_cost([ModelHeartbeat(slots=slots, cost=cost) for slots, cost in heartbeats])
    assert msgspec.to_builtins(found) == {"call_ms": 175.0, "input_ms": 3.0, "kb_ms": 0.0, "padding_kb_ms": 0.0}
    assert mean_cost([]) is msgspec.UNSET


SMALL = ("--gpus", "2", "--gpu", "sim:?latency_ms=50", "--json")


def test_the_command_takes_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace").write_text("".join(f'{{"due_s": {number / 100}}}\n' for number in range(300)))
    fleet(Path("fleet.json"), learned(0.0))
    (text,) = (Path("fleet.json").read_text(),)
    Path("fleet.json").write_text(text.replace('"m"', '"default"'))
    assert (
        main(["simulate", "--trace", "trace", "--costs", "fleet.json", "--warm", "1", "--svg", "run.svg", "--json"])
        == 0
    )
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["all"]["offered"] == found["all"]["ok"] == 200
    assert found["all"]["latency_ms"]["p50"] == pytest.approx(10 + 0.2 + 1.0 + found["queue_ms"]["p50"], rel=0.2)
    # Three, as the file has; 2.99 s of which the first does not count.
    assert found["money_per_year"] == 30_000.0
    assert found["seconds"] == 1.99
    assert len(found["moments"]) == 120
    assert sum(each["served"] for each in found["moments"]) / 120 == pytest.approx(found["all"]["goodput"], rel=0.01)
    assert Path("run.svg").read_text().count("<path") > 10


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--trace", "none"], "--trace: none cannot be read: No such file or directory"),
        (["--trace", "text"], "--trace: text is neither tracking.db, nor what `carpool requests --json`"),
        (["--trace", "empty"], "--trace: no request is in it"),
        (["--trace", "tier"], "--tiers: there is no tier 'gold'"),
        (["--costs", "none"], "--costs: none cannot be read: No such file"),
        (["--costs", "text"], "--costs: text is not what /internal/fleet says: JSON is malformed"),
        (["--costs", "fleet"], "--costs: fleet has no `cost` of 'default': ask the gateway again when some calls"),
        (["--costs", "other"], "--costs: other has no model 'default'; it has m"),
        (["--starts", "1@3..4"], "'1@3..4' is not GPU@SECOND or GPU-GPU@SECOND"),
        (["--starts", "1-3@3"], "'1-3@3': there are GPUs 1 to 2"),
        (["--starts", "1-2@3", "--dies", "2@1"], "'2@1': a GPU comes back after it has died, and dies again after"),
        (["--svg", "run.svg", "--compare", "policy=fixed,pid"], "--compare: a picture is of one run; leave --svg out"),
        (["--svg", "none/run.svg", "--seconds", "1"], "--svg: none/run.svg cannot be written: No such file"),
    ],
)
def test_what_cannot_be_used_is_refused(
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model: dict[str, Any] = {"slots": 1, "endpoints": []}
    for name, content in {
        "text": "hello",
        "empty": "",
        "tier": '{"due_s": 1, "tier": "gold"}',
        "fleet": json.dumps({"models": {"default": model}}),
        "other": json.dumps({"models": {"m": model}}),
    }.items():
        Path(name).write_text(content)
    assert main(["simulate", "--rate", "10", *SMALL, *options]) != 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
