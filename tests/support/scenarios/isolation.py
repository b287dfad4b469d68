"""U4, U6, U7: bad inputs and bad clients beside good ones, at the load that Carpool is built for. Whoever did nothing
wrong hardly notices.

Each run is compared with the same run of good inputs only, just before: the same requests at the same times.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

from support.addressed_clients import ADDRESSES, AddressedClients, Answered, Due, Summary, arrivals, by_address
from support.checker import Checker, Verdict
from support.processes import CpuShare
from support.scenarios.resilience import three_upstreams
from support.stage import Broker, Stage, Upstream, gpus, stage, watched_breakers

# What an input must contain to be answered with 500, and with 400.
POISON, INVALID = "POISON", "INVALID"
SEED = 8
BURST = 64
BAD_CLIENT, GOOD_CLIENT = ADDRESSES[0], ADDRESSES[1]
WARM_UP_S = 1.0
# A run that other programs disturbed is made again.
BEHIND_MS_MAX, IDLE_MIN, TRIES = 250, 0.1, 3

Errors = Mapping[str, Collection[int]]
# Bad inputs wait for the time of searches, and may run out of their own.
BAD_INPUTS: Errors = {POISON: {422, 502, 503, 504}, INVALID: {422, 503, 504}}
# Who was in a batch with poison and could not be told apart in time is told so.
UNRESOLVED: Errors = {**BAD_INPUTS, "": {503}}


class Run(NamedTuple):
    """One run of an open loop."""

    verdict: Verdict
    answers: list[Answered]
    calls: int
    breakers: set[str]
    dead_letters: int
    # By how much the load itself was late at most, and what of the machine's cores nobody needed.
    behind_ms: float
    idle: float

    @property
    def innocents(self) -> Summary:
        return Summary.of(answer for answer in self.answers if not answer.mark)

    @property
    def innocents_warm(self) -> Summary:
        """The same without the first second."""
        return Summary.of(answer for answer in self.answers if not answer.mark and answer.at_s >= WARM_UP_S)

    @property
    def bad(self) -> Summary:
        return Summary.of(answer for answer in self.answers if answer.mark)

    def worst_client(self, after_s: float = 0.0) -> str:
        """The one of the innocents that got the smallest share of outputs."""
        clients = by_address(answer for answer in self.answers if not answer.mark and answer.at_s >= after_s)
        address, worst = min(clients.items(), key=lambda client: (client[1].ok, -client[1].p99_ms))
        return f"{address} {worst.ok:.2%}, p99 {worst.p99_ms:.0f} ms"

    @property
    def about(self) -> str:
        breakers = "/".join(sorted(self.breakers))
        machine = f"load late by {self.behind_ms:.0f} ms at most, cores {self.idle:.0%} idle"
        return f"{self.calls} calls, breakers {breakers}, {machine}"

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs were in the way: a load that comes late comes all at once, and is another load."""
        return self.behind_ms > BEHIND_MS_MAX or self.idle < IDLE_MIN


async def run_undisturbed(
    directory: Path, flags: list[str], load: list[Due], broker: Broker = "embedded", errors: Errors = BAD_INPUTS
) -> Run:
    """A run for which the machine had time, or the last of a few."""
    for number in range(TRIES):
        async with stage(directory / str(number), flags, broker) as running:
            run = await run_on(running, load, directory.name, errors)
        if not run.is_disturbed:
            break
    return run


async def run_on(running: Stage, load: list[Due], name: str, errors: Errors = BAD_INPUTS) -> Run:
    """Send this load, and look at what becomes of it."""
    checker = Checker(name, errors)
    async with AddressedClients(running.gateway.port, checker) as clients, watched_breakers(running) as breakers:
        cores = CpuShare()
        answers = await clients.run(load)
        behind_ms, idle = clients.behind_s_max * 1000, cores.idle()
    calls, letters = await running.calls(), await running.gateway.dead_letters()
    return Run(checker.verdict(), answers, calls, breakers, letters, behind_ms, idle)


class Compared(NamedTuple):
    """A run with bad inputs, and the same without them."""

    clean: Run
    bad: Run


async def poison_at_load(directory: Path, broker: Broker, every: int, per_s: float, seconds: float) -> Compared:
    """U4: one request in `every` is poison, from any client, on four slots of 200 ms: 1,280 requests a second."""
    random = Random(SEED)
    load = [Due(at_s, random.choice(ADDRESSES)) for at_s in arrivals(per_s, seconds, random)]
    poisoned = list(load)
    for number, place in enumerate(random.sample(range(len(load)), len(load) // every)):
        poisoned[place] = Due(load[place].at_s, ADDRESSES[number % len(ADDRESSES)], POISON)
    runs = []
    for name, requests, errors in (("U4-clean", load, BAD_INPUTS), ("U4-poison", poisoned, UNRESOLVED)):
        with gpus("sim", slots=4, latency_ms=200, poison=POISON) as flags:
            runs.append(await run_undisturbed(directory / name, flags, requests, broker, errors))
    return Compared(*runs)


async def one_bad_client(directory: Path, kind: Upstream, per_s: float, seconds: float) -> Compared:
    """U6: one of ten clients sends nothing but invalid inputs, at half of what the upstream can do.

    In process four slots of 200 ms for batches of 64; over HTTP four GPUs, each with four slots of 100 ms for batches
    of 8.
    """
    random = Random(SEED)
    load = [Due(at_s, random.choice(ADDRESSES)) for at_s in arrivals(per_s, seconds, random)]
    bad = [due._replace(mark=INVALID) if due.address == BAD_CLIENT else due for due in load]
    runs = []
    for name, requests in (("U6-clean", load), ("U6-bad", bad)):
        count, slots, latency_ms, max_batch = (1, 4, 200, 64) if kind == "sim" else (4, 4, 100, 8)
        with gpus(kind, count, slots=slots, latency_ms=latency_ms, refuse=INVALID) as flags:
            flags += ["--max-batch", str(max_batch)]
            runs.append(await run_undisturbed(directory / name, flags, requests))
    clean, with_bad = runs
    # Of the clean run, too, the nine only.
    nine = [answer for answer in clean.answers if answer.address != BAD_CLIENT]
    return Compared(clean._replace(answers=nine), with_bad)


async def bursts_with_invalid(directory: Path, kind: Upstream, share: float, seconds: float) -> Run:
    """U6: 64 requests at once, of which this share is invalid, from everybody; then the next 64. One slot of 5 ms.

    To find so many takes 50 calls a burst, and the door would refuse those who cannot be told apart within the 250 ms
    of the lowest tier. Here everybody has a second.
    """
    checker = Checker("U6", BAD_INPUTS)
    random = Random(SEED)
    invalid = round(share * BURST)
    marks = [INVALID] * invalid + [""] * (BURST - invalid)
    config = directory / "carpool.toml"
    config.write_text('[[tiers]]\nname = "everybody"\ntarget_ms = 100\nwait_max_ms = 1000\n')
    with gpus(kind, latency_ms=5, refuse=INVALID) as flags:
        async with (
            stage(directory, [*flags, "--config", str(config)]) as running,
            AddressedClients(running.gateway.port, checker) as clients,
            watched_breakers(running) as breakers,
        ):
            for address in ADDRESSES:
                await clients.connect(address, BURST // len(ADDRESSES) + 1)
            cores, stop_at = CpuShare(), time.monotonic() + seconds
            while time.monotonic() < stop_at:
                random.shuffle(marks)
                asked = (clients.ask(ADDRESSES[n % len(ADDRESSES)], mark) for n, mark in enumerate(marks))
                await asyncio.gather(*asked)
            idle = cores.idle()
            calls, letters = await running.calls(), await running.gateway.dead_letters()
    return Run(checker.verdict(), clients.answers, calls, breakers, letters, 0.0, idle)


async def one_client_fails_always(directory: Path, kind: Upstream, quiet_s: float, seconds: float) -> Run:
    """U7: after a quiet time one client sends ten poisons a second, another a good input every two seconds."""
    bad = [Due(number / 10, BAD_CLIENT, POISON) for number in range(round(seconds * 10))]
    good = [Due(number * 2 + 1.0, GOOD_CLIENT) for number in range(round(seconds / 2))]
    with gpus(kind, latency_ms=50, poison=POISON) as flags:
        async with stage(directory, flags) as running:
            first = await run_on(running, [Due(0.0, GOOD_CLIENT)], "U7-first")
            assert first.innocents.ok == 1.0
            await asyncio.sleep(quiet_s)
            return await run_on(running, sorted([*bad, *good]), "U7")


class WrongModel(NamedTuple):
    """What was seen with one replica that refuses everything."""

    run: Run
    # Its share of all inputs that were sent after the first second.
    share_warm: float


async def wrong_model_on_one(directory: Path, per_s: float, seconds: float) -> WrongModel:
    """U6: one of three replicas answers everything with 400, as one with another model does."""
    random = Random(SEED)
    load = [Due(at_s, random.choice(ADDRESSES)) for at_s in arrivals(per_s, seconds, random)]
    async with three_upstreams(directory) as (gateway, upstreams):
        upstreams[0].behaviour = "status 400"
        running = asyncio.ensure_future(run_on(Stage(gateway, gateway), load, "wrong-model"))
        await asyncio.sleep(WARM_UP_S)
        before = [len(upstream.seen) for upstream in upstreams]
        run = await running
        sent = [len(upstream.seen) - early for upstream, early in zip(upstreams, before, strict=True)]
    return WrongModel(run, sent[0] / sum(sent))
