"""Production's own engine on virtual time, with simulated GPUs, and load from a seed: `carpool simulate`.

1. Virtual time passes while somebody waits, not while something is computed. The same seed gives the same figures.
2. Requests that come within a turn of the event loop come together, when the last of them does.
3. A request enters where a face lets it in: behind credentials and rate limits, and before load shedding.
4. Those that come while it is warming up are served like the others, and not counted.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
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
from carpool.settings import Model, Settings, models_of, total_timeout_s
from carpool.settings.schema import UpstreamSettings
from carpool.tools.bench.run import BadOption, Segment, TierLoad, arrivals, poisson_gaps, turns
from carpool.tools.bench.tally import Tally, TierReport
from carpool.upstream.endpoint import AttemptFailedError, NoAnswerError, UpstreamCall, UpstreamResponse
from carpool.upstream.fleet import Address, MakeEndpoint
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings, read_call
from carpool.virtual_time import VirtualClock

# A request comes at most so much later than it was drawn.
TURN_S = 0.001
GPUS_MAX, COMPARED_MAX = 4096, 20
# A million requests take half a minute.
RATE_MAX, SECONDS_MAX, REQUESTS_MAX = 1_000_000, 30 * 86_400, 100_000_000
DEATH = re.compile(r"(\d{1,4})@(\d{1,9}(?:\.\d{1,6})?)(?:\.\.(\d{1,9}(?:\.\d{1,6})?))?")
# What of the configuration an engine on virtual time goes by. The endpoints are given, and speak one protocol.
SIMULATED = (
    "batching.",
    "shedding.",
    *(f"broker.{key}" for key in ("order", "waiting_max", "bytes_max", "queue_timeout_s", "total_timeout_s")),
    *(f"upstream.{key}" for key in ("timeout_s", "attempts", "pad")),
)


class Death(NamedTuple):
    """From when to when a GPU answers nothing, in seconds of the time that counts."""

    begins_s: float = inf
    ends_s: float = inf


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs, each an endpoint, all alike."""

    count: int = 1
    each: SimulationSettings = SimulationSettings()
    # By number, from 1 on.
    deaths: dict[int, Death] = {}


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
    sizes: list[int] = []
    payload_bytes: int = 2000
    seed: int = 1

    def __post_init__(self) -> None:
        if max(segment.rate for segment in self.segments) > RATE_MAX:
            raise BadOption(f"a rate is over {RATE_MAX:,}/s; give a lower one (--rate, --schedule)")
        if not self.warm_s + self.seconds <= SECONDS_MAX:
            raise BadOption(f"it goes on for over {SECONDS_MAX:,} s; give less (--seconds, --schedule, --warm)")
        if (expected := sum(segment.expected for segment in self.all_segments())) > REQUESTS_MAX:
            less = "give a lower rate, or less time"
            raise BadOption(f"{expected:,.0f} requests would come, and at most {REQUESTS_MAX:,} may: {less}")

    @property
    def seconds(self) -> float:
        """The time that counts."""
        return sum(segment.duration_s for segment in self.segments)

    def times(self) -> Iterator[float]:
        """When each request comes, in seconds from the start of the warming up."""
        return arrivals(self.all_segments(), poisson_gaps(Random(self.seed).random))

    def all_segments(self) -> list[Segment]:
        """With the warming up before them."""
        return [Segment(self.segments[0].rate, self.warm_s), *self.segments] if self.warm_s else self.segments


class Simulated(msgspec.Struct, frozen=True):
    """What became of the requests that came in the time that counts; `goodput` is of all answers in that time."""

    seconds: float
    batch_mean: float | None
    # Of the time of all slots of all GPUs.
    busy_share: float
    all: TierReport
    tiers: dict[str, TierReport]


def parse_deaths(texts: Sequence[str], gpus: int) -> dict[int, Death]:
    """The deaths in the syntax of --dies; raises BadOption."""
    found: dict[int, Death] = {}
    for text in texts:
        if (match := DEATH.fullmatch(text)) is None:
            raise BadOption(f"{text!r} is not GPU@SECOND or GPU@SECOND..SECOND, such as 1@30 or 1@30..60")
        number, death = int(match[1]), Death(float(match[2]), float(match[3] or inf))
        if not 1 <= number <= gpus:
            raise BadOption(f"{text!r}: there are GPUs 1 to {gpus} (--gpus)")
        if number in found or death.begins_s >= death.ends_s:
            raise BadOption(f"{text!r}: a GPU dies once, and comes back after that")
        found[number] = death
    return found


def parse_setting(text: str) -> tuple[str, str]:
    """A setting's path, and what it is set to; raises BadOption also for one that would change nothing."""
    path, equals, value = text.partition("=")
    if not equals:
        raise BadOption(f"{text!r} is not SECTION.KEY=VALUE, such as batching.policy=fixed")
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
    """A simulated GPU that may die, and come back."""

    def __init__(self, name: str, settings: SimulationSettings, death: Death, clock: Clock) -> None:
        super().__init__(name, settings, clock=clock)
        self._death = death
        self._clock = clock

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Answer one call, unless it is dead, or dies before the answer."""
        if not await self.accepts_connections():
            raise AttemptFailedError("the GPU is dead")
        now, dies_s = self._clock(), self._death.begins_s
        lives_s = dies_s - now if now < dies_s else inf
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
        return not self._death.begins_s <= self._clock() < self._death.ends_s


class Part(msgspec.Struct):
    """One tier of the load, and what became of it."""

    tier: int
    target_s: float
    owners: tuple[str, ...]
    tally: Tally
    # Answers in the time that counts, also to requests that came before.
    answers: int = 0


class Simulation:
    """One run. It is the waiter of every request. Raises BadOption if the load has a tier that is not configured."""

    def __init__(self, settings: Settings, load: Load, gpus: Gpus) -> None:
        self._load, self._gpus = load, gpus
        self._clock = VirtualClock()
        self._starts = self._clock()
        self._counts_from = self._starts + load.warm_s
        self._counts_until = self._counts_from + load.seconds
        self._settings = settings_for(settings, gpus.count)
        self._random = Random(f"owners/{load.seed}").random
        self._parts = self._make_parts()
        self._turns = cycle(turns(load.tiers, load.seed) if load.tiers else (0,))
        # Made when they come: inputs of all sizes at once may be more than the memory.
        self._values = map(text_of, cycle(load.sizes)) if load.sizes else repeat(text_of(load.payload_bytes))
        self._endpoints: list[Gpu] = []
        self._times = load.times()
        # When the next request comes.
        self._next = next(self._times, inf)
        self._number = self._under_way = 0
        self._none_left = asyncio.Event()
        self._busy_share = 0.0

    def run(self) -> Simulated:
        """Run it to the last outcome."""
        self._clock.run(self._run())
        seconds, parts = self._load.seconds, self._parts
        whole = parts[0].tally.whole or parts[0].tally

        def report(tally: Tally, answers: int) -> TierReport:
            return replace(tally.tier_report(seconds), goodput=round(answers / seconds, 1))

        return Simulated(
            seconds=round(seconds, 3),
            batch_mean=round(whole.told_batch / whole.batches, 2) if whole.batches else None,
            busy_share=round(self._busy_share, 4),
            all=report(whole, sum(part.answers for part in parts)),
            tiers={part.tally.name: report(part.tally, part.answers) for part in parts},
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
            owners = tuple(f"{name}-{number}" for number in range(self._load.owners))
            target_s = tiers[numbers[name]].target_ms / 1000
            parts.append(Part(numbers[name], target_s, owners, Tally(name, whole)))
        return parts

    def _make_endpoints(self, model: Model) -> MakeEndpoint:
        numbers = {url: number for number, url in enumerate(self._settings.upstream.endpoints, 1)}
        gpu, seed = self._gpus.each, self._load.seed

        def make(address: Address) -> Gpu:
            number = numbers[address.url]
            death = self._gpus.deaths.get(number, Death())
            begins, ends = self._counts_from + death.begins_s, self._counts_from + death.ends_s
            # Each draws its own faults and jitter.
            own = replace(gpu, seed=(seed if gpu.seed is None else gpu.seed) * GPUS_MAX + number)
            self._endpoints.append(Gpu(f"gpu-{number}", own, Death(begins, ends), self._clock))
            return self._endpoints[-1]

        return make

    async def _run(self) -> None:
        draw = Random(f"engine/{self._load.seed}").random
        runtime = Runtime(self._settings, self._clock, draw, self._make_endpoints)
        self._limits = intake_settings(runtime)
        self._engine = Engine(runtime)
        self._await_next_turn()
        await self._engine.run(self._last())

    async def _last(self) -> None:
        """Until the last request has its outcome."""
        await asyncio.sleep(self._load.warm_s)
        busy_s = self._busy_s()
        await asyncio.sleep(self._load.seconds)
        slots = self._gpus.count * self._gpus.each.slots
        self._busy_share = (self._busy_s() - busy_s) / (slots * self._load.seconds)
        self._none_left.clear()
        if self._under_way:
            await self._none_left.wait()

    def _busy_s(self) -> float:
        return sum(endpoint.gpu.stats().busy_seconds for endpoint in self._endpoints)

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
        parts, turns, values, random = self._parts, self._turns, self._values, self._random
        model, queue_s, deadline = settings.model, limits.queue_timeout_s, now + limits.total_timeout_s
        is_counted, owners_count = now >= self._counts_from, self._load.owners
        self._under_way += count
        for number in range(self._number, self._number + count):
            part, value = parts[next(turns)], next(values)
            tier, place, size = part.tier, now + part.target_s, len(value)
            owner = part.owners[int(random() * owners_count)]
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
            if came >= self._counts_from:
                part.tally.right(now - came, now, -1.0, outcome.call.batch_size)
        elif came >= self._counts_from:
            part.tally.failed(str(outcome.status), now - came, now)


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
            endpoints=[f"http://gpu-{number}/" for number in range(1, gpus + 1)],
            timeout_s=upstream.timeout_s,
            attempts=upstream.attempts,
            pad=upstream.pad,
        ),
    )
