"""The way in, the same for every face: who asks, for which model, one Request for each input, and its admission.

A face translates: bytes of its protocol to the arguments here, outcomes back to bytes. It gives

1. `identify`, before it parses a body, what came with the call; the Caller is then known, or was refused; a Caller
   with a `limit` then has to `enter`, which may take a moment;
2. `ask` an input whose client waits: the waiter gets the outcome, also if that is a refusal;
3. `ask_all` several of them that belong together: all come in, or none;
4. `submit` a task, `look` at one, `delete` one;
5. `cancel` the requests of clients that have left.
"""

import logging
import secrets
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import msgspec

from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError, ClientLeft, InternalError, UnknownModel, without_frames
from carpool.core.names import ProtocolName
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS, Admission, Caller, Cancels, Peer, RequestOptions, Sharing, TaskBoard
from carpool.core.request import Request, Waiter
from carpool.core.tensors import Data, as_input
from carpool.core.timers import SharedTurns
from carpool.core.trace import Trace
from carpool.face.octets import Octets

logger = logging.getLogger("carpool.face")

# So many requests of a call are made in a turn of the event loop: each takes some microseconds.
PREPARED_A_TURN = 256
# Called with all outcomes of a call, or with one error and the number of the input that failed.
WhenAllEnded = Callable[[Sequence[Any], int | None], None]
# Called with each output as it comes; what it returns is kept in its place.
Came = Callable[[int, Output], Any]
# The longest long poll: proxies end what is silent for a minute.
WAIT_MS_MAX = 30_000
# How many of the last requests can be asked for at /internal/requests/{id}.
RECENT_KEPT = 8192
# Ended requests keep parameters, lane and callback: so many bytes over all of them.
RECENT_BYTES_MAX = 8 * 1024 * 1024
# A prefix of this process and a number: unique, and cheaper than drawing randomness for each request.
_prefix = f"req_{secrets.token_hex(6)}-"
_numbers = count(1)


def new_request_id() -> str:
    """An id for a request whose client gave it none."""
    return f"{_prefix}{next(_numbers)}"


def make_uuids() -> None:
    """Give requests UUIDs from now on, all of this process: of version 4, whose last twelve digits are a number."""
    global _prefix, _numbers
    _prefix = str(uuid.uuid4())[: -len("000000000000")]
    _numbers = count(10**11 + secrets.randbelow(8 * 10**11))


class ServedTensors(msgspec.Struct, frozen=True):
    """What is known of the tensors of a model that takes some."""

    # The one version that is served; "" where the model has no versions.
    version: str = ""
    # Of its only input, if that is configured; the shape with the batch dimension.
    name: str = ""
    datatype: str = ""
    shape: tuple[int, ...] = ()


class ServedModel(msgspec.Struct, frozen=True):
    """What a face must know of a model."""

    name: str
    body_bytes_max: int
    # Binary input as the model's protocol has it: a JSON value, or packed (core/tensors.py).
    binary_input: Callable[[bytes], bytes]
    # For protocols that look into inputs before they are admitted: raises Malformed.
    prepare: Callable[[Request], None] | None = None
    # For models whose results are kept: it stands before admission.
    sharing: Sharing | None = None
    # What its upstream speaks, and so what inputs and outputs are.
    protocol: ProtocolName = "json"
    # None: its inputs are no tensors.
    tensors: ServedTensors | None = None
    # Tiers whose requests at `/v1/inference` are tasks where neither the client nor its key says.
    task_tiers: frozenset[int] = frozenset()
    # Where clients send bytes and get some: those of an output. None: they send JSON, and get JSON.
    output_bytes: Callable[[Data], Octets] | None = None


class IntakeSettings(msgspec.Struct, frozen=True):
    """What the way in must know of the configuration."""

    default_model: str
    # Seconds to add to the arrival for a place in the order, by tier.
    tier_target_s: tuple[float, ...]
    queue_timeout_s: float
    total_timeout_s: float
    task_timeout_s: float


class Recent:
    """The last requests, for people who look for one by its id: bounded by number, and by bytes.

    A lookup scans all of them: only a person who looks for a request pays.
    """

    def __init__(self, number_max: int, bytes_max: int = RECENT_BYTES_MAX) -> None:
        # Of requests whose `size_of` is 0, and of the others: each may have so many.
        self._number_max = number_max
        self._bytes_max = bytes_max
        plain: deque[Request] = deque(maxlen=number_max)
        self._plain = plain
        # On the hot path, for a request whose `size_of` is 0.
        self.add_plain: Callable[[Request], None] = plain.append
        self._long: deque[Request] = deque()
        self._bytes = 0

    def __iter__(self) -> Iterator[Request]:
        return chain(self._plain, self._long)

    def add(self, request: Request) -> None:
        """One more; the oldest go where there is no room."""
        size = size_of(request)
        if not size:
            self.add_plain(request)
            return
        self._long.append(request)
        self._bytes += size
        while self._bytes > self._bytes_max or len(self._long) > self._number_max:
            self._bytes -= size_of(self._long.popleft())


def size_of(request: Request) -> int:
    """What a request keeps when it is over, beside what all of them have. It stays the same in a request's life."""
    return len(request.parameters) + len(request.lane) + len(request.callback_url)


class Intake:
    """Makes requests, and lets them in."""

    def __init__(
        self,
        gate: Admission,
        queue: Cancels,
        tasks: TaskBoard,
        models: dict[str, ServedModel],
        settings: IntakeSettings,
        clock: Clock = monotonic,
        identify: Callable[[dict[bytes, bytes], Peer], Caller] | None = None,
    ) -> None:
        self._gate = gate
        # The Caller, by the headers of a call (names in lower case) and its peer; raises the refusal.
        self.identify = identify or gate.identify
        # Whether a synchronous request is refused, whatever is in its body; None where that cannot be known.
        self.early = gate.early
        # The next step, for callers with a limit; see core.ports.RateLimits.
        self.enter, self.when_known = gate.enter, gate.when_known
        # For tasks; and for the synchronous requests of clients that have left.
        self.look, self.leave, self.delete = tasks.look, tasks.leave, tasks.delete
        self.cancel = queue.cancel
        self._models = models
        self.default_model = models[settings.default_model]
        self._settings = settings
        self._clock = clock
        self._recent = Recent(RECENT_KEPT)
        self._add_plain = self._recent.add_plain
        # Work of all faces in several steps: together it takes a bounded part of each turn of the event loop.
        # And the reading of long bodies, one step each: no short message waits behind them.
        self.turns = SharedTurns()
        self.long_turns = SharedTurns()

    def model(self, name: str, caller: Caller) -> ServedModel:
        """The model with this name; raises UnknownModel, also for a model that the caller may not use.

        The error names the models that the caller may use: it cannot find out which others exist.
        """
        model = self._models.get(name)
        if model is None or (caller.models is not None and name not in caller.models):
            raise self._unknown_to(caller)
        return model

    def models(self) -> Collection[ServedModel]:
        """All of them."""
        return self._models.values()

    def models_of(self, caller: Caller) -> Collection[ServedModel]:
        """Those that a caller may ask for."""
        allowed = caller.models
        return [model for model in self._models.values() if allowed is None or model.name in allowed]

    def _unknown_to(self, caller: Caller) -> UnknownModel:
        names = [model.name for model in self.models_of(caller)]
        if not names:
            return UnknownModel("this gateway serves no model that this credential is for")
        or_none = ", or none" if self.default_model.name in names else ""
        return UnknownModel(f"this gateway serves {', '.join(names)}; name one of these{or_none}")

    def ask(
        self,
        caller: Caller,
        model: ServedModel,
        parameters: bytes,
        value: bytes,
        request_id: str,
        waiter: Waiter,
        ticket: Any = None,
        client_id: str = "",
        options: RequestOptions = NO_OPTIONS,
    ) -> Request:
        """Let a synchronous request in. A refused request has its outcome, the refusal, when this returns.

        `parameters` are canonical JSON, or b""; `ticket` is the waiter's own. Raises Malformed if the model's protocol
        cannot carry the input, UnknownModel if the caller may not use the model: then the waiter is not called.
        """
        if caller.models is not None and model.name not in caller.models:
            raise self._unknown_to(caller)
        settings, tier, clock = self._settings, caller.tier, self._clock
        now = clock()
        request = Request(
            request_id,
            model.name,
            parameters,
            value,
            len(value) + len(parameters) + len(client_id),
            tier,
            now,
            now + settings.tier_target_s[tier],
            settings.queue_timeout_s,
            now + settings.total_timeout_s,
            waiter,
            ticket,
            caller.owner,
            client_id,
        )
        if options is not NO_OPTIONS:
            apply(options, request)
        if model.prepare is not None:
            model.prepare(request)
            self._recent.add(request)
        elif parameters:
            self._recent.add(request)
        else:  # it has no lane of its own yet: it keeps nothing when it is over
            self._add_plain(request)
        gate, limit = self._gate, caller.limit
        if limit is None or not limit.concurrent or (refusal := gate.hold((request,), limit.concurrent)) is None:
            refusal = gate.admit(request) if model.sharing is None else model.sharing.ask(request, options)
        if refusal is not None:
            request.settle(refusal, now)  # `_recent` must not keep the inputs of refused requests
        return request

    def ask_all(
        self,
        *,
        caller: Caller,
        model: ServedModel,
        parameters: bytes,
        values: Sequence[bytes],
        request_id: str,
        answer: "WhenAllEnded",
        came: "Came | None" = None,
        options: RequestOptions = NO_OPTIONS,
        begin_trace: Callable[[], Trace | None] | None = None,
        route: str = "",
    ) -> "RequestGroup":
        """Let the inputs of one call in, all or none; `answer` gets all outcomes in their order, or one error.

        The first input that is refused, or fails, ends the others; `answer` gets its error and its number, or None if
        the error is that of the whole call. What `came` returns for an output is kept in its place. A long call comes
        in over some turns of the event loop. Raises UnknownModel if the caller may not use the model.
        """
        if caller.models is not None and model.name not in caller.models:
            raise self._unknown_to(caller)
        group = RequestGroup(
            self.cancel, caller, model, parameters, values, request_id, options, begin_trace, answer, came, route
        )
        if values:
            step = partial(self._guarded, group, self._prepare_some)
            if len(values) > PREPARED_A_TURN:
                self.turns.now(step)
            else:
                step()
        else:
            group.tell([])
        return group

    def _guarded(self, group: "RequestGroup", step: Callable[["RequestGroup"], None]) -> None:
        """Do a step of letting a call in; if it fails, the whole call fails, and its client gets the error."""
        made, wanted = group.made, len(group.values)
        try:
            step(group)
        except Exception as failure:
            rest = made[len(group.requests) :]
            group.fail(as_error(failure), len(made) if len(made) < wanted else None)
            self._end_all(rest, ClientLeft("the client left"))

    def _prepare_some(self, group: "RequestGroup") -> None:
        """Make the next requests of a call; with the last of them, let all in."""
        values, requests, caller, model = group.values, group.made, group.caller, group.model
        if group.is_over:
            group.made = []
            self._end_all(requests, ClientLeft("the client left"))
            return
        for number in range(len(requests), min(len(requests) + PREPARED_A_TURN, len(values))):
            value = values[number]
            request = Request(
                group.request_id if len(values) == 1 else f"{group.request_id}.{number}",
                model.name,
                group.parameters,
                value,
                len(value) + len(group.parameters),
                caller.tier,
                0.0,
                0.0,
                self._settings.queue_timeout_s,
                0.0,
                group,
                number,
                caller.owner,
            )
            if model.prepare is not None:
                model.prepare(request)
            requests.append(request)
        if len(requests) < len(values):
            self.turns.later(partial(self._guarded, group, self._prepare_some))
        else:
            self._let_in(group)

    def _let_in(self, group: "RequestGroup") -> None:
        requests, options, settings = group.made, group.options, self._settings
        limit, sharing, now = group.caller.limit, group.model.sharing, self._clock()
        place, deadline = now + settings.tier_target_s[group.caller.tier], now + settings.total_timeout_s
        for request in requests:
            request.arrived, request.place, request.deadline = now, place, deadline
            if options is not NO_OPTIONS:
                apply(options, request)
            if group.begin_trace is not None:
                request.trace = group.begin_trace()
            self._recent.add(request)
        refusal = None
        if limit is not None and limit.concurrent:
            refusal = self._gate.hold(requests, limit.concurrent)
        if refusal is not None or len(requests) == 1:
            self._admit_all(group, refusal)
        elif sharing is None:
            self._judge(requests, group)
        else:  # which may take a moment
            sharing.needing(requests, options, lambda needing: self._guarded(group, partial(self._judge, needing)))

    def _judge(self, needing: Sequence[Request], group: "RequestGroup") -> None:
        """Let a call in, or refuse it; `needing` are its requests that no cached or shared result serves."""
        self._admit_all(group, self._gate.judge_all(needing) if needing and not group.is_over else None)

    def _admit_all(self, group: "RequestGroup", refusal: CarpoolError | None) -> None:
        """Let the requests of a call in, unless all of it is refused."""
        requests, options = group.made, group.options
        group.made = []
        gate, sharing, now = self._gate, group.model.sharing, self._clock()
        if refusal is not None:
            self._end_all(requests, refusal)
            group.fail(refusal)
            return
        for number, request in enumerate(requests):
            if group.is_over:  # an earlier request of the call has failed, or the client left
                self._end_all(requests[number:], ClientLeft("the client left"))
                return
            group.requests.append(request)
            refusal = gate.admit(request) if sharing is None else sharing.ask(request, options)
            if refusal is not None:
                group.requests.pop()
                request.settle(refusal, now)
            else:
                group.came_in = True

    def _end_all(self, requests: Sequence[Request], error: CarpoolError) -> None:
        """Settle requests that did not come in, without a waiter, so that they hold nothing any more."""
        now = self._clock()
        for request in requests:
            request.waiter, request.result = NOBODY, None
            request.settle(error, now)

    def submit(
        self,
        *,
        caller: Caller,
        model: ServedModel,
        parameters: bytes,
        value: bytes,
        client_id: str = "",
        callback_url: str = "",
        options: RequestOptions = NO_OPTIONS,
        accepted: Callable[[Request, CarpoolError | None], None],
    ) -> None:
        """Let a task in: `accepted(request, None)` once it is safe, or `accepted(request, error)`. Raises as `ask`.

        `callback_url`, "" if there is none, must have passed `check_callback`.
        """
        if caller.models is not None and model.name not in caller.models:
            raise self._unknown_to(caller)
        settings, tier, now = self._settings, caller.tier, self._clock()
        value = bytes(as_input(value))  # its output is kept as it comes, and read by any face: JSON for JSON
        request = Request(
            id=secrets.token_hex(16),  # unguessable: knowing the id is what lets a client read the result
            model=model.name,
            parameters=parameters,
            input=value,
            size=len(value) + len(parameters) + len(client_id) + len(callback_url),
            tier=tier,
            arrived=now,
            place=now + settings.tier_target_s[tier],
            queue_timeout_s=settings.task_timeout_s,
            deadline=now + settings.task_timeout_s,
            waiter=NOBODY,
            is_task=True,
            owner=caller.owner,
            client_id=client_id,
            callback_url=callback_url,
        )
        if options is not NO_OPTIONS:
            apply(options, request)
        if model.prepare is not None:
            model.prepare(request)
        self._recent.add(request)

        def told(error: CarpoolError | None) -> None:
            if error is not None:
                request.settle(error, self._clock())  # `_recent` must not keep the inputs of refused tasks
            accepted(request, error)

        if model.sharing is None:
            self._gate.admit_task(request, told)
        else:
            model.sharing.submit(request, options, told)

    def find_recent(self, request_id: str) -> Request | None:
        """One of the last requests, by its id."""
        found = next((request for request in self._recent if request.id == request_id), None)
        sharing = None if found is None else self._models[found.model].sharing
        return found if found is None or sharing is None else sharing.own(found)


def apply(options: RequestOptions, request: Request) -> None:
    """Treat a request as its client wishes: traced, and with its own deadline, if that is sooner than the configured.

    Its `queue_timeout_s` stays: requests with the same one are kept, and queued, together.
    """
    request.trace = options.trace
    timeout_s = options.timeout_s
    if timeout_s is not None and request.arrived + timeout_s < request.deadline:
        request.deadline, request.own_timeout_s = request.arrived + timeout_s, timeout_s


class RequestGroup(msgspec.Struct, eq=False):
    """Requests of one call: it waits for all of their outcomes, or for the first error."""

    cancel: Callable[[Request], object]
    caller: Caller
    model: ServedModel
    parameters: bytes
    values: Sequence[bytes]
    request_id: str
    options: RequestOptions
    begin_trace: Callable[[], Trace | None] | None
    answer: WhenAllEnded
    came: Came | None
    # For traces.
    route: str
    # Those that are made and have yet to come in, and those that came in.
    made: list[Request] = []
    requests: list[Request] = []
    # What became of each that has its outcome, by its number.
    outcomes: dict[int, Any] = {}
    # Whether a request came in; an error of the call is then traced with the requests.
    came_in: bool = False
    # Answered, or left.
    is_over: bool = False

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Take the outcome of one of them."""
        if self.is_over:
            return
        number: int = request.ticket
        if isinstance(outcome, ClientLeft):
            self.leave()
            return
        if isinstance(outcome, CarpoolError):
            self.fail(outcome, number)
            return
        try:
            self.outcomes[number] = outcome if self.came is None else self.came(number, outcome)
        except Exception as failure:
            self.fail(as_error(failure), number)
            return
        if len(self.outcomes) == len(self.values):
            self.tell([self.outcomes[number] for number in range(len(self.values))])

    def fail(self, error: CarpoolError, number: int | None = None) -> None:
        """Answer the call with an error, of one request or of all, and cancel the others."""
        if not self.is_over:
            answer = self.answer
            self.leave()
            _tell(answer, [error], number)

    def tell(self, outcomes: Sequence[Any]) -> None:
        """Answer the call with all outcomes."""
        answer = self.answer
        self._end()
        _tell(answer, outcomes, None)

    def leave(self) -> None:
        """The client has left, or the call has failed: cancel all requests."""
        requests = self.requests
        self._end()
        for request in requests:
            self.cancel(request)  # does nothing to those that have an outcome

    def _end(self) -> None:
        # `Recent` keeps the requests, and so this waiter, for a while: it must not keep outcomes and callbacks alive.
        self.is_over = True
        self.outcomes, self.requests, self.values = {}, [], ()
        self.answer, self.came, self.begin_trace = _tell_nobody, None, None


def _tell(answer: WhenAllEnded, outcomes: Sequence[Any], number: int | None) -> None:
    """Call `answer`; if it fails, call it with that error, so that the client gets an answer."""
    try:
        answer(outcomes, number)
    except Exception as failure:
        try:
            answer([as_error(failure)], None)
        except Exception:
            logger.exception("a call could not be told that it failed")


def _tell_nobody(outcomes: Sequence[Any], number: int | None) -> None:
    """Do nothing: the client has its answer, or has left."""


def as_error(failure: Exception) -> CarpoolError:
    """The error for the client; an exception that is not of the tree is a defect, and is logged."""
    if isinstance(failure, CarpoolError):
        without_frames(failure)
        return failure
    logger.error("a call failed", exc_info=failure)
    return InternalError("the gateway failed on this request")


class _Nobody:
    def settled(self, request: Request, outcome: Outcome) -> None:
        """Do nothing. Where tasks are kept, the store makes itself the waiter of a task."""


NOBODY = _Nobody()
