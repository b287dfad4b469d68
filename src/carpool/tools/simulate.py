"""Production's own engine on virtual time, with simulated GPUs, and load from a seed: `carpool simulate`.

1. Virtual time passes while somebody waits, not while something is computed. The same seed gives the same figures.
2. Requests that come within a turn of the event loop come together, when the last of them does.
3. A request enters where a face lets it in: behind credentials and rate limits, and before load shedding.
4. Those that come while it is warming up are served like the others, and not counted.
5. The fleet stays as it is, or follows the rules of scaling: simulated_fleet.py.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, repeat
from math import inf
from random import Random
from typing import NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from carpool.composition.admission import intake_settings
from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.clock import Clock
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.service import addresses
from carpool.settings import Model, Settings, models_of, total_timeout_s
from carpool.settings.keys import KEYS
from carpool.settings.schema import UpstreamSettings
from carpool.tools.bench.run import BadOption, TierLoad, arrivals, gaps_of, turns
from carpool.tools.bench.sizes import FIXED, LOGNORMAL, parse_sizes
from carpool.tools.bench.tally import Arrivals, Quantiles, Segment, SentLoad, Tally, TierReport
from carpool.tools.charts import Panel, draw_over_time
from carpool.tools.plan import MILLION, WRITE_OFF_YEARS, YEAR_S
from carpool.tools.simulated_fleet import Scaled, ScaledFleet, steady_shares
from carpool.tools.traces import Rows
from carpool.upstream.endpoint import AttemptFailedError, NoAnswerError, UpstreamCall, UpstreamResponse
from carpool.upstream.fleet import Address, MakeEndpoint
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings, read_call
from carpool.virtual_time import VirtualClock

# A request comes at most so much later than it was drawn.
TURN_S = 0.001
GPUS_MAX, SLOTS_MAX, PRICE_MAX, COMPARED_MAX = 4096, 1 << 20, 1e9, 20
# A million requests take half a minute.
RATE_MAX, SECONDS_MIN, SECONDS_MAX, REQUESTS_MAX = 1_000_000, 0.001, 30 * 86_400, 100_000_000
_SECOND = r"(\d{1,9}(?:\.\d{1,6})?)"
DEATH = re.compile(rf"(\d{{1,4}})(?:-(\d{{1,4}}))?@{_SECOND}(?:\.\.{_SECOND})?")
START = re.compile(rf"(\d{{1,4}})(?:-(\d{{1,4}}))?@{_SECOND}")
GPU_URL = "http://gpu-"
# A picture has so many moments; where the fleet is scaled, a day has some 5 minutes between two of them.
MOMENTS, SCALED_MOMENTS = 120, 288
# The time of a picture: what it is told in, from how many seconds on.
TIME_UNITS = (("h", 3600.0, 7200.0), ("min", 60.0, 600.0), ("s", 1.0, 0.0))
# What of the configuration an engine on virtual time goes by. The endpoints are given, and speak one protocol.
SIMULATED = (
    "batching.",
    "shedding.",
    *(f"broker.{key}" for key in ("order", "waiting_max", "bytes_max", "queue_timeout_s", "total_timeout_s")),
    *(f"upstream.{key}" for key in ("timeout_s", "attempts", "pad")),
)


class Away(NamedTuple):
    """From when to when a GPU answers nothing, in seconds of the time that counts."""

    begins_s: float
    ends_s: float = inf


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs, each an endpoint, all alike. Raises BadOption if those are more than a simulation takes."""

    count: int = 1
    each: SimulationSettings = SimulationSettings()
    # By number, from 1 on; those of one GPU one after the other.
    away: Mapping[int, Sequence[Away]] = {}
    # To buy one.
    price: float = 30_000.0
    # How long one that is ordered takes to come; None: none are ordered, there are `count` all the time.
    start_up_s: float | None = None

    def __post_init__(self) -> None:
        if self.count > GPUS_MAX or self.count * self.each.slots > SLOTS_MAX:
            raise BadOption(
                f"{self.count:,} x {self.each.slots:,} slots are more than {GPUS_MAX:,} GPUs, or than {SLOTS_MAX:,} "
                "slots in all: give less (--gpus, --gpu, --costs)"
            )
        if not 0 <= self.price <= PRICE_MAX:  # NaN is outside, too
            raise BadOption(f"--gpu-price is {self.price}: give what a GPU costs to buy, up to {PRICE_MAX:,.0f}")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What comes. Raises BadOption if that is more than a simulation takes."""

    segments: list[Segment]
    # For so long the first rate comes before them.
    warm_s: float = 0.0
    # Names and shares; none: all requests are of the lowest tier, as without credentials.
    tiers: list[TierLoad] = []
    # Of each tier; each of its requests is from any of them.
    owners: int = 100
    # Sizes of inputs, which requests take in turn; without any, each has `payload_bytes`.
    sizes: Sequence[int] = ()
    payload_bytes: int = 2000
    arrivals: Arrivals = "poisson"
    seed: int = 1

    def __post_init__(self) -> None:
        if max(segment.rate for segment in self.segments) > RATE_MAX:
            raise BadOption(f"a rate is over {RATE_MAX:,}/s; give a lower one (--rate, --schedule)")
        if not self.warm_s + self.seconds <= SECONDS_MAX:
            raise BadOption(f"it goes on for over {SECONDS_MAX:,} s; give less (--seconds, --schedule, --warm)")
        if self.seconds < SECONDS_MIN:
            raise BadOption(f"it goes on for less than {SECONDS_MIN} s; give more (--seconds, --schedule)")
        if (expected := sum(segment.expected for segment in self.all_segments())) > REQUESTS_MAX:
            less = "give a lower rate, or less time"
            raise BadOption(f"{expected:,.0f} requests would come, and at most {REQUESTS_MAX:,} may: {less}")

    @property
    def seconds(self) -> float:
        """The time that counts."""
        return sum(segment.duration_s for segment in self.segments)

    def times(self) -> Iterator[float]:
        """When each request comes, in seconds from the start of the warming up."""
        return arrivals(self.all_segments(), gaps_of(self.arrivals, self.seed))

    def picks(self) -> Iterator[tuple[int, int]]:
        """The tier of each request, as its number in `tiers`, and the number of its owner there."""
        random, owners = Random(f"owners/{self.seed}").random, self.owners
        return ((place, int(random() * owners)) for place in cycle(turns(self.tiers, self.seed) if self.tiers else [0]))

    def values(self) -> Iterator[bytes]:
        """The JSON of each input, made when it comes: inputs of all sizes at once may be more than the memory."""
        return map(text_of, cycle(self.sizes)) if self.sizes else repeat(text_of(self.payload_bytes))

    def owner_names(self, tier: str) -> Sequence[str]:
        """All owners of a tier."""
        return [f"{tier}-{number}" for number in range(self.owners)]

    def all_segments(self) -> list[Segment]:
        """With the warming up before them."""
        return [Segment(self.segments[0].rate, self.warm_s), *self.segments] if self.warm_s else self.segments


class Recorded(Load, frozen=True, kw_only=True):
    """What came once, and comes again at the same times; the first `warm_s` of it do not count."""

    rows: Rows

    def times(self) -> Iterator[float]:
        """When each request comes, in seconds after the first one."""
        return (at - self.rows.began_s for at in self.rows.times)

    def picks(self) -> Iterator[tuple[int, int]]:
        """The tier and the owner of each, by number."""
        return zip(*self.rows.picks, strict=True)

    def values(self) -> Iterator[bytes]:
        """As long as each was, where that is known."""
        if not any(self.rows.sizes):
            return Load.values(self)
        return (text_of(size or self.payload_bytes) for size in self.rows.sizes)

    def owner_names(self, tier: str) -> Sequence[str]:
        """All owners: each asked in the tiers that it did."""
        return self.rows.owners


def recorded_load(trace: Rows | SentLoad, load: Load, warm_s: float) -> Load:
    """A trace in place of what a load has from its options. Raises BadOption."""
    if isinstance(trace, SentLoad):
        if not any(segment.expected for segment in trace.segments):
            raise BadOption("it never sends anything: every rate is 0")
        sizes = _sizes_of(trace, load)
        return Load(
            segments=trace.segments,
            warm_s=warm_s,
            tiers=[TierLoad(name, share, "") for name, share in trace.tiers.items()],
            # A tier of `carpool bench` has one key.
            owners=1,
            # Its first request has number 1.
            sizes=[*sizes[1:], *sizes[:1]],
            payload_bytes=trace.payload_bytes,
            arrivals=trace.arrivals,
            seed=trace.seed,
        )
    if "" in trace.tiers and len(trace.tiers) > 1:
        raise BadOption("some requests of the trace have a tier, and some have none")
    if (seconds := max(trace.seconds, 1.0) - warm_s) <= 0:
        raise BadOption(f"the trace has {trace.seconds:,.1f} s: give less as --warm")
    return Recorded(
        rows=trace,
        segments=[Segment(len(trace.times) / (warm_s + seconds), seconds)],
        warm_s=warm_s,
        tiers=[TierLoad(name, 1, "") for name in trace.tiers if name],
        sizes=load.sizes,
        payload_bytes=load.payload_bytes,
        seed=load.seed,
    )


def _sizes_of(trace: SentLoad, load: Load) -> Sequence[int]:
    """What the bench drew. A file of sizes that it names is not opened: who gave it may have asked for any file."""
    if trace.sizes == FIXED or trace.sizes.startswith(LOGNORMAL):
        return parse_sizes(trace.sizes, trace.seed)
    if not load.sizes:
        raise BadOption(f"its sizes are from {trace.sizes!r}, which is not opened: give that as --sizes")
    return load.sizes


class Moment(msgspec.Struct, frozen=True):
    """What happened since the moment before, by the second, and how busy the GPUs were."""

    at_s: float
    offered: float
    served: float
    refused: float
    p99_ms: float | None
    gpus_busy: float
    # At its end.
    gpus_wanted: int
    gpus_there: int
    # Of the time of all slots of those that were there.
    busy_share: float


class Simulated(msgspec.Struct, frozen=True):
    """What became of the requests that came in the time that counts; `goodput` is of all answers in that time."""

    seconds: float
    batch_mean: float | None
    # Of the time of all slots of all GPUs.
    busy_share: float
    money_per_year: float
    # Of answers; None: there were none.
    money_per_million: float | None
    # How long answered requests waited for a slot.
    queue_ms: Quantiles
    all: TierReport
    tiers: dict[str, TierReport]
    # Where the fleet follows the rules of scaling.
    scaled: Scaled | None = None
    moments: list[Moment] = []


def parse_away(dies: Sequence[str], starts: Sequence[str], gpus: int) -> dict[int, list[Away]]:
    """When GPUs are away, in the syntax of --dies and of --starts; raises BadOption."""
    found: dict[int, list[Away]] = {}
    for text in starts:
        if (match := START.fullmatch(text)) is None:
            raise BadOption(f"{text!r} is not GPU@SECOND or GPU-GPU@SECOND, such as 5@30 or 5-8@30")
        _add(found, text, match, Away(-inf, float(match[3])), gpus)
    for text in dies:
        if (match := DEATH.fullmatch(text)) is None:
            raise BadOption(f"{text!r} is not GPU@SECOND or GPU@SECOND..SECOND, such as 1@30, 1@30..60 or 1-4@30")
        _add(found, text, match, Away(float(match[3]), float(match[4] or inf)), gpus)
    return found


def _add(found: dict[int, list[Away]], text: str, match: re.Match[str], away: Away, gpus: int) -> None:
    """Keep this of the GPUs that it is said of."""
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= gpus:
        raise BadOption(f"{text!r}: there are GPUs 1 to {gpus} (--gpus)")
    for number in range(first, last + 1):
        spans = found.setdefault(number, [])
        if away.begins_s >= away.ends_s or (spans and spans[-1].ends_s > away.begins_s):
            raise BadOption(f"{text!r}: a GPU comes back after it has died, and dies again after that")
        spans.append(away)


def parse_setting(text: str) -> tuple[str, str]:
    """A setting's path, and what it is set to; raises BadOption also for one that would change nothing."""
    path, equals, value = text.partition("=")
    if not equals:
        raise BadOption(f"{text!r} is not SECTION.KEY=VALUE, such as batching.policy=fixed")
    whole = [each for each in KEYS if each.endswith(f".{path}") and each.startswith(SIMULATED)]
    path = whole[0] if len(whole) == 1 else path
    if not path.startswith(SIMULATED):
        listed = ", ".join(f"{each}*" if each.endswith(".") else each for each in SIMULATED)
        raise BadOption(f"{path!r} is no setting that a simulation goes by; these are: {listed}")
    return path, value


def parse_compared(text: str) -> tuple[str, list[str]]:
    """A setting's path, and the values to compare; raises BadOption."""
    path, value = parse_setting(text)
    values = [each.strip() for each in value.split(",")]
    if not 2 <= len(set(values)) == len(values) <= COMPARED_MAX:
        raise BadOption(f"{text!r} must have 2 to {COMPARED_MAX} different values, such as {path}=a,b")
    return path, values


class BriefBatch(NamedTuple):
    """A call whose outputs are nothing but as many: nobody looks at them, and long ones would cost time."""

    inputs: Sequence[bytes | Raw]

    def answer(self, count: int) -> UpstreamResponse:
        """The answer to the first `count` inputs."""
        return UpstreamResponse(200, b'{"outputs":[%b]}' % b",".join([b"1"] * count))


def read_briefly(body: bytes) -> BriefBatch:
    """The batch in the body of a call."""
    return BriefBatch(read_call(body).inputs)


class Gpu(SimulatedEndpoint):
    """A simulated GPU that may start later, die, and come back."""

    def __init__(self, name: str, settings: SimulationSettings, away: Sequence[Away], clock: Clock) -> None:
        super().__init__(name, settings, clock=clock)
        self._away = away
        self._clock = clock

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Answer one call, unless it is dead, or dies before the answer."""
        if not await self.accepts_connections():
            raise AttemptFailedError("the GPU is dead")
        now = self._clock()
        lives_s = min((away.begins_s - now for away in self._away if now < away.begins_s), default=inf)
        try:
            async with asyncio.timeout(min(timeout_s, lives_s)):
                answer = await self.gpu.infer(call.body, read_briefly)
        except TimeoutError:
            has_died = AttemptFailedError("the GPU has died")
            raise (has_died if lives_s < timeout_s else NoAnswerError(timeout_s)) from None
        if answer is None:
            raise AttemptFailedError("the connection was reset")
        return answer

    async def accepts_connections(self) -> bool:
        """As long as it lives."""
        now = self._clock()
        return not any(away.begins_s <= now < away.ends_s for away in self._away)


class Part(msgspec.Struct):
    """One tier of the load, and what became of it."""

    tier: int
    target_s: float
    owners: Sequence[str]
    tally: Tally
    # Answers in the time that counts, also to requests that came before.
    answers: int = 0


class Simulation:
    """One run. It is the waiter of every request. Raises BadOption if the load has a tier that is not configured."""

    def __init__(self, settings: Settings, load: Load, gpus: Gpus, *, moments: int = 0) -> None:
        self._load, self._gpus = load, gpus
        self._clock = VirtualClock()
        self._starts = self._clock()
        self._counts_from = self._starts + load.warm_s
        self._counts_until = self._counts_from + load.seconds
        self._settings = settings_for(settings, gpus.count)
        self._parts = self._make_parts()
        self._picks, self._values = load.picks(), load.values()
        self._endpoints: list[Gpu] = []
        self._times = load.times()
        # When the next request comes.
        self._next = next(self._times, inf)
        self._number = self._under_way = 0
        self._none_left = asyncio.Event()
        self._busy_share = self._gpu_seconds = 0.0
        self._fleet: ScaledFleet | None = None
        # The moments of a picture, or those by which is told what scaling did; and the latencies since the last one.
        self._moments: list[Moment] = []
        self._moments_wanted = moments if gpus.start_up_s is None else SCALED_MOMENTS
        self._lately: list[float] | None = [] if self._moments_wanted else None

    def run(self) -> Simulated:
        """Run it to the last outcome."""
        self._clock.run(self._run())
        seconds, parts, whole = self._load.seconds, self._parts, self._whole
        answers = sum(part.answers for part in parts)
        money = self._gpu_seconds / seconds * self._gpus.price / WRITE_OFF_YEARS

        def report(tally: Tally, answers: int) -> TierReport:
            return replace(tally.tier_report(seconds), goodput=round(answers / seconds, 1))

        return Simulated(
            seconds=round(seconds, 3),
            batch_mean=round(whole.told_batch / whole.batches, 2) if whole.batches else None,
            busy_share=round(self._busy_share, 4),
            money_per_year=round(money, 2),
            money_per_million=round(money / YEAR_S * seconds / answers * MILLION, 4) if answers else None,
            queue_ms=whole.queue.quantiles(),
            all=report(whole, answers),
            tiers={part.tally.name: report(part.tally, part.answers) for part in parts},
            scaled=self._tell_scaled(),
            moments=self._moments,
        )

    def _tell_scaled(self) -> Scaled | None:
        if self._fleet is None:
            return None
        begins, moments = self._counts_from, self._moments
        # What came once has no rate of which one could say that it stays.
        shares = [] if isinstance(self._load, Recorded) else steady_shares(self._load.segments, moments)
        return Scaled(
            gpus_mean=round(self._gpu_seconds / self._load.seconds, 2),
            gpus_most=max((moment.gpus_there for moment in moments), default=self._gpus.count),
            steady_busy_share=round(sum(shares) / len(shares), 4) if shares else None,
            steady_lowest=round(shares[len(shares) // 20], 4) if shares else None,
            steady_highest=round(shares[-1 - len(shares) // 20], 4) if shares else None,
            steady_s=round(len(shares) * self._load.seconds / self._moments_wanted, 1),
            changes=[replace(each, at_s=round(each.at_s - begins, 3)) for each in self._fleet.changes],
        )

    def _make_parts(self) -> list[Part]:
        tiers = self._settings.tiers
        numbers = {tier.name: number for number, tier in enumerate(tiers)}
        names = [tier.name for tier in self._load.tiers] or [tiers[-1].name]
        # Only where it is not the same: counting is a good part of what a request costs here.
        whole = Tally() if len(names) > 1 else None
        parts = []
        for name in names:
            if name not in numbers:
                raise BadOption(f"--tiers: there is no tier {name!r}; there are {', '.join(numbers)}")
            target_s = tiers[numbers[name]].target_ms / 1000
            parts.append(Part(numbers[name], target_s, self._load.owner_names(name), Tally(name, whole)))
        self._whole = whole or parts[0].tally
        return parts

    def _make_endpoints(self, model: Model) -> MakeEndpoint:
        gpu, seed, begins = self._gpus.each, self._load.seed, self._counts_from

        def make(address: Address) -> Gpu:
            number = int(address.url.removeprefix(GPU_URL))
            away = [Away(begins + each.begins_s, begins + each.ends_s) for each in self._gpus.away.get(number, ())]
            # Each draws its own faults and jitter.
            own = replace(gpu, seed=(seed if gpu.seed is None else gpu.seed) * GPUS_MAX + number)
            self._endpoints.append(Gpu(f"gpu-{number}", own, away, self._clock))
            return self._endpoints[-1]

        return make

    async def _run(self) -> None:
        draw = Random(f"engine/{self._load.seed}").random
        runtime = Runtime(self._settings, self._clock, draw, self._make_endpoints)
        model = runtime.models[self._settings.model]
        self._limits = intake_settings(runtime)
        self._engine = Engine(runtime)
        if self._gpus.start_up_s is not None:
            self._fleet = ScaledFleet(
                self._engine,
                self._settings.model,
                range(1, self._gpus.count + 1),
                self._gpus.start_up_s,
                lambda number: Address(f"{GPU_URL}{number}", addresses(model)[0].slots),
                self._make_endpoints(model),
                self._is_lost,
            )
        self._await_next_turn()
        await self._engine.run(self._last())

    async def _last(self) -> None:
        """Until the last request has its outcome."""
        await asyncio.sleep(self._load.warm_s)
        busy_s, gpu_s = self._busy_s(), self._gpu_s()
        if self._lately is None:
            await asyncio.sleep(self._load.seconds)
        else:
            await self._watch(self._lately, self._load.seconds / self._moments_wanted)
        self._gpu_seconds = self._gpu_s() - gpu_s
        self._busy_share = (self._busy_s() - busy_s) / (self._gpus.each.slots * self._gpu_seconds)
        self._none_left.clear()
        if self._under_way:
            await self._none_left.wait()

    async def _watch(self, latencies: list[float], step_s: float) -> None:
        """Note what happens, as often as is wanted."""

        def counts() -> tuple[float, ...]:
            answers = sum(part.answers for part in self._parts)
            return self._whole.sent, answers, self._whole.errors, self._busy_s(), self._gpu_s()

        before = counts()
        latencies.clear()
        for number in range(1, self._moments_wanted + 1):
            await asyncio.sleep(self._counts_from + number * step_s - self._clock())
            now = counts()
            deltas = zip(now, before, strict=True)
            came, served, refused, busy, there = ((after - first) / step_s for after, first in deltas)
            latencies.sort()
            p99_ms = latencies[int(0.99 * len(latencies))] * 1000 if latencies else None
            busy /= self._gpus.each.slots
            fleet, count = self._fleet, self._gpus.count
            gpus = (count, count) if fleet is None else (fleet.wanted, fleet.there)
            share = busy / there if there else 0.0
            self._moments.append(Moment(number * step_s, came, served, refused, p99_ms, busy, *gpus, share))
            before = now
            latencies.clear()

    def _busy_s(self) -> float:
        return sum(endpoint.gpu.stats().busy_seconds for endpoint in self._endpoints)

    def _gpu_s(self) -> float:
        """How long all GPUs together were there until now."""
        if self._fleet is not None:
            return self._fleet.gpu_seconds()
        return self._gpus.count * (self._clock() - self._starts)

    def _is_lost(self, number: int) -> bool:
        since = self._clock() - self._counts_from
        return any(away.begins_s <= since and away.ends_s == inf for away in self._gpus.away.get(number, ()))

    def _await_next_turn(self) -> None:
        if self._next == inf:
            return
        turn_ends, count, at = self._next + TURN_S, 0, 0.0
        while self._next <= turn_ends:
            count, at, self._next = count + 1, self._next, next(self._times, inf)
        asyncio.get_running_loop().call_at(self._starts + at, self._arrive, count)

    def _arrive(self, count: int) -> None:
        """Let in what came in this turn."""
        now, limits, admit, settings = self._clock(), self._limits, self._engine.admit, self._settings
        parts, picks, values = self._parts, self._picks, self._values
        model, queue_s, deadline = settings.model, limits.queue_timeout_s, now + limits.total_timeout_s
        is_counted = now >= self._counts_from
        self._under_way += count
        for number in range(self._number, self._number + count):
            which, owner_number = next(picks)
            part, value = parts[which], next(values)
            tier, place, size, owner = part.tier, now + part.target_s, len(value), part.owners[owner_number]
            # By position: names would cost a tenth of what this tool itself costs.
            request = Request(
                str(number), model, b"", value, size, tier, now, place, queue_s, deadline, self, part, owner
            )
            if is_counted:
                part.tally.came_due()
            if (refusal := admit(request)) is not None:
                self.settled(request, refusal)
        self._number += count
        self._await_next_turn()

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Count what became of a request."""
        self._under_way -= 1
        if not self._under_way:
            self._none_left.set()
        part: Part = request.ticket
        now, came = self._clock(), request.arrived
        if isinstance(outcome, Output):
            part.answers += self._counts_from <= now < self._counts_until
            if self._lately is not None:
                self._lately.append(now - came)
            if came >= self._counts_from:
                part.tally.right(now - came, now, (request.taken - came) * 1000, outcome.call.batch_size)
        elif came >= self._counts_from:
            part.tally.failed(str(outcome.status), now - came, now)


def picture(run: Simulated) -> str:
    """What happened over time, as SVG."""
    unit, unit_s = next((name, each) for name, each, least in TIME_UNITS if run.seconds >= least)
    times = [moment.at_s / unit_s for moment in run.moments]

    def panel(title: str, **names: str) -> Panel:
        return Panel(
            title, times, {told: [getattr(each, name) for each in run.moments] for told, name in names.items()}
        )

    panels = [
        panel("requests/s", offered="offered", served="served", refused="refused"),
        panel("p99 (ms)", answered="p99_ms"),
    ]
    if run.scaled is None:
        panels.append(panel("GPUs", busy="gpus_busy"))
    else:
        panels.append(panel("GPUs", wanted="gpus_wanted", there="gpus_there", busy="gpus_busy"))
        panels.append(panel("busy share", **{"of those there": "busy_share"}))
    return draw_over_time(f"{run.all.offered:,} requests in {run.seconds / unit_s:,g} {unit}", unit, panels)


def text_of(size: int) -> bytes:
    """The JSON of a text, in so many bytes."""
    return b'"%b"' % (b"x" * (size - 2))


def settings_for(settings: Settings, gpus: int) -> Settings:
    """What of a configuration is simulated, of the model that is meant when a client names none."""
    model = models_of(settings)[settings.model]
    upstream = model.upstream
    return Settings(
        model=model.name,
        tiers=settings.tiers,
        shedding=settings.shedding,
        broker=replace(settings.broker, url="", total_timeout_s=total_timeout_s(settings)),
        batching=model.batching,
        upstream=UpstreamSettings(
            endpoints=[f"{GPU_URL}{number}" for number in range(1, gpus + 1)],
            timeout_s=upstream.timeout_s,
            attempts=upstream.attempts,
            pad=upstream.pad,
        ),
    )
