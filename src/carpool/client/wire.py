"""What is sent to a gateway, how its answers read, and whether a call is made again. Pure: both clients use it.

1. Only what may succeed later is repeated (`CarpoolError.retryable`), at most `retries` times a call.
2. All calls of a client share one budget: a share of them, and a few to begin with. While a gateway refuses all
   clients, the retries of all would keep it overloaded.
3. The pause is what the gateway asks for (Retry-After), else it doubles; with jitter, so that clients refused together
   do not come back together. It is never less than what was asked for.
4. Nothing is repeated when its pause would end after the deadline.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote

import msgspec

from carpool.core.errors import (
    BrokerDown,
    CarpoolError,
    ClientError,
    GatewayError,
    InternalError,
    JournalFailed,
    OverloadError,
    UpstreamError,
    all_errors,
)
from carpool.core.problem import TYPE_PREFIX
from carpool.core.token_bucket import TokenBucket

T = TypeVar("T")
# The store of tasks failed: it may have kept this one.
DOUBTFUL = (BrokerDown, JournalFailed)
PAUSE_FIRST_S = 0.1
PAUSE_LAST_S = 5.0
# The share that jitter adds at most to a pause that the gateway asks for; PAUSE_FIRST_S if that is more.
JITTER_SHARE = 0.25
_ERRORS = {kind.code: kind for kind in all_errors()}


class Unreachable(GatewayError):
    """No gateway could be asked, or the connection ended before its answer was here."""

    # It has no code of its own: no gateway answers it.
    retryable = True
    title = "No answer from the gateway"


class LostAnswer(Unreachable):
    """The connection ended before the answer was here: the gateway may have done what it was asked for."""


class CallOptions(TypedDict, total=False):
    """The options of a call."""

    model: str
    parameters: Mapping[str, Any]
    # How long it may take, retries and waiting for a place included.
    timeout_s: float
    # Sent as X-Request-Id with each attempt, and what operators find it by.
    request_id: str
    # What this program calls itself.
    client_id: str


class SubmitOptions(CallOptions, total=False):
    """The options of a task."""

    # How long the task may take; `timeout_s` is for the submission.
    task_timeout_s: float
    # Where its result is sent (docs/webhooks.md).
    callback_url: str


class Prediction(msgspec.Struct, frozen=True):
    """The answer to one input."""

    output: Any
    request_id: str
    # latency_ms, queue_ms, upstream_ms, batch_size, model, cached, and what the upstream tells.
    metadata: dict[str, Any] = {}


class TaskOutput(msgspec.Struct, frozen=True):
    """What became of a task that succeeded."""

    task_id: str
    output: Any
    # RFC 3339.
    timestamp: str


class Answer(msgspec.Struct, frozen=True):
    """What became of one of many inputs: a prediction, or the error in its place."""

    # The place of its input, from 0.
    index: int
    input: Any
    prediction: Prediction | None
    error: CarpoolError | None

    @property
    def output(self) -> Any:
        """The output; raises the error."""
        if self.prediction is None:
            raise self.error or InternalError("there is neither an output nor an error")
        return self.prediction.output


class ClientCall(NamedTuple):
    """One request to the gateway, but for what changes with each attempt."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    # Whether it does no harm to send it again when it may have arrived.
    is_repeatable: bool = True
    # Whether the client sends the gateway how much time is left.
    has_deadline: bool = False

    def may_repeat(self, error: CarpoolError) -> bool:
        """Whether it may be sent again after this error. An error without a code is not the gateway's own refusal."""
        is_refusal = error.code != CarpoolError.code and not isinstance(error, DOUBTFUL)
        nothing_came_of_it = is_refusal or type(error) is Unreachable
        return error.retryable and (self.is_repeatable or nothing_came_of_it)


class _Problem(msgspec.Struct):
    type: str = ""
    detail: str = ""
    request_id: str = ""
    predicted_wait_ms: int | None = None


class Accepted(msgspec.Struct):
    """The 202 of a task."""

    task_id: str


class _Task(msgspec.Struct):
    task_id: str
    status: Literal["PENDING", "SUCCESS", "FAILED"]
    timestamp: str
    output: Any = None
    error: _Problem = msgspec.field(default_factory=_Problem)


_encode = msgspec.json.Encoder().encode


def prediction_call(value: Any, options: CallOptions, request_id: str) -> ClientCall:
    """A synchronous request, with its mode: a gateway may make a task of a request without one."""
    body = body_of(value, options) | {"mode": "sync"}
    return ClientCall("POST", "/v1/inference", headers_of(options, request_id), _encode(body), has_deadline=True)


def submission(value: Any, options: SubmitOptions, request_id: str) -> ClientCall:
    """A task. Sent twice it would be two tasks: if it may have arrived, its submitter decides whether to repeat it."""
    body = body_of(value, options) | {"mode": "async"}
    if "callback_url" in options:
        body["callback_url"] = options["callback_url"]
    headers = headers_of(options, request_id)
    if "task_timeout_s" in options:
        headers["X-Request-Timeout-Ms"] = str(timeout_ms(options["task_timeout_s"]))
    return ClientCall("POST", "/v1/inference", headers, _encode(body), is_repeatable=False)


def poll(task_id: str, wait_ms: int) -> ClientCall:
    """A look at a task, which waits so long for its outcome."""
    return ClientCall("GET", f"/v1/result/{quote(task_id, safe='')}?wait_ms={wait_ms}", {})


def cancellation(task_id: str) -> ClientCall:
    """Cancel a task, or forget its result."""
    return ClientCall("DELETE", f"/v1/result/{quote(task_id, safe='')}", {}, is_repeatable=False)


def body_of(value: Any, options: CallOptions) -> dict[str, Any]:
    """The fields that requests and tasks have."""
    names: tuple[Literal["model", "parameters", "client_id"], ...] = ("model", "parameters", "client_id")
    return {"input": value} | {name: options[name] for name in names if name in options}


def headers_of(options: CallOptions, request_id: str) -> dict[str, str]:
    """Those that stay the same in each attempt."""
    return {"Content-Type": "application/json", "X-Request-Id": options.get("request_id", request_id)}


def timeout_ms(seconds: float) -> int:
    """A deadline as the gateway takes it."""
    return min(max(1, int(seconds * 1000)), 999_999_999)


def task_in(body: bytes) -> TaskOutput | CarpoolError | None:
    """What became of a task; None while it waits."""
    task = read(body, _Task)
    if task.status == "PENDING":
        return None
    if task.status == "FAILED":
        return _error(task.error, 500, None)
    return TaskOutput(task.task_id, task.output, task.timestamp)


def error_in(status: int, body: bytes, retry_after: str | None) -> CarpoolError:
    """The error in a response: of the gateway's own class, else of the class nearest to the status."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        problem = _Problem()
    is_seconds = retry_after is not None and retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 10
    return _error(problem, status, int(retry_after or 0) if is_seconds else None)


def _error(problem: _Problem, status: int, retry_after_s: int | None) -> CarpoolError:
    kind = _ERRORS.get(problem.type.removeprefix(TYPE_PREFIX)) or _kind_of(status)
    detail = problem.detail or f"HTTP status {status}"
    error = kind(detail, retry_after_s=retry_after_s, predicted_wait_ms=problem.predicted_wait_ms)
    if problem.request_id:
        error.add_note(f"request {problem.request_id}")
    return error


def _kind_of(status: int) -> type[CarpoolError]:
    if status in (429, 503):
        return OverloadError
    if status in (502, 504):
        return UpstreamError
    return ClientError if 400 <= status < 500 else GatewayError


def read(body: bytes, kind: type[T]) -> T:
    """An answer of the gateway: Prediction for a synchronous request, Accepted for a task."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise InternalError("the answer is not one of a gateway of Carpool; is this its address?") from failure


class ClientRetryBudget(TokenBucket):
    """How many calls may be repeated: never more than `reserve` + `share` of those that were made. No time adds any."""

    __slots__ = ("_share",)

    def __init__(self, share: float = 0.1, reserve: float = 10.0) -> None:
        if not 0 <= share <= 1:
            raise ValueError("the share of calls that are repeated must be between 0 and 1")
        super().__init__(0.0, reserve)
        self._share = share

    def called(self) -> None:
        """A call is made, for the first time. Saved retries never exceed the reserve."""
        self.add(self._share)


def pause_s(attempt: int, retry_after_s: float | None, luck: float) -> float:
    """How long to wait after the attempt with this number, the first is 0; `luck` is between 0 and 1."""
    if retry_after_s is not None:
        return retry_after_s + luck * max(PAUSE_FIRST_S, retry_after_s * JITTER_SHARE)
    longest = min(PAUSE_LAST_S, PAUSE_FIRST_S * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * luck)
