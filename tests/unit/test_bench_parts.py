"""The parts of `carpool bench`: schedules, tiers, payloads, heads of answers, and counts."""

import base64
import os
from array import array
from collections import Counter
from io import StringIO
from math import ceil, exp, inf, log, nan
from pathlib import Path
from random import Random
from statistics import mean, median, stdev
from typing import Any

import msgspec
import pytest
from rich.console import Console

from carpool.cli.bench import print_report
from carpool.tools.bench.generator import RETRY_AFTER_S, BadResponse, read_head, retry_after_s
from carpool.tools.bench.payload import NOT_TOLD, PAYLOAD_BYTES_MIN, EmbeddingsPayload, Payload
from carpool.tools.bench.run import (
    TURNS,
    BadOption,
    BenchOptions,
    TierLoad,
    arrivals,
    even_gaps,
    key_from,
    mean_rate,
    parse_duration,
    parse_schedule,
    parse_tiers,
    progress_text,
    turns,
)
from carpool.tools.bench.sizes import parse_sizes
from carpool.tools.bench.tally import InputBytes, LogHistogram, Report, Segment, Tally, input_bytes
from carpool.upstream.simulated import read_call, vectors_json

# Schedule


@pytest.mark.parametrize("text", ["", "s", "ten", "-1s", "0s", "nan", "inf", "1d"])
def test_a_bad_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadOption, match="is not a time"):
        parse_duration(text)


def test_steps_follow_one_another() -> None:
    assert parse_schedule("1000:10s, 5000:500ms,1000:2m") == [
        Segment(1000, 10),
        Segment(5000, 0.5),
        Segment(1000, 120),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "1000", "1000:", "fast:10s", "ramp:1-2:30s", "1:1s:1s", "-5:10s", "1:1s,,1:1s", "0:5s"],
)
def test_a_bad_schedule_is_refused(text: str) -> None:
    with pytest.raises(BadOption):
        parse_schedule(text)


def test_a_pause_between_steps_holds_no_arrival() -> None:
    times = list(arrivals(parse_schedule("10:1s,0:5s,10:1s"), even_gaps()))
    assert len(times) == 20
    assert not [time for time in times if 1 < time < 6]


def test_the_mean_rate_is_over_the_whole() -> None:
    assert mean_rate(parse_schedule("100:1s,300:3s")) == pytest.approx(250)


# Tiers


def test_tiers_have_keys_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a:b.key"
    file.write_text("cp_first\n")
    monkeypatch.setenv("SECOND_KEY", "cp_second")
    tiers = parse_tiers(f"enterprise={file}:5, paid=env:SECOND_KEY:25.5,free=:70")
    assert tiers == [
        TierLoad("enterprise", 5, "cp_first"),
        TierLoad("paid", 25.5, "cp_second"),
        TierLoad("free", 70, ""),
    ]
    assert "cp_" not in repr(tiers)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not NAME=KEYFILE:SHARE"),
        ("free=70", "is not NAME=KEYFILE:SHARE"),
        ("=:70", "is not NAME=KEYFILE:SHARE"),
        ("free=:none", "is not a share"),
        ("free=:0", "is not a share"),
        ("free=:inf", "is not a share"),
        ("free=:1,free=:2", "twice"),
        ("free=no-such-file:1", "cannot be read: No such file"),
        ("free=env:NO_SUCH_VARIABLE:1", "has no key in it"),
    ],
)
def test_bad_tiers_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadOption, match=complaint):
        parse_tiers(text)


def test_tiers_of_a_simulation_have_no_keys() -> None:
    assert parse_tiers("paid=30, free=70", with_keys=False) == [TierLoad("paid", 30, ""), TierLoad("free", 70, "")]
    with pytest.raises(BadOption, match="is not NAME=SHARE"):
        parse_tiers("free=env:KEY:70", with_keys=False)


def test_a_file_that_is_no_key_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("two words")
    with pytest.raises(BadOption) as refused:
        parse_tiers(f"free={file}:1")
    assert "two words" not in str(refused.value)


def test_each_has_its_share_of_the_turns() -> None:
    tiers = parse_tiers("a=:5,b=:25,c=:70")
    order = turns(tiers, seed=1)
    assert Counter(order) == {0: 50, 1: 250, 2: 700}
    assert order == turns(tiers, seed=1) != turns(tiers, seed=2)
    # Shares that are no whole turns are rounded, and all turns are given.
    assert len(turns(parse_tiers("a=:1,b=:1,c=:1"), seed=0)) == TURNS


# Sizes


def test_lognormal_sizes_are_as_asked_and_of_the_seed() -> None:
    sizes = parse_sizes("lognormal:240,0.9", seed=1)
    assert sizes == parse_sizes("lognormal:240,0.9", seed=1) != parse_sizes("lognormal:240,0.9", seed=2)
    assert median(sizes) == pytest.approx(240, rel=0.02)
    assert stdev(map(log, sizes)) == pytest.approx(0.9, rel=0.03)
    assert mean(sizes) == pytest.approx(240 * exp(0.9**2 / 2), rel=0.03)
    # At either end they are cut, not drawn again.
    assert (min(sizes), max(sizes)) == (PAYLOAD_BYTES_MIN, 16 * 240)
    cut = parse_sizes("lognormal:240,0.9,512", seed=1)
    assert cut == [min(size, 512) for size in sizes]
    assert parse_sizes("fixed", seed=1) == []
    assert set(parse_sizes("lognormal:50,0", seed=1)) <= {49, 50}  # a logarithm back and forth may be a hair less


def test_sizes_of_a_file_are_drawn_by_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "sizes"
    file.write_bytes(b"22\r\n 300 \n\n300\n16777216")
    sizes = parse_sizes(str(file), seed=1)
    assert sizes == parse_sizes(str(file), seed=1) != parse_sizes(str(file), seed=2)
    counts = Counter(sizes)
    assert set(counts) == {22, 300, 16777216}
    assert counts[300] / len(sizes) == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not fixed, not lognormal:"),
        ("lognormal", "no file to read: No such file"),
        ("/", "no file to read: Is a directory"),
        ("lognormal:", "is not lognormal:MEDIAN,SIGMA"),
        ("lognormal:240", "is not lognormal:MEDIAN,SIGMA"),
        ("lognormal:240,0.9,1000,1", "is not lognormal:MEDIAN,SIGMA"),
        ("lognormal:240,nan", "is not lognormal:MEDIAN,SIGMA"),
        ("lognormal:21,0.9", "MEDIAN must be at least 22"),
        ("lognormal:240,0.9,239", "MAX from MEDIAN to"),
        ("lognormal:240,0.9,1e9", "MAX from MEDIAN to 16777216"),
        ("lognormal:1e9,0.9", "MAX from MEDIAN to 16777216"),
        ("lognormal:240,-1", "SIGMA must be from 0 to 10"),
        ("lognormal:240,11", "SIGMA must be from 0 to 10"),
        ("/dev/zero", "is over 8388608 bytes"),
        ("/dev/null", "has no sizes in it"),
    ],
)
def test_bad_sizes_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadOption, match=complaint):
        parse_sizes(text, 0)


@pytest.mark.parametrize("line", [b"21", b"16777217", b"many", b"1e3", b"-30", b"1_000", b"9" * 5000, b"\xff"])
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "sizes"
    file.write_bytes(b"22\n\n%b\n" % line)
    with pytest.raises(BadOption, match="line 3: not a size from 22 to 16777216 bytes"):
        parse_sizes(str(file), 0)


def test_the_report_tells_the_sizes_that_were_sent() -> None:
    tally = Tally()
    assert report_of(tally).input_bytes is None
    tally.sent = 3
    sizes = [9000, 30, 20, 40, 8000]
    report = tally.report(sending_s=1.0, intended_rate=3.0, generator_busy=0.1, sizes=sizes)
    assert report.input_bytes == InputBytes(30.0, 40, 40)
    assert input_bytes(sizes, 1000) == InputBytes(3418.0, 9000, 9000)
    assert input_bytes([*range(1, 201)], 200) == InputBytes(100.5, 198, 200)
    out = StringIO()
    print_report(report, Console(file=out, width=100))
    assert "mean 30.0  p99 40  max 40" in out.getvalue()


# Payload


NUMBER = b"0000002a"
METADATA = b'"metadata":{"latency_ms":9.5,"queue_ms":1.25,"upstream_ms":8,"batch_size":64,"model":"m","cached":false}'


def make(size: int = 100, **more: Any) -> Payload:
    return Payload(host="gateway:80", base_path="/base", run_id="abcdef012345", sizes=[size], **more)


def sent_body(payload: Payload) -> dict[str, Any]:
    head, _, body = payload.request(NUMBER).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    decoded: dict[str, Any] = msgspec.json.decode(body)
    return decoded


def answer(output: str, *, metadata: bytes = METADATA) -> bytes:
    return b'{"request_id":"r","output":%b,%b}' % (msgspec.json.encode(output), metadata)


def test_path_model_and_preference_are_in_the_request() -> None:
    payload = make(model='say "hi"', respond_async=True)
    assert payload.request(NUMBER).startswith(b"POST /base/v1/inference HTTP/1.1\r\nHost: gateway:80\r\n")
    assert b"\r\nPrefer: respond-async\r\n" in payload.request(NUMBER)
    assert sent_body(payload)["model"] == 'say "hi"'
    assert b"Prefer" not in make().request(NUMBER)
    assert "model" not in sent_body(make())


@pytest.mark.parametrize("size", [PAYLOAD_BYTES_MIN, 2000])
def test_only_the_expected_output_is_right(size: int) -> None:
    payload = make(size)
    text = sent_body(payload)["input"]
    right = text[::-1]
    assert payload.expected_output(NUMBER) == right
    prefix = b"HTTP/1.1 200 OK\r\n\r\n"
    assert payload.verify(prefix + answer(right), len(prefix), NUMBER) == (1.25, 64)
    wrong = [text, right[:-1], right[1:], right + "x", "x" + right, "", right.swapcase()]
    for output in wrong:
        assert payload.verify(answer(output), 0, NUMBER) is None
    # The output of another request differs in nothing but its nonce.
    assert payload.verify(answer(right), 0, b"0000002b") is None


def test_each_request_has_the_size_of_its_turn() -> None:
    sizes = [22, 5000, 23, 100]
    payload = Payload(host="gateway:80", base_path="", run_id="abcdef012345", sizes=sizes)
    other = make_embeddings(sizes=sizes)
    outputs = set[str]()
    for number in range(1, 9):
        named = b"%08x" % number
        head, _, body = payload.request(named).partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(body) in head
        text = msgspec.json.decode(body)["input"]
        assert len(msgspec.json.encode(text)) == sizes[number % 4]
        assert payload.verify(answer(text[::-1]), 0, named) == (1.25, 64)
        # The answer of a request of another size is wrong, and so is one that is too long or too short.
        for wrong in (*outputs, text[::-1] + "a", "b" + text[::-1], text[::-1][1:]):
            assert payload.verify(answer(wrong), 0, named) is None
        outputs.add(text[::-1])
        assert other.verify(embeddings(sent(other, named)[1]["input"], 8), 0, named) == NOT_TOLD
    assert len(outputs) == 8


def test_poison_goes_where_it_has_room() -> None:
    payload = Payload(
        host="", base_path="", run_id="abcdef012345", sizes=[22, 100, 27, 28], poison="POISON", poison_every=1
    )
    texts = [msgspec.json.decode(payload.request(b"%08x" % n).partition(b"\r\n\r\n")[2])["input"] for n in range(4)]
    assert [len(text) for text in texts] == [20, 98, 25, 26]
    assert ["POISON" in text for text in texts] == [False, True, False, True]
    assert payload.verify(answer(texts[2][::-1]), 0, b"00000002") is not None


def test_the_same_answer_in_other_bytes_is_right_too() -> None:
    payload = make()
    value = {
        "metadata": {"batch_size": 3, "queue_ms": 2},
        "output": payload.expected_output(NUMBER),
        "more": [1],
    }
    spaced = msgspec.json.format(msgspec.json.encode(value))
    assert payload.verify(spaced, 0, NUMBER) == (2.0, 3)


@pytest.mark.parametrize(
    ("metadata", "journey"),
    [
        (b'"metadata":{"latency_ms":4}', NOT_TOLD),
        (b'"metadata":{"queue_ms":0,"batch_size":5}', (0.0, 5)),
        (b'"metadata":{"queue_ms":null,"batch_size":null,"cached":true}', NOT_TOLD),
        (b'"metadata":null', NOT_TOLD),
        (b'"latency_ms":4', NOT_TOLD),
    ],
)
def test_metadata_that_tells_less_is_no_fault(metadata: bytes, journey: tuple[float, int]) -> None:
    payload = make()
    assert payload.verify(answer(payload.expected_output(NUMBER), metadata=metadata), 0, NUMBER) == journey


@pytest.mark.parametrize("body", [b"", b"{}", b"not json", b'{"output":null}', b'{"output":{"a":1}}', b"[1]"])
def test_a_body_with_no_such_output_is_wrong(body: bytes) -> None:
    assert make().verify(body, 0, NUMBER) is None


def test_a_right_output_in_a_broken_body_is_wrong() -> None:
    payload = make()
    assert payload.verify(answer(payload.expected_output(NUMBER))[:-1], 0, NUMBER) is None


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("cp_of_the_file\n")
    monkeypatch.setenv("CARPOOL_API_KEY", "cp_other")
    assert key_from(file, os.environ) == "cp_of_the_file"
    assert key_from(None, os.environ) == "cp_other"
    assert key_from(None, {}) == ""
    assert make(key="cp_x").credential == "Authorization: Bearer cp_x\r\n"
    for content in ("", "two words", "cp_x\r\nHost: evil"):
        file.write_text(content)
        with pytest.raises(BadOption):
            key_from(file, os.environ)
    with pytest.raises(BadOption):
        key_from(tmp_path, os.environ)


# Embeddings


OTHER = b"0000002b"


def make_embeddings(**more: Any) -> EmbeddingsPayload:
    given = {"host": "gateway:80", "base_path": "/base", "run_id": "abcdef012345", "sizes": [100], **more}
    return EmbeddingsPayload(**given)


def sent(payload: EmbeddingsPayload, number: bytes = NUMBER) -> tuple[str, dict[str, Any]]:
    head, _, body = payload.request(number).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    return head.decode().split(" ")[1], msgspec.json.decode(body)


def embeddings(text: str, dimensions: int) -> bytes:
    batch = read_call(msgspec.json.encode({"inputs": [text]}))
    ((vector,),) = msgspec.json.decode(vectors_json(batch, 1, dimensions)).values()
    packed = base64.b64encode(array("f", vector).tobytes()).decode()
    return msgspec.json.encode({"object": "list", "data": [{"index": 0, "embedding": packed}]})


def test_embeddings() -> None:
    payload = make_embeddings(model="e5")
    path, body = sent(payload)
    text = body.pop("input")
    assert (path, body) == ("/base/v1/embeddings", {"encoding_format": "base64", "model": "e5"})
    assert len(text) == 98 and "model" not in sent(make_embeddings())[1]
    right = embeddings(text, 384)
    assert payload.verify(b"head" + right, 4, NUMBER) == NOT_TOLD
    assert payload.verify(right, 0, OTHER) is None
    # Of a vector every number counts, and all have as many.
    assert payload.verify(embeddings(text, 383), 0, NUMBER) is None
    assert make_embeddings().verify(embeddings(text, 383), 0, NUMBER) == NOT_TOLD
    vector = array("f", base64.b64decode(msgspec.json.decode(right)["data"][0]["embedding"]))
    vector[200] += 0.5
    changed = {"embedding": base64.b64encode(vector.tobytes()).decode()}
    for data in ([changed], [], [{"embedding": ""}], [{"embedding": "?"}], [{"embedding": "AAAAAAA="}], [changed] * 2):
        assert make_embeddings().verify(msgspec.json.encode({"data": data}), 0, NUMBER) is None
    assert payload.verify(b"<html>", 0, NUMBER) is None


def test_what_does_not_go_together() -> None:
    with pytest.raises(BadOption, match="--mode task goes with --face http only"):
        BenchOptions(url="", segments=[], connections=1, face="openai", mode="task")


# Response


@pytest.mark.parametrize(
    ("head", "read"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12", (200, 12, True)),
        (b"HTTP/1.1 503 Busy\r\nX: y\r\ncontent-length:7\r\nRetry-After: 1", (503, 7, True)),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0", (200, 0, False)),
        (b"HTTP/1.1 200 OK\r\nconnection:Close\r\nContent-Length: 0", (200, 0, False)),
        (b"HTTP/1.1 204 No Content", (204, 0, True)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3", (200, 3, False)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\nConnection: Keep-Alive", (200, 3, True)),
        (b"HTTP/1.1 200\r\nContent-Length: 3", (200, 3, True)),
    ],
)
def test_a_head_tells_status_length_and_whether_to_stay(head: bytes, read: tuple[int, int, bool]) -> None:
    assert read_head(head) == read


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"", "malformed"),
        (b"HTTP/2 200 OK\r\nContent-Length: 1", "malformed"),
        (b"HTTP/1.1 abc\r\nContent-Length: 1", "malformed"),
        (b"HTTP/1.1 200 OK", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1x", "malformed"),
        (b"HTTP/1.1 100 Continue\r\nContent-Length: 0", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "chunked"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5", "chunked"),
    ],
)
def test_a_head_that_cannot_be_used_has_a_kind(head: bytes, kind: str) -> None:
    with pytest.raises(BadResponse) as caught:
        read_head(head)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("line", "seconds"),
    [(b"Retry-After: 7", 7), (b"RETRY-AFTER:0", 0), (b"Retry-After: soon", RETRY_AFTER_S), (b"Age: 7", RETRY_AFTER_S)],
)
def test_when_to_ask_again(line: bytes, seconds: float) -> None:
    assert retry_after_s(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n" + line) == seconds


# Tally


def report_of(tally: Tally, sending_s: float = 10.0) -> Report:
    return tally.report(sending_s=sending_s, intended_rate=100.0, generator_busy=0.25)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_percentiles_are_within_half_a_percent(share: float) -> None:
    random = Random(7)
    values = sorted(10 ** random.uniform(-2.9, 6) for _ in range(5000))
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    exact = values[max(1, ceil(share * len(values))) - 1]
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.0051)


def test_values_out_of_range_are_counted_and_break_nothing() -> None:
    histogram = LogHistogram()
    for value in (0.0, 0.0005, -1.0, nan, 1e300, inf):
        histogram.add(value)
    assert histogram.count == sum(histogram.counts) == 6
    assert histogram.percentile(0.5) == 0.0


def test_answers_nobody_asked_for_are_errors_but_settle_no_request() -> None:
    tally = Tally()
    tally.sent = 1
    tally.unasked = 2
    assert tally.in_flight == 1
    assert report_of(tally).errors == 2
    assert report_of(tally).status == {"unasked": 2}


def test_the_batch_mean_is_over_batches_not_over_requests() -> None:
    tally = Tally()
    for size in (1, 3, 3, 3):  # one batch of one, one of three
        tally.right(0.01, 1.0, -1.0, size)
    assert report_of(tally).batch_mean == 2.0
    assert report_of(tally).queue_ms.p50 is None


def test_the_table_shows_failures_and_unknowns() -> None:
    tally = Tally()
    tally.sent = 1234
    tally.failed("503", 0.002, 1.0)
    out = StringIO()
    print_report(report_of(tally), Console(file=out, width=100))
    shown = out.getvalue()
    assert "1,234" in shown
    assert "503: 1" in shown
    assert "1,233" in shown  # unanswered
    assert "whole core" not in shown


def test_a_generator_at_its_limit_says_so() -> None:
    out = StringIO()
    print_report(Tally().report(sending_s=1, intended_rate=1, generator_busy=0.97), Console(file=out, width=100))
    assert "whole core" in out.getvalue()


def test_progress_tells_the_rate_of_late_and_the_counts_so_far() -> None:
    tally = Tally()
    tally.sent = 30
    for _ in range(20):
        tally.right(0.01, 1.0, -1.0, 0)
    tally.failed("503", 0.002, 1.0)
    line = progress_text(tally, 7.0)
    assert line.startswith("7/s  ok 20  errors 1  wrong 0  in flight 9  p50")
    assert "p99 10.0 ms" in line


def test_a_tier_counts_here_and_in_the_whole() -> None:
    whole = Tally()
    free, paid = Tally("free", whole), Tally("paid", whole, keep_record=True)
    for tier, times in ((free, 6), (paid, 3)):
        for _ in range(times):
            tier.came_due()
    free.right(0.1, 1.0, -1.0, 0)
    for kind in ("503", "429", "504", "closed"):
        free.failed(kind, 0.002, 1.0)
    free.retried(0.004)
    paid.right(0.2, 1.0, -1.0, 0)
    paid.mismatched(0.3, 1.0)
    paid.failed("timeout", 4.0, 5.0)
    report = whole.report(sending_s=2.0, intended_rate=4.5, generator_busy=0.1, tiers=(free, paid))
    assert (report.sent, report.ok, report.wrong, report.errors, report.unanswered) == (9, 2, 1, 5, 1)
    seen = report.tiers["free"]
    assert (seen.offered, seen.ok, seen.shed, seen.limited, seen.timed_out, seen.failed) == (6, 1, 1, 1, 1, 1)
    assert (seen.unanswered, seen.retries, seen.goodput) == (1, 1, 0.5)
    assert seen.latency_ms.p95 == pytest.approx(100)
    assert seen.refusal_ms.p99 == report.refusal_ms.p99 == pytest.approx(4.0)
    assert (report.tiers["paid"].wrong, report.tiers["paid"].timed_out) == (1, 1)
    assert report.retries == 1
    assert paid.record == [(0.8, 0.2, "200"), (0.7, 0.3, "200"), (1.0, 4.0, "timeout")]
    out = StringIO()
    print_report(report, Console(file=out, width=160))
    assert "timed out" in out.getvalue() and "paid" in out.getvalue()
