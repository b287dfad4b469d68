"""One run, from its options to its report: what is sent, when requests are due, and the load of each tier.

1. Arrivals are made on a scale where one arrival is expected per unit, so the gaps do not depend on the rate, and
   mapped back to seconds through the rate of their step: a pause between two steps holds none.
2. An API key is never on the command line, where `ps` shows it: it is in a file, or in the environment.
"""

import asyncio
import gc
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from math import log
from pathlib import Path
from random import Random
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from carpool.core.clock import monotonic
from carpool.tools.bench.generator import LoadGenerator, Part, Target
from carpool.tools.bench.payload import PAYLOAD_BYTES_MIN, PAYLOADS, RUN_ID_DIGITS, Face, Payload
from carpool.tools.bench.tally import SHARE_MAX, Arrivals, Report, Segment, SentLoad, Tally

Mode = Literal["sync", "task"]
KEY_VARIABLE = "CARPOOL_API_KEY"
# Descriptors that are not connections: standard streams, the loop's own, libraries, room for reconnects.
SPARE_FILES = 64
# Bounds of the number of connections when the command line does not say it.
COMMON_LATENCY_S_MAX, CONNECTIONS_MIN, CONNECTIONS_MAX = 0.5, 100, 10_000
FROM_ENVIRONMENT = "env:"
# Turns in which requests of the tiers come: shares are exact to a thousandth.
TURNS = 1000
DURATION_UNITS_S = (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0))
# How often the request that tries a face is sent again if it is refused.
FIRST_RETRIES = 5
PROGRESS_S = 5.0


class BadOption(ValueError):
    """An option cannot be used; the message says which and why, in one line, and shows no key."""


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `10s`, `2m`, `1h` or a plain number of seconds."""
    number, unit_s = text.strip(), 1.0
    for suffix, seconds in DURATION_UNITS_S:
        if number.endswith(suffix):
            number, unit_s = number.removesuffix(suffix), seconds
            break
    duration_s = parse_number(number, f"{text!r} is not a time such as 500ms, 10s or 2m") * unit_s
    if duration_s <= 0:
        raise BadOption(f"{text!r} is not a time above 0")
    return duration_s


def parse_schedule(text: str) -> list[Segment]:
    """The segments of a schedule in the syntax of --schedule."""
    segments = [_parse_part(part.strip()) for part in text.split(",")]
    if not any(segment.expected for segment in segments):
        raise BadOption(f"{text!r} never sends anything: every rate is 0")
    return segments


def _parse_part(part: str) -> Segment:
    text, colon, time = part.partition(":")
    if not colon:
        raise BadOption(f"{part!r} is not RATE:TIME")
    rate = parse_number(text, f"{text!r} is not a rate in requests per second")
    if rate < 0:
        raise BadOption(f"{text!r} is a rate below 0")
    return Segment(rate, parse_duration(time))


def parse_number(text: str, complaint: str) -> float:
    """A finite number; raises BadOption with this complaint."""
    try:
        number = float(text)
    except ValueError:
        raise BadOption(complaint) from None
    if not abs(number) < float("inf"):  # also refuses NaN
        raise BadOption(complaint)
    return number


def poisson_gaps(uniform: Callable[[], float]) -> Iterator[float]:
    """Endless exponential gaps of mean 1, from `uniform` numbers in [0, 1)."""
    while True:
        yield -log(1.0 - uniform())


def gaps_of(kind: Arrivals, seed: int) -> Iterator[float]:
    """Those of random arrivals, or of even ones."""
    return even_gaps() if kind == "uniform" else poisson_gaps(Random(seed).random)


def even_gaps() -> Iterator[float]:
    """Endless gaps of exactly 1, the first half as long so that rounding cannot add an arrival at the end."""
    return chain((0.5,), repeat(1.0))


def arrivals(segments: Sequence[Segment], gaps: Iterator[float]) -> Iterator[float]:
    """Arrival times in seconds after the start, ascending, one for each gap until the segments end."""
    begun_s = 0.0
    # Arrivals expected between the start of this segment and the next arrival.
    ahead = next(gaps)
    for segment in segments:
        while ahead < segment.expected:
            yield begun_s + ahead / segment.rate
            ahead += next(gaps)
        ahead -= segment.expected
        begun_s += segment.duration_s


def mean_rate(segments: Sequence[Segment]) -> float:
    """Requests per second over the whole schedule."""
    return sum(segment.expected for segment in segments) / sum(segment.duration_s for segment in segments)


class TierLoad(msgspec.Struct, frozen=True):
    """One tier of the load."""

    name: str
    share: float
    key: str

    def __repr__(self) -> str:
        """Without the key."""
        return f"TierLoad({self.name!r}, {self.share:g})"


def parse_tiers(text: str, *, with_keys: bool = True) -> list[TierLoad]:
    """The tiers in the syntax of --tiers, with their keys; those of a simulation have none, and are NAME=SHARE."""
    tiers = [_parse_tier(part.strip(), with_keys) for part in text.split(",")]
    if len({tier.name for tier in tiers}) < len(tiers):
        raise BadOption("a tier is named twice")
    return tiers


def _parse_tier(part: str, with_keys: bool) -> TierLoad:
    name, equals, rest = part.partition("=")
    source, colon, share_text = rest.rpartition(":")
    if not name or not equals or bool(colon) != with_keys:
        raise BadOption(f"{part!r} is not {'NAME=KEYFILE:SHARE' if with_keys else 'NAME=SHARE'}")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not 0 < share <= SHARE_MAX:
        raise BadOption(f"{share_text!r} is not a share above 0 and up to {SHARE_MAX:,.0f}")
    return TierLoad(name, share, read_key(source))


def read_key(source: str) -> str:
    """The key in a file, or behind `env:` in a variable; "" without a source."""
    if not source:
        return ""
    if source.startswith(FROM_ENVIRONMENT):
        variable = source.removeprefix(FROM_ENVIRONMENT)
        key = os.environ.get(variable, "")
        where = f"environment variable {variable!r}"
    else:
        where = f"file {source!r}"
        try:
            key = Path(source).read_text().strip()
        except (OSError, UnicodeDecodeError) as fault:
            raise BadOption(f"{where} cannot be read: {getattr(fault, 'strerror', 'not text')}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadOption(f"{where} has no key in it")
    return key


def turns(tiers: Sequence[TierLoad], seed: int) -> list[int]:
    """Whose turn it is: places in `tiers`, each as often as its share says, in an order without a pattern."""
    total = sum(tier.share for tier in tiers)
    order: list[int] = []
    share = 0.0
    for place, tier in enumerate(tiers):
        share += tier.share / total
        order += [place] * (round(share * TURNS) - len(order))
    Random(seed).shuffle(order)
    return order


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send where, as the command line says it."""

    url: str
    segments: list[Segment]
    connections: int
    payload_bytes: int = 2000
    # Sizes of inputs, which requests take in turn; without any, each has `payload_bytes`. And how they were drawn.
    sizes: list[int] = []
    drawn: str = "fixed"
    poison: str = ""
    poison_every: int = 0
    face: Face = "http"
    mode: Mode = "sync"
    arrivals: Arrivals = "poisson"
    seed: int = 0
    model: str | None = None
    timeout_s: float = 10.0
    # Without any, all requests are of one kind, and carry this key, if there is one.
    tiers: list[TierLoad] = []
    key: str = ""
    # How often a refused request is sent again.
    retries: int = 0

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise BadOption("--connections must be at least 1")
        if self.payload_bytes < PAYLOAD_BYTES_MIN:
            raise BadOption(f"--payload-bytes must be at least {PAYLOAD_BYTES_MIN}")
        if self.mode == "task" and self.face != "http":
            raise BadOption(f"--mode task goes with --face http only, not with {self.face}")


@contextmanager
def option(name: str) -> Iterator[None]:
    """Have a BadOption say of which option it is."""
    try:
        yield
    except BadOption as fault:
        raise BadOption(f"{name}: {fault}") from None


def segments_from(rate: float, duration: str, schedule: str | None) -> list[Segment]:
    """The segments that --schedule, or else --rate and --duration, ask for."""
    with option("--rate and --duration" if schedule is None else "--schedule"):
        return parse_schedule(schedule if schedule is not None else f"{rate}:{duration}")


def key_from(file: Path | None, environ: Mapping[str, str]) -> str:
    """The API key or token of --api-key-file, else that of the environment; "" if there is none."""
    with option("--api-key-file"):
        if file is not None:
            return read_key(str(file))
        return read_key(f"env:{KEY_VARIABLE}" if environ.get(KEY_VARIABLE) else "")


def resolve(url: str) -> Target:
    """Look the base URL's host up, once for all connections."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as fault:
        raise BadOption(f"URL {url!r}: {fault}") from None
    if parts.scheme != "http" or not host:
        raise BadOption(f"URL {url!r} must look like http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username:
        raise BadOption(f"URL {url!r} must be a base URL: no user, query or fragment")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as fault:
        raise BadOption(f"URL {url!r}: {fault.strerror}") from None
    return Target(address=str(found[0][4][0]), port=port, host=parts.netloc, base_path=parts.path.rstrip("/"))


def raise_file_limit(connections: int) -> None:
    """Let this process have as many open files as the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    if needed > _files(hard):
        raise BadOption(f"--connections {connections} needs {needed} open files, the limit is {hard}")
    if needed > _files(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def default_connections(segments: list[Segment]) -> int:
    """Enough for answers that take half a second at the highest rate, within the file limit."""
    peak = max((segment.rate for segment in segments), default=0.0)
    wanted = min(max(int(peak * COMMON_LATENCY_S_MAX), CONNECTIONS_MIN), CONNECTIONS_MAX)
    return max(1, min(wanted, _files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]) - SPARE_FILES))


def _files(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


class NotVerifiable(Exception):
    """The answers of this face cannot be verified; the message says why, and what it takes."""


class Answered(msgspec.Struct, frozen=True):
    """What became of one request, for `--answers`."""

    # Seconds after the start; of a request that was sent again and refused again, the last time.
    due_s: float
    tier: str
    # 200, another status, or what went wrong.
    outcome: str
    latency_ms: float


async def drive(
    options: BenchOptions,
    target: Target,
    *,
    say: Callable[[str], None] | None = None,
    answers: list[Answered] | None = None,
) -> tuple[Report, bool]:
    """Send the load; returns the report and whether it was interrupted. ConnectionError: no server is there.

    NotVerifiable: of a face other than http, a first request was not answered as it must be; no load was sent.
    Progress goes to `say`, a line now and then. Into `answers`, if given, goes every request in the order in which
    they were due.
    """
    if options.face != "http":
        await _check_face(options, target)
    generator, tiers = make_load(options, target, keep_record=answers is not None)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        generator.stop()

    loop = asyncio.get_running_loop()
    try:
        await generator.open()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        # What exists now stays to the end; frozen, it is not walked by a collection, which would stall every
        # request for milliseconds. Collections go on (reconnects make cycles) but find next to nothing.
        gc.collect()
        gc.freeze()
        began, busy_before_s = monotonic(), _cpu_s()
        showing = None if say is None else loop.create_task(_tell_progress(generator.tally, say))
        try:
            await generator.run()
        finally:
            if showing is not None:
                showing.cancel()
        busy = (_cpu_s() - busy_before_s) / max(monotonic() - began, 1e-3)
    finally:
        gc.unfreeze()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await generator.close()
    report = generator.tally.report(
        sending_s=generator.sending_s,
        intended_rate=mean_rate(options.segments),
        generator_busy=busy,
        tiers=tiers,
        sizes=options.sizes,
        load=SentLoad(
            segments=options.segments,
            arrivals=options.arrivals,
            seed=options.seed,
            payload_bytes=options.payload_bytes,
            sizes=options.drawn,
            tiers={tier.name: tier.share for tier in options.tiers},
        ),
    )
    if answers is not None:
        answers += _recorded(began, [generator.tally, *tiers])
    return report, interrupted


def make_load(options: BenchOptions, target: Target, *, keep_record: bool = False) -> tuple[LoadGenerator, list[Tally]]:
    """What sends the load, and the counts of each tier."""
    # Not from the seed: with the same inputs again, a run could be answered from a cache.
    run_id = secrets.token_hex(RUN_ID_DIGITS // 2)

    def payload(key: str) -> Payload:
        return PAYLOADS[options.face](
            host=target.host,
            base_path=target.base_path,
            run_id=run_id,
            sizes=options.sizes or [options.payload_bytes],
            poison=options.poison,
            poison_every=options.poison_every,
            model=options.model,
            respond_async=options.mode == "task",
            key=key,
        )

    tally = Tally(keep_record=keep_record and not options.tiers)
    tiers = [Tally(tier.name, tally, keep_record=keep_record) for tier in options.tiers]
    parts = [Part(payload(options.key), tally)]
    if tiers:
        by_tier = [Part(payload(tier.key), counted) for tier, counted in zip(options.tiers, tiers, strict=True)]
        parts = [by_tier[place] for place in turns(options.tiers, options.seed)]
    generator = LoadGenerator(
        target=target,
        tally=tally,
        parts=parts,
        arrivals=arrivals(options.segments, gaps_of(options.arrivals, options.seed)),
        connections=options.connections,
        timeout_s=options.timeout_s,
        tasks=options.mode == "task",
        retries=options.retries,
    )
    return generator, tiers


async def _check_face(options: BenchOptions, target: Target) -> None:
    """Send one request; raises NotVerifiable unless its answer is the expected one."""
    alone = msgspec.structs.replace(
        options,
        segments=[Segment(1000.0, 0.001)],
        arrivals="uniform",
        connections=1,
        retries=FIRST_RETRIES,
        poison="",
        tiers=[],
        key=next((tier.key for tier in options.tiers if tier.key), options.key),
    )
    generator, _ = make_load(alone, target)
    try:
        await generator.open()
        await generator.run()
    finally:
        await generator.close()
    tally = generator.tally
    if tally.ok:
        return
    model = "the default model" if options.model is None else f"model {options.model!r}"
    needs = "it takes a model that embeds as `carpool sim-gpu --dimensions N` does, or `sim:?dimensions=N`"
    if tally.wrong:
        raise NotVerifiable(f"{model} gave another answer than expected: {needs}")
    (status,) = tally.status
    because = "no such model, or it has no such face" if status == "404" else "see the gateway's log"
    raise NotVerifiable(f"a first request for {model} ended with {status} ({because}); {needs}")


def _recorded(began: float, tallies: list[Tally]) -> list[Answered]:
    """Every request that has ended, in the order in which they were due."""
    found = [
        Answered(round(due - began, 4), tally.name, outcome, round(latency_s * 1000, 3))
        for tally in tallies
        for due, latency_s, outcome in tally.record or ()
    ]
    return sorted(found, key=lambda answered: answered.due_s)


def progress_text(tally: Tally, rate: float) -> str:
    """One line on the run so far; `rate` is of late, the rest since the start."""
    p50, p99 = tally.latency.percentile(0.5), tally.latency.percentile(0.99)
    latency = "-" if p50 is None or p99 is None else f"p50 {p50:.1f} ms  p99 {p99:.1f} ms"
    return (
        f"{rate:,.0f}/s  ok {tally.ok:,}  errors {tally.errors + tally.unasked:,}  wrong {tally.wrong:,}  "
        f"in flight {tally.in_flight:,}  {latency}"
    )


async def _tell_progress(tally: Tally, say: Callable[[str], None]) -> None:
    began, before = monotonic(), 0
    while True:
        await asyncio.sleep(PROGRESS_S)
        answered = tally.ok + tally.wrong
        say(f"{monotonic() - began:.0f} s  {progress_text(tally, (answered - before) / PROGRESS_S)}")
        before = answered


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system
