"""A simulated GPU: the fixed API to develop against, in this process (`sim:`) or behind HTTP (`carpool sim-gpu`).

1. A call holds a slot for `latency_ms` + `per_item_ms` an input + `per_kb_ms` a KB of all its inputs together +
   `padded_ms_per_kb` a KB of its number of inputs times the largest one's: what a GPU that pads a batch to its longest
   input pays. A KB is 1,000 bytes of an input's JSON (of KServe V2: of its row, with name and shape). All of that is
   multiplied by a draw from 1 - `jitter` to 1 + `jitter`. A call that finds every slot busy waits its turn.
2. A string is answered reversed, anything else as `{"echo": input}`: a checker can tell whose answer it got. With
   `dimensions` any input is answered by a vector of so many numbers, of which the first tells the same.
3. A call is answered once, or its connection is reset, or its client leaves; each of them frees its place.
4. Faults come at the end of the latency, when the work has been done: the harder case for a client that retries.
5. A batch with an input that is to be refused gets 400, one with poison 500, both whole: the API does not say which
   input it was.

The usual batch, ASCII strings without escapes, is reversed as a whole, without being decoded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Annotated, Any, NamedTuple, Protocol
from urllib.parse import parse_qsl
from zlib import crc32

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from carpool.core.clock import Clock, monotonic
from carpool.upstream.endpoint import AttemptFailedError, NoAnswerError, UpstreamCall, UpstreamResponse

# A hanging call holds its slot until its client leaves, and no longer than this.
HANG_S_MAX = 60.0

BYTES_PER_KB = 1000

_QUOTE = 0x22
_GARBAGE = b'{"outputs": [<!doctype html>'

Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]
Rate = Annotated[float, Meta(ge=0, le=1)]


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated GPU does with a call. The rates are shares of the calls and may sum up to 1."""

    latency_ms: Milliseconds = 200.0
    per_item_ms: Milliseconds = 0.0
    # Of the inputs' bytes together, and of as many as if each were as long as the longest.
    per_kb_ms: Milliseconds = 0.0
    padded_ms_per_kb: Milliseconds = 0.0
    # 0.2: each call takes 0.8 to 1.2 times its time.
    jitter: Rate = 0.0
    slots: Annotated[int, Meta(ge=1, le=65536)] = 1
    max_batch: Annotated[int, Meta(ge=1, le=65536)] = 64
    # Above 0 it is a model that embeds.
    dimensions: Annotated[int, Meta(ge=0, le=65536)] = 0
    # 500; no answer at all; connection reset; one output too few; 200 with bytes that are no JSON.
    error_rate: Rate = 0.0
    hang_rate: Rate = 0.0
    reset_rate: Rate = 0.0
    short_rate: Rate = 0.0
    garbage_rate: Rate = 0.0
    # A batch with an input whose JSON bytes contain this gets 500 whole; "" for none.
    poison: str = ""
    # The same with 400, as for an input that is not valid; goes before `poison`.
    refuse: str = ""
    # The same seed gives the same faults and the same jitter; None for others each time.
    seed: int | None = None


_FAULTS = ("error", "hang", "reset", "short", "garbage")


def simulation_settings(given: Mapping[str, Any]) -> SimulationSettings:
    """Settings from texts or values by name; raises ValueError with one line that names the key."""
    keys = SimulationSettings.__struct_fields__
    for key in given:
        if key not in keys:
            raise ValueError(f"unknown key {key!r}; there are {', '.join(keys)}")
    try:
        settings = msgspec.convert(given, SimulationSettings, strict=False)
    except msgspec.ValidationError as failure:
        wanted, _, key = str(failure).replace("`", "").partition(" - at $.")
        wanted = wanted.partition(", got")[0]
        raise ValueError(f"{key}={given[key]} is not valid: {wanted[0].lower()}{wanted[1:]}") from None
    rates = {f"{fault}_rate": getattr(settings, f"{fault}_rate") for fault in _FAULTS}
    if sum(rates.values()) > 1.0 + 1e-9:
        named = [name for name, rate in rates.items() if rate]
        raise ValueError(f"{' and '.join(named)} together must not be over 1")
    return settings


def parse_sim_url(url: str) -> SimulationSettings:
    """Settings of an address like `sim:?latency_ms=50&slots=64`; raises ValueError with one line that names the key."""
    scheme, _, query = url.partition("?")
    if scheme != "sim:":
        raise ValueError(f"a simulated GPU looks like sim:?latency_ms=50&slots=64, not {url!r}")
    given: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = value
    return simulation_settings(given)


class CallRefusedError(Exception):
    """The call itself is wrong (400); the text goes into the answer."""


class _Body(msgspec.Struct, gc=False):
    inputs: list[Raw] | UnsetType = UNSET
    instances: list[Raw] | UnsetType = UNSET


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_text = msgspec.json.Decoder(str).decode


class Batch(Protocol):
    """A call that was understood, in any protocol."""

    @property
    def inputs(self) -> Sequence[bytes | Raw]:
        """One for each output."""

    def answer(self, count: int) -> UpstreamResponse:
        """The answer to the first `count` inputs."""


class SimulatedBatch(NamedTuple):
    """A call that was understood."""

    inputs: list[Raw]
    # Where the outputs go.
    field: bytes
    # Its strings have ASCII characters only, and no escapes.
    is_plain: bool

    def answer(self, count: int) -> UpstreamResponse:
        """The answer to the first `count` inputs."""
        return UpstreamResponse(200, outputs_json(self, count))


def read_call(body: bytes) -> SimulatedBatch:
    """The batch in the body of a call; raises CallRefusedError."""
    try:
        is_ascii = body.isascii() or not body.decode()
        call = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CallRefusedError("the body must be JSON with a list called `inputs` or `instances`") from None
    if isinstance(call.inputs, list) and call.instances is UNSET:
        inputs, field = call.inputs, b"outputs"
    elif isinstance(call.instances, list) and call.inputs is UNSET:
        inputs, field = call.instances, b"predictions"
    else:
        raise CallRefusedError("the body must have one of `inputs` and `instances`")
    if not inputs:
        raise CallRefusedError("the batch is empty")
    return SimulatedBatch(inputs, field, is_ascii and b"\\" not in body)


def first_of_vector(value: bytes) -> float:
    """What the vector of an input begins with: as a 32-bit float it is the same."""
    return (crc32(value) & 0xFFFFFF) / 2**24


@lru_cache(16)
def rest_of_vector(dimensions: int) -> bytes:
    """The other numbers of every vector, as JSON with the comma before and the bracket behind them."""
    return b"".join(b",%.8f" % ((number * 7919 % 2000 - 1000) / 9999) for number in range(1, dimensions)) + b"]"


def vectors_json(batch: SimulatedBatch, count: int, dimensions: int) -> bytes:
    """The same of a model that embeds."""
    rest = rest_of_vector(dimensions)
    vectors = [b"[%r%b" % (first_of_vector(bytes(raw)), rest) for raw in batch.inputs[:count]]
    return b'{"%b":[%b]}' % (batch.field, b",".join(vectors))


def outputs_json(batch: SimulatedBatch, count: int) -> bytes:
    """The answer to the first `count` inputs of a batch."""
    inputs = batch.inputs[:count]
    if batch.is_plain and all(bytes(raw)[0] == _QUOTE for raw in inputs):
        outputs = bytearray(b",").join(reversed(inputs))
        outputs.reverse()  # each string, and their order again; the quotes change places, which makes no difference
    else:
        outputs = bytearray(b",").join([_output_json(bytes(raw)) for raw in inputs])
    return b"".join((b'{"', batch.field, b'":[', outputs, b"]}"))


def _output_json(value: bytes) -> bytes:
    """The answer to one input."""
    return msgspec.json.encode(_reversed_text(value)) if value[0] == _QUOTE else b'{"echo":%b}' % value


def _reversed_text(value: bytes) -> str:
    try:
        return _decode_text(value)[::-1]
    except msgspec.DecodeError:
        raise CallRefusedError("an input is not a valid JSON string") from None


def _has_input_with(text: bytes, body: bytes, inputs: Sequence[bytes | Raw]) -> bool:
    """Whether one of the inputs contains this text; none does if it is empty."""
    # The body first: one search settles the usual case.
    return text != b"" and text in body and any(text in bytes(raw) for raw in inputs)


def error_answer(status: int, text: str) -> UpstreamResponse:
    """An answer that carries an error text."""
    return UpstreamResponse(status, msgspec.json.encode({"error": text}))


class GpuStats(msgspec.Struct, kw_only=True):
    """What has come to a simulated GPU so far."""

    calls: int = 0
    # Of calls that were not refused at once.
    inputs: int = 0
    # Refused calls count here: a batch that is too large should be seen.
    largest_batch: int = 0
    # Calls received and not ended, waiting ones included.
    in_flight: int = 0
    most_in_flight: int = 0
    # Seconds that slots were held, summed over the slots.
    busy_seconds: float = 0.0


class SimulatedGpu:
    """One GPU: its slots, the calls that wait for them in order, and its faults."""

    def __init__(
        self,
        settings: SimulationSettings,
        random: Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Clock = monotonic,
    ) -> None:
        self.settings = settings
        self._random = random or Random(settings.seed)
        self._sleep = sleep
        self._clock = clock
        self._poison = settings.poison.encode()
        self._refuse = settings.refuse.encode()
        self._slots = asyncio.Semaphore(settings.slots)
        # When each call that runs began.
        self._running: dict[object, float] = {}
        self._stats = GpuStats()
        rates = [getattr(settings, f"{fault}_rate") for fault in _FAULTS]
        # The share of each fault, and of none.
        self._shares = [*rates, max(0.0, 1.0 - sum(rates))]

    async def infer(self, body: bytes, read: Callable[[bytes], Batch] = read_call) -> UpstreamResponse | None:
        """The answer to a call; None: its connection is reset. A bad call is refused at once, without a slot.

        Whoever leaves cancels this, which frees the slot, or the place among those that wait.
        """
        stats = self._stats
        stats.calls += 1
        try:
            answer, seconds = self._decide(body, read)
        except CallRefusedError as refusal:
            return error_answer(400, str(refusal))
        del body  # not needed any more, and a queue of them is heavy
        stats.in_flight += 1
        stats.most_in_flight = max(stats.most_in_flight, stats.in_flight)
        call = object()
        try:
            async with self._slots:
                self._running[call] = self._clock()
                await self._sleep(seconds)
        finally:
            stats.in_flight -= 1
            if (began := self._running.pop(call, None)) is not None:
                stats.busy_seconds += self._clock() - began
        return answer

    def stats(self) -> GpuStats:
        """The counts so far, running calls' time included."""
        now = self._clock()
        busy_seconds = self._stats.busy_seconds + sum(now - began for began in self._running.values())
        return msgspec.structs.replace(self._stats, busy_seconds=round(busy_seconds, 3))

    def _decide(self, body: bytes, read: Callable[[bytes], Batch]) -> tuple[UpstreamResponse | None, float]:
        """The answer to a call and how long it takes; raises CallRefusedError."""
        settings = self.settings
        batch = read(body)
        count = len(batch.inputs)
        self._stats.largest_batch = max(self._stats.largest_batch, count)
        if count > settings.max_batch:
            raise CallRefusedError(f"batch size {count} > maximum {settings.max_batch}")
        self._stats.inputs += count
        [fault] = self._random.choices((*_FAULTS, ""), self._shares)
        seconds = self._seconds(batch.inputs)
        if fault == "hang":
            return None, HANG_S_MAX
        if fault == "reset":
            return None, seconds
        if _has_input_with(self._refuse, body, batch.inputs):
            return error_answer(400, "this batch is not valid"), seconds
        if fault == "error" or _has_input_with(self._poison, body, batch.inputs):
            return error_answer(500, "the model failed on this batch"), seconds
        if fault == "garbage":
            return UpstreamResponse(200, _GARBAGE), seconds
        answered = count - 1 if fault == "short" else count
        if settings.dimensions and isinstance(batch, SimulatedBatch):
            return UpstreamResponse(200, vectors_json(batch, answered, settings.dimensions)), seconds
        return batch.answer(answered), seconds

    def _seconds(self, inputs: Sequence[bytes | Raw]) -> float:
        """How long a call with these inputs takes (rule 1)."""
        settings = self.settings
        took_ms = settings.latency_ms + settings.per_item_ms * len(inputs)
        if settings.per_kb_ms or settings.padded_ms_per_kb:
            sizes = [len(each) for each in inputs]
            padded = len(sizes) * max(sizes)
            took_ms += (settings.per_kb_ms * sum(sizes) + settings.padded_ms_per_kb * padded) / BYTES_PER_KB
        if settings.jitter:
            took_ms *= self._random.uniform(1.0 - settings.jitter, 1.0 + settings.jitter)
        return took_ms / 1000.0


class SimulatedEndpoint:
    """The upstream address `sim:`: a simulated GPU in this process, without sockets."""

    def __init__(
        self,
        name: str,
        settings: SimulationSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Clock = monotonic,
    ) -> None:
        self.name = name
        self.slots = settings.slots
        self.gpu = SimulatedGpu(settings, sleep=sleep, clock=clock)

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Answer one call; raises AttemptFailedError on a reset or past `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.gpu.infer(call.body)
        except TimeoutError:
            raise NoAnswerError(timeout_s) from None
        if answer is None:
            raise AttemptFailedError("the connection was reset")
        return answer

    async def accepts_connections(self) -> bool:
        """A simulated GPU is always there."""
        return True

    async def close(self) -> None:
        """There is nothing to give up."""
