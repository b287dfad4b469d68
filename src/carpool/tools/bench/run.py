"""One run from options to report."""

import asyncio
import gc
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from carpool.core.clock import monotonic
from carpool.tools.bench.connection import Part, Target
from carpool.tools.bench.faces import NEEDS, PAYLOADS, Face
from carpool.tools.bench.generator import LoadGenerator
from carpool.tools.bench.payload import PAYLOAD_BYTES_MIN, RUN_ID_DIGITS, Expect, Payload
from carpool.tools.bench.report import ProgressDisplay
from carpool.tools.bench.schedule import (
    BadSchedule,
    Segment,
    arrivals,
    even_gaps,
    mean_rate,
    parse_duration,
    parse_schedule,
    poisson_gaps,
    total_duration,
)
from carpool.tools.bench.tally import Report, Tally, TierTally
from carpool.tools.bench.tiers import BadTiers, TierLoad, parse_tiers, read_key, turns

Mode = Literal["sync", "task"]
KEY_VARIABLE = "CARPOOL_API_KEY"
Arrivals = Literal["poisson", "uniform"]

# How often the request that tries a face is sent again if it is refused.
FIRST_RETRIES = 5
# Descriptors that are not connections: standard streams, the loop's own, libraries, room for reconnects.
SPARE_FILES = 64
# Bounds of the number of connections when the command line does not say it.
COMMON_LATENCY_S_MAX, CONNECTIONS_MIN, CONNECTIONS_MAX = 0.5, 100, 10_000


class BadOption(ValueError):
    """An option cannot be used; the message says which and why, in one line."""


class NotVerifiable(Exception):
    """The answers of this face cannot be verified; the message says why, and what it takes."""


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send where, as the command line says it."""

    url: str
    segments: list[Segment]
    connections: int
    payload_bytes: int = 2000
    poison: str = ""
    poison_every: int = 0
    same_every: int = 0
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
    expect: Expect = "reversed"

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise BadOption("--connections must be at least 1")
        if self.payload_bytes < PAYLOAD_BYTES_MIN:
            raise BadOption(f"--payload-bytes must be at least {PAYLOAD_BYTES_MIN}")
        if self.mode == "task" and self.face != "http":
            raise BadOption(f"--mode task goes with --face http only, not with {self.face}")
        if self.face == "grpc" and find_spec("grpc") is None:
            raise BadOption("--face grpc needs grpcio: pip install 'carpool[grpc]'")


def segments_from(rate: float, duration: str, schedule: str | None) -> list[Segment]:
    """The segments that --schedule, or else --rate and --duration, ask for."""
    try:
        return parse_schedule(schedule if schedule is not None else f"{rate}:{duration}")
    except BadSchedule as fault:
        named = "--rate and --duration" if schedule is None else "--schedule"
        raise BadOption(f"{named}: {fault}") from None


def timeout_from(text: str) -> float:
    """The seconds that --timeout asks for."""
    try:
        return parse_duration(text)
    except BadSchedule as fault:
        raise BadOption(f"--timeout: {fault}") from None


def tiers_from(text: str | None) -> list[TierLoad]:
    """The tiers that --tiers asks for."""
    try:
        return [] if text is None else parse_tiers(text)
    except BadTiers as fault:
        raise BadOption(f"--tiers: {fault}") from None


def key_from(file: Path | None, environ: Mapping[str, str]) -> str:
    """The API key or token of --api-key-file, else that of the environment; "" if there is none."""
    try:
        if file is not None:
            return read_key(str(file))
        return read_key(f"env:{KEY_VARIABLE}" if environ.get(KEY_VARIABLE) else "")
    except BadTiers as fault:
        raise BadOption(f"--api-key-file: {fault}") from None


def resolve(url: str, face: Face = "http") -> Target:
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
    if face == "grpc" and parts.path.strip("/"):
        raise BadOption(f"URL {url!r} must have no path: gRPC has its own")
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
    peak = max(max(segment.rate_from, segment.rate_to) for segment in segments)
    wanted = min(max(int(peak * COMMON_LATENCY_S_MAX), CONNECTIONS_MIN), CONNECTIONS_MAX)
    return max(1, min(wanted, _files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]) - SPARE_FILES))


def _files(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


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
    live: Console | None = None,
    say: Callable[[str], None] | None = None,
    answers: list[Answered] | None = None,
) -> tuple[Report, bool]:
    """Send the load; returns the report and whether it was interrupted. ConnectionError: no server is there.

    NotVerifiable: of a face other than http, a first request was not answered as it must be; no load was sent.
    Progress goes to a live display on `live`, else line by line to `say`; with no `say` there is none.
    Into `answers`, if given, goes every request in the order in which they were due.
    """
    if options.face != "http":
        await _check_face(options, target)
    gaps = even_gaps() if options.arrivals == "uniform" else poisson_gaps(Random(options.seed).random)
    # Not from the seed: with the same inputs again, a run could be answered from a cache.
    run_id = secrets.token_hex(RUN_ID_DIGITS // 2)
    keep_record = answers is not None
    tally = Tally(keep_record=keep_record and not options.tiers)
    tiers = [TierTally(tier.name, tally, keep_record=keep_record) for tier in options.tiers]
    if tiers:
        by_tier = [
            Part(_payload(options, target, run_id, tier.key), counted)
            for tier, counted in zip(options.tiers, tiers, strict=True)
        ]
        parts = [by_tier[place] for place in turns(options.tiers, options.seed)]
    else:
        parts = [Part(_payload(options, target, run_id, options.key), tally)]
    generator = _generator(options, target, tally, parts, arrivals(options.segments, gaps))
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
        display = ProgressDisplay(generator.tally, total_duration(options.segments), live=live, say=say)
        showing = loop.create_task(_show(display, began)) if display.interval_s else None
        try:
            await generator.run()
        finally:
            if showing is not None:
                showing.cancel()
            display.close()
        busy = (_cpu_s() - busy_before_s) / max(monotonic() - began, 1e-3)
    finally:
        gc.unfreeze()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await generator.close()
    report = tally.report(
        sending_s=generator.sending_s, intended_rate=mean_rate(options.segments), generator_busy=busy, tiers=tiers
    )
    if answers is not None:
        answers += _recorded(began, tally, tiers)
    return report, interrupted


def _generator(
    options: BenchOptions, target: Target, tally: Tally, parts: list[Part], due_times: Iterator[float]
) -> LoadGenerator:
    kind = LoadGenerator
    if options.face == "grpc":
        # Here, since grpc takes its time to import.
        from carpool.tools.bench.grpc_calls import GrpcGenerator

        kind = GrpcGenerator
    return kind(
        target=target,
        tally=tally,
        parts=parts,
        arrivals=due_times,
        connections=options.connections,
        timeout_s=options.timeout_s,
        tasks=options.mode == "task",
        retries=options.retries,
    )


async def _check_face(options: BenchOptions, target: Target) -> None:
    """Send one request; raises NotVerifiable unless its answer is the expected one."""
    alone = msgspec.structs.replace(options, connections=1, retries=FIRST_RETRIES, poison="", same_every=0)
    key = next((tier.key for tier in options.tiers if tier.key), options.key)
    tally = Tally()
    payload = _payload(alone, target, secrets.token_hex(RUN_ID_DIGITS // 2), key)
    generator = _generator(alone, target, tally, [Part(payload, tally)], iter([0.0]))
    try:
        await generator.open()
        await generator.run()
    finally:
        await generator.close()
    if tally.ok:
        return
    model = "the default model" if options.model is None else f"model {options.model!r}"
    if tally.wrong:
        raise NotVerifiable(f"{model} gave another answer than expected: it takes {NEEDS[options.face]}")
    (status,) = tally.status
    because = "no such model, or it has no such face" if status in ("404", "NOT_FOUND") else "see the gateway's log"
    raise NotVerifiable(f"a first request for {model} ended with {status} ({because}); it takes {NEEDS[options.face]}")


def _payload(options: BenchOptions, target: Target, run_id: str, key: str) -> Payload:
    return PAYLOADS[options.face](
        host=target.host,
        base_path=target.base_path,
        run_id=run_id,
        size=options.payload_bytes,
        poison=options.poison,
        poison_every=options.poison_every,
        same_every=options.same_every,
        expect=options.expect,
        model=options.model,
        respond_async=options.mode == "task",
        key=key,
    )


def _recorded(began: float, tally: Tally, tiers: list[TierTally]) -> list[Answered]:
    """Every request that has ended, in the order in which they were due."""
    names: list[tuple[str, Tally]] = [("", tally), *((tier.name, tier) for tier in tiers)]
    found = [
        Answered(round(due - began, 4), name, outcome, round(latency_s * 1000, 3))
        for name, each in names
        for due, latency_s, outcome in each.record or ()
    ]
    return sorted(found, key=lambda answered: answered.due_s)


async def _show(display: ProgressDisplay, began: float) -> None:
    while True:
        await asyncio.sleep(display.interval_s)
        display.update(monotonic() - began)


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system
