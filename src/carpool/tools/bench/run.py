"""One run from options to report."""

import asyncio
import gc
import os
import secrets
import signal
from collections.abc import Callable
from random import Random

import msgspec

from carpool.core.clock import monotonic
from carpool.tools.bench.generator import LoadGenerator, Part, Target
from carpool.tools.bench.options import BenchOptions, Segment, arrivals, even_gaps, mean_rate, poisson_gaps, turns
from carpool.tools.bench.payload import PAYLOADS, RUN_ID_DIGITS, Payload
from carpool.tools.bench.tally import Report, Tally

# How often the request that tries a face is sent again if it is refused.
FIRST_RETRIES = 5
PROGRESS_S = 5.0


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
        sending_s=generator.sending_s, intended_rate=mean_rate(options.segments), generator_busy=busy, tiers=tiers
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
            size=options.payload_bytes,
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
    gaps = even_gaps() if options.arrivals == "uniform" else poisson_gaps(Random(options.seed).random)
    generator = LoadGenerator(
        target=target,
        tally=tally,
        parts=parts,
        arrivals=arrivals(options.segments, gaps),
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
