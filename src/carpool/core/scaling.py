"""How many GPUs, batchers and gateways are wanted, and why. Pure: `now` is seconds on a clock that all deciders share.

1. What is told is how many there should be in all, never how many more: GPUs that were ordered and still start are in
   that number, and nobody orders them again. It follows from the load and from what one GPU serves.
2. The load of a model, in GPUs: what comes by what one GPU serves with full batches; or what its GPUs are busy with, if
   that is more. A slot that is busy with a small batch is so much less busy: with little to do, fewer GPUs would do.
   GPUs are to be busy for 75 % of their time. From 70 to 80 % the number stays as it is.
3. What was refused came, too, for load or as no GPU was there: it counts as if it had been served. And while some is
   refused for load, small batches are no less busy than full ones: where few requests may ride together, no others
   fit in.
4. What waits is to be served within `drain_s`, beside what comes.
5. Where a synchronous request would wait for more than half of the time that it may, there are to be as many more GPUs
   as make it half of that, at most twice as many as work. While GPUs that were ordered are not there yet, the wait is
   theirs to end: no more are ordered for it.
6. Up at once and far enough: what was needed during all of the last 15 s is ordered, all of it. Bursts are shorter: by
   the time that a GPU has started, they are over.
7. Down slowly: once fewer would have done for 5 minutes, by a fifth at most (but by one at least), then again after 5
   minutes. Whoever acts on the number must not damp it again.
8. Never below half of what the last hour needed at its peak. Requests of tasks can wait: for a model with nothing but
   tasks that does not hold.
9. A model has one GPU at least. Once no synchronous request came for an hour, and nothing waits or comes, it has none;
   from none it goes up as always, by what a GPU served when there was one.
10. Nothing is changed while more GPUs answer with errors than work (more of them would do the same), while none works
   though some were ordered, before the first call has ended, and while it is not known what comes: unknown is not zero.
11. What an owner sends beyond its rate limit is refused before it is counted here: a flood buys no GPUs.
12. Gateways and batchers are to be busy for 70 % of a core each, as long as they say what they use; else by requests a
    second. Rules 6, 7, 8 and 10 are theirs, too, and there is one in any case. Where every batcher has GPUs of its
    own, there are as many batchers as the GPUs need.
13. Never more than `most`.
"""

from collections.abc import Mapping
from math import ceil, floor, inf
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

# Rules 2 and 12: the share of the time to be busy, and how far off that the number stays.
GPU_TARGET, SERVER_TARGET, BAND = 0.75, 0.70, 0.05
# What a gateway and a batcher carry on one core, at their end: docs/scaling.md, "Where it bends, and why".
GATEWAY_RPS, BATCHER_RPS = 28_000, 40_000
# Rule 3: fewer are refused by chance.
REFUSED_SHARE = 0.01
# Rule 5.
WAIT_SHARE, WAIT_TIMES_MAX = 0.5, 2.0
# So much of what was ordered must be there: one of many may never come.
THERE_SHARE = 0.9
# Rules 6 to 9.
STANDS_S = 15.0
COOLDOWN_S, DOWN_SHARE = 300.0, 0.2
PEAK_S, PEAK_SHARE = 3600.0, 0.5
BUCKET_S = 300.0
# Slower than one request in so many seconds is nothing: a rate that is measured falls towards 0, and never reaches it.
SOME_RPS = 0.001
# Rule 13, unless the caller says something else. Autoscalers have a maximum of their own.
MOST = 1000
# Shares of a GPU that adding up fractions may get wrong; and more than any fleet has.
ROUNDING, COUNTED_MAX = 1e-6, 1e9


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the load of a model, over all of its fleet."""

    # GPUs (endpoints) that work; and those that are there and answer with errors. Those that do not answer are neither.
    works: int
    failing: int = 0
    # Requests a second that one GPU serves with full batches; 0: no call has ended yet.
    gpu_rps: float = 0.0
    # Requests a second that come behind the rate limits, refused ones included: synchronous ones, and tasks.
    sync_rps: float = 0.0
    task_rps: float = 0.0
    # Of `sync_rps`, what was refused for load, by tier.
    refused_rps: Mapping[str, float] = {}
    # The share of their time that slots are busy; and how full their batches are, by what they are under full load.
    busy_share: float = 0.0
    fill: float = 1.0
    # Requests that wait, tasks included, and the seconds within which they should be served.
    waiting: int = 0
    drain_s: float = 300.0
    # How long a synchronous request of the lowest tier would wait for a slot, and how long it may.
    wait_s: float = 0.0
    wait_max_s: float = inf

    @property
    def demand_rps(self) -> float:
        """What comes."""
        return self.sync_rps + self.task_rps

    @property
    def backlog_s(self) -> float:
        """For how many seconds the GPUs that work are busy with what waits; 0 where they are not known."""
        return self.waiting / (self.gpu_rps * self.works) if self.gpu_rps and self.works else 0.0


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """What comes of a model to one process."""

    # Requests a second: synchronous ones, tasks, and by tier those of the first that were refused for load.
    sync_rps: float = 0.0
    task_rps: float = 0.0
    refused_rps: tuple[float, ...] = ()
    # How long a synchronous request of the lowest tier would wait here.
    wait_s: float = 0.0


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of all gateways, or of all batchers."""

    # How many live, and how many there are at least.
    live: int
    least: int = 1
    # Processor cores that they use, together; 0: they don't say.
    cores: float = 0.0
    # Requests a second that they serve, together, and what one can serve.
    rps: float = 0.0
    rps_each: float = inf


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """All that is scaled; None where it is not known."""

    models: Mapping[str, ModelLoad | None]
    # None also where there are no such processes: all is one.
    gateways: ServerLoad | None = None
    batchers: ServerLoad | None = None


class Need(NamedTuple):
    """How many are needed at a moment: fewer than `at_least` are too few, more than `at_most` too many."""

    at: float
    at_least: int
    wanted: int
    at_most: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How many are wanted, with what the next decision must remember."""

    wanted: int
    why: str
    # When so many were last needed, or the number was last lowered.
    needed_at: float
    # When a synchronous request came last, as far as is known.
    sync_at: float
    # What was needed in the last seconds (rule 6), and at most in each BUCKET_S of the last hour, by its number.
    recent: tuple[Need, ...] = ()
    peaks: dict[int, int] = {}
    # What a GPU served when that was last known.
    gpu_rps: float = 0.0


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of each. What is not here was never known."""

    models: dict[str, Decision] = {}
    gateways: Decision | None = None
    batchers: Decision | None = None


def scale_all(loads: Loads, before: Decisions, now: float) -> Decisions:
    """How many are wanted of all."""
    decided = {name: scale_gpus(load, before.models.get(name), now) for name, load in loads.models.items()}
    return Decisions(
        models={name: each for name, each in decided.items() if each is not None},
        gateways=scale_servers(loads.gateways, before.gateways, now),
        batchers=scale_servers(loads.batchers, before.batchers, now),
    )


def scale_gpus(load: ModelLoad | None, before: Decision | None, now: float, most: int = MOST) -> Decision | None:
    """How many GPUs of a model are wanted; None as long as nothing can be said. `load` is None while it is unknown."""
    if load is None:
        return before and _kept(before, "it is not known what comes, so the number stays", now)
    some_wait = load.waiting > 0 or load.demand_rps >= SOME_RPS
    if before is None:
        if not (load.works or load.failing or some_wait):
            return None
        there = load.works + load.failing
        before = Decision(wanted=min(max(there, 1), most), why="", needed_at=now, sync_at=now)
    sync_at = now if load.sync_rps >= SOME_RPS else min(before.sync_at, now)
    before = replace(before, sync_at=sync_at, gpu_rps=load.gpu_rps or before.gpu_rps)
    if load.failing > load.works:
        failing = f"{load.failing} of its GPUs answer with errors, and {load.works} work"
        return _kept(before, f"{failing}: more of them would do the same, so the number stays", now)
    if before.wanted and not load.works:
        return _kept(before, "none of its GPUs works yet, so the number stays", now)
    if before.wanted and not before.gpu_rps:
        return _kept(before, "no call has ended yet, so the number stays", now)
    has_sync = now - sync_at < PEAK_S
    need, why = _gpus_needed(replace(load, gpu_rps=before.gpu_rps), before, now, int(some_wait or has_sync))
    return _decided(before, need, why, now, peak_share=PEAK_SHARE if has_sync else 0.0, most=most)


def scale_servers(load: ServerLoad | None, before: Decision | None, now: float, most: int = MOST) -> Decision | None:
    """How many gateways, or batchers, are wanted; None as long as nothing can be said."""
    if load is None:
        return before and _kept(before, "it is not known what they do, so the number stays", now)
    if before is None:
        if not load.live:
            return None
        before = Decision(wanted=min(max(load.live, 1), most), why="", needed_at=now, sync_at=now)
    if not load.live:
        return _kept(before, "none of them lives, so the number stays", now)
    if load.cores > 0.0:
        busy, why = load.cores, f"they use {load.cores:,.2f} cores"
    else:
        busy, why = load.rps / load.rps_each, f"{_rate(load.rps)} come, and one takes {_rate(load.rps_each)}"
    need = _need(now, busy, SERVER_TARGET, max(1, load.least))
    if load.least >= need.wanted and load.least > 1:
        why = "each has GPUs of its own, and so many GPUs need them"
    return _decided(before, need, why, now, peak_share=PEAK_SHARE, most=most)


def _gpus_needed(load: ModelLoad, before: Decision, now: float, least: int) -> tuple[Need, str]:
    """What is needed now, whatever there is, and why."""
    each = load.gpu_rps
    if not each:  # from none, and none was ever known
        return Need(now, least, least, least), "some wait" if least else "nothing waits"
    is_refused = sum(load.refused_rps.values()) >= REFUSED_SHARE * load.demand_rps > 0.0
    fill = 1.0 if is_refused else load.fill
    by_rate, by_busy = load.demand_rps / each, load.works * load.busy_share * fill
    busy, why = by_rate, f"{_rate(load.demand_rps)} come{_refused(load)}, and a GPU serves {_rate(each)}"
    if by_busy > by_rate:
        busy, why = by_busy, f"{load.works} GPUs are busy for {by_busy / load.works:.0%} of their time"
    need = _need(now, busy, GPU_TARGET, least)
    by_backlog = _whole(by_rate + load.waiting / load.drain_s / each)
    if by_backlog > need.wanted:
        need = _at_least(need, by_backlog)
        why = f"{load.waiting:,} wait and {_rate(load.demand_rps)} come, and a GPU serves {_rate(each)}"
    wait_max_s = WAIT_SHARE * load.wait_max_s
    if load.wait_s > wait_max_s:
        by_wait = _whole(load.works * min(load.wait_s / wait_max_s, WAIT_TIMES_MAX))
        if load.works < THERE_SHARE * before.wanted:
            by_wait = min(by_wait, before.wanted)
        if by_wait > need.wanted:
            need = _at_least(need, by_wait)
            why = f"a request would wait for {load.wait_s:.2g} s, and may for {load.wait_max_s:.2g} s"
    return need, why


def _need(now: float, busy: float, target: float, least: int) -> Need:
    """What a load needs that keeps so many busy all the time (rule 2)."""
    wanted = max(_whole(busy / target), least)
    at_most = floor(min(busy / (target - BAND), COUNTED_MAX) + ROUNDING)
    return Need(now, max(_whole(busy / (target + BAND)), least), wanted, max(at_most, wanted))


def _at_least(need: Need, count: int) -> Need:
    return Need(need.at, max(need.at_least, count), max(need.wanted, count), max(need.at_most, count))


def _decided(before: Decision, need: Need, why: str, now: float, *, peak_share: float, most: int) -> Decision:
    """Up or down from what was wanted before (rules 6, 7, 8 and 13)."""
    # One that is older than rule 6 asks for is kept: it says that enough is known.
    older = [each for each in before.recent if each.at <= now - STANDS_S][-1:]
    recent = (*older, *(each for each in before.recent if now - STANDS_S < each.at < now), need)
    stood = Need(*map(min, zip(*recent, strict=True)))
    number = int(now // BUCKET_S)
    peaks = {each: peak for each, peak in before.peaks.items() if number - PEAK_S / BUCKET_S <= each <= number}
    if older:
        peaks[number] = max(peaks.get(number, 0), stood.wanted)
    wanted, needed_at, tail = before.wanted, min(before.needed_at, now), ""
    if older and stood.at_least > wanted:
        wanted, needed_at = stood.wanted, now
    elif not older or stood.at_most >= wanted:
        needed_at = now
    elif now - needed_at >= COOLDOWN_S:
        # Those of the last minutes, in which so many were not needed; and half of the hour's.
        lately = max((peak for each, peak in peaks.items() if each >= number - COOLDOWN_S / BUCKET_S), default=0)
        kept = ceil(peak_share * max(peaks.values(), default=0))
        lowest = wanted - max(1, floor(DOWN_SHARE * wanted))
        lowered = max(stood.wanted, lately, kept, lowest)
        if lowered < wanted:
            wanted, needed_at = lowered, now
    if wanted > most:
        wanted = most
    if (fewer := stood.wanted) < wanted and stood.at_most < wanted:
        tail = f"; {fewer} would do, and the number falls slowly"
    elif need.wanted > most:
        tail = f"; that is {need.wanted}, and {most} is the most"
    return replace(before, wanted=wanted, why=why + tail, needed_at=needed_at, recent=recent, peaks=peaks)


def _kept(before: Decision, why: str, now: float) -> Decision:
    """Nothing is changed, and what was seen in the last seconds says nothing any more (rule 10)."""
    return replace(before, why=why, needed_at=now, recent=())


def _whole(number: float) -> int:
    return ceil(min(number, COUNTED_MAX) - ROUNDING)


def _refused(load: ModelLoad) -> str:
    refused = {tier: rps for tier, rps in load.refused_rps.items() if rps >= SOME_RPS}
    return f" ({_rate(sum(refused.values()))} of them refused: {', '.join(refused)})" if refused else ""


def _rate(rps: float) -> str:
    return f"{rps:,.0f}/s" if rps >= 10 else f"{rps:.2g}/s"
