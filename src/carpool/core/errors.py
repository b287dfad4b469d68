"""The one tree of errors, sorted by who is at fault.

Every refusal or failure that a client can see is one of these classes. A class carries what each face needs
(HTTP status, gRPC code), whether the same request may succeed later, and the public title. An instance adds
`detail`: what was wrong and what to do, for the client to read. Details never carry payloads or credentials.

`docs/errors.md` is generated from this file by `make docs`.
"""

from typing import ClassVar

# gRPC's status codes, by the names that the tree has for them.
GRPC_STATUS = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}


def without_frames(failure: BaseException) -> None:
    """Let an exception that is kept as a value forget the frames that it, and what led to it, came through.

    Frames hold bodies and answers. One of them often holds the exception in turn, in a variable: then all of it is a
    reference cycle, and stays in memory until the garbage collector runs, which is rare (app.py).
    """
    link: BaseException | None = failure
    while link is not None:
        link.__traceback__ = None
        cause = link.__cause__ or link.__context__
        link.__cause__ = link.__context__ = None
        link = cause


class CarpoolError(Exception):
    """The root: never raised itself."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False
    title: ClassVar[str] = "Error"

    __slots__ = ("allow", "detail", "header_lines", "predicted_wait_ms", "retry_after_s")

    def __init__(
        self,
        detail: str,
        *,
        retry_after_s: int | None = None,
        allow: str | None = None,
        predicted_wait_ms: int | None = None,
        header_lines: bytes = b"",
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        # Whole seconds for the Retry-After header; None where waiting would not help or is not known.
        self.retry_after_s = retry_after_s
        # The Allow header of a 405.
        self.allow = allow
        # How long a request that is refused because of that would have waited.
        self.predicted_wait_ms = predicted_wait_ms
        # Further HTTP headers that belong to it, each with its line end.
        self.header_lines = header_lines


# The client's fault: the same request will fail again.


class ClientError(CarpoolError):
    """The request itself is at fault."""

    status = 400
    grpc_code = "INVALID_ARGUMENT"


class Malformed(ClientError):
    """The bytes are not the HTTP or JSON that the contract asks for."""

    code = "malformed"
    title = "Malformed request"


class Unauthorized(ClientError):
    """No credential, or one that is not valid."""

    code = "unauthorized"
    status = 401
    grpc_code = "UNAUTHENTICATED"
    title = "Credential missing or not valid"


class Forbidden(ClientError):
    """The credential is valid but does not reach this far."""

    code = "forbidden"
    status = 403
    grpc_code = "PERMISSION_DENIED"
    title = "Not allowed"


class NotFound(ClientError):
    """There is no such path."""

    code = "not-found"
    status = 404
    grpc_code = "NOT_FOUND"
    title = "No such resource"


class UnknownModel(NotFound):
    """The model named is not served here."""

    code = "unknown-model"
    title = "No such model"


class UnknownTask(NotFound):
    """The task never was, has expired, was deleted, or belongs to somebody else."""

    code = "unknown-task"
    title = "No such task"


class MethodNotAllowed(ClientError):
    """The path exists, but not for this method."""

    code = "method-not-allowed"
    status = 405
    grpc_code = "UNIMPLEMENTED"
    title = "Method not allowed"


class ReceiveTimeout(ClientError):
    """The request did not arrive whole in time."""

    code = "receive-timeout"
    status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    retryable = True
    title = "Request not received in time"


class TooLarge(ClientError):
    """The body is over the limit."""

    code = "too-large"
    status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    title = "Body too large"


class UnsupportedMedia(ClientError):
    """The Content-Type is not one this path takes."""

    code = "unsupported-media"
    status = 415
    title = "Media type not supported"


class ExpectationFailed(ClientError):
    """An Expect header other than 100-continue."""

    code = "expectation-failed"
    status = 417
    title = "Expectation not supported"


class InputRefused(ClientError):
    """The model refused this input."""

    code = "input-refused"
    status = 422
    title = "The model refused this input"


class InputDenied(ClientError):
    """The input is longer than this model may get, or has something in it that the operator denies."""

    code = "input-denied"
    status = 422
    title = "This input is not allowed"


class UpgradeRequired(ClientError):
    """This path is for another protocol than plain HTTP."""

    code = "upgrade-required"
    status = 426
    grpc_code = "UNIMPLEMENTED"
    title = "Upgrade required"


class CallbackDenied(ClientError):
    """The task's `callback_url` is not one that this gateway sends to."""

    code = "callback-denied"
    title = "No webhook goes there"


class HeadersTooLarge(ClientError):
    """The request line and headers are over their limits."""

    code = "headers-too-large"
    status = 431
    grpc_code = "RESOURCE_EXHAUSTED"
    title = "Headers too large"


class ClientLeft(ClientError):
    """The client hung up or cancelled; nobody reads this, it is only counted."""

    code = "client-left"
    status = 499
    grpc_code = "CANCELLED"
    title = "Client left"


# Overload: the same request may succeed a little later.


class OverloadError(CarpoolError):
    """Carpool refuses in order to keep its promises to those already admitted."""

    status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    retryable = True


class RateLimited(OverloadError):
    """Over the rate limit of this credential."""

    code = "rate-limited"
    status = 429
    title = "Over the rate limit"


class Shed(OverloadError):
    """More comes than can be served in time, and this request would have waited too long."""

    code = "shed"
    title = "Too much comes in right now"


class QueueFull(OverloadError):
    """The broker holds as many requests, or bytes, as it may."""

    code = "queue-full"
    title = "The queue is full"


class UpstreamDown(OverloadError):
    """Every endpoint is left alone for a moment because all of them failed."""

    code = "upstream-down"
    grpc_code = "UNAVAILABLE"
    title = "The inference API fails"


class Unresolved(OverloadError):
    """A batch with this request in it was refused, and there was no time to find out which input it was."""

    code = "unresolved"
    grpc_code = "UNAVAILABLE"
    title = "The batch of this request failed"


class BrokerMemoryFull(OverloadError):
    """The memory of the broker is nearly used up."""

    code = "broker-memory"
    status = 429
    title = "The broker's memory is nearly full"


class WebhooksFull(OverloadError):
    """As many outcomes wait to be sent to receivers as may."""

    code = "webhooks-full"
    title = "Too many webhooks are waiting"


# The upstream's fault.


class UpstreamError(CarpoolError):
    """The fixed API did not give a usable answer."""

    status = 502
    grpc_code = "UNAVAILABLE"
    retryable = True


class UpstreamFailed(UpstreamError):
    """The upstream was unreachable, answered an error, or broke off, on every attempt."""

    code = "upstream-failed"
    title = "The inference API failed"


class UpstreamProtocolFault(UpstreamError):
    """The upstream answered, but not what its protocol says: no output can be trusted to be the right one."""

    code = "upstream-protocol-fault"
    retryable = False
    title = "The inference API gave an answer that cannot be used"


class UpstreamRefused(UpstreamError):
    """The upstream refused the whole batch in a way that another attempt would only repeat."""

    code = "upstream-refused"
    retryable = False
    title = "The inference API refused the batch"


class DeadlineExceeded(UpstreamError):
    """No result in time."""

    code = "deadline-exceeded"
    status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    title = "No result in time"


def own_deadline_passed(timeout_s: float) -> DeadlineExceeded:
    """The error for a request whose client set the deadline itself."""
    return DeadlineExceeded(f"no result within the {timeout_s * 1000:g} ms that the request itself allowed")


def total_time_passed(timeout_s: float) -> DeadlineExceeded:
    """The error for a synchronous request that waited for an answer as long as any request may."""
    return DeadlineExceeded(f"no result within {round(timeout_s, 3):g} s (`broker.total_timeout_s`)")


def task_time_passed() -> DeadlineExceeded:
    """The error for a task that had no outcome in time; a process that took it over does not know how long it had."""
    return DeadlineExceeded("no result in the task's time (`tasks.timeout_s`, or less where its client said so)")


class QueueTimeout(DeadlineExceeded):
    """The request waited its whole queue time without a free slot."""

    code = "queue-timeout"
    title = "No free slot in time"


def queue_time_passed(timeout_s: float) -> QueueTimeout:
    """The error for a request that waited too long for a slot."""
    waited = f"no slot was free within {timeout_s:g} s (`broker.queue_timeout_s`); try again, or as a task"
    return QueueTimeout(waited, retry_after_s=1)


# Carpool's own fault or state.


class GatewayError(CarpoolError):
    """Carpool itself could not go on with the request."""

    grpc_code = "INTERNAL"


class Draining(GatewayError):
    """This process is about to leave."""

    code = "draining"
    status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True
    title = "This gateway is shutting down"


class GivenBack(Draining):
    """This batcher cannot serve a request, and another one can: it goes back to the queue. No client sees this."""

    def __init__(self, detail: str, *, is_alone: bool = False) -> None:
        super().__init__(detail)
        # From now on it is sent alone: a second endpoint is to say whether its input is at fault.
        self.is_alone = is_alone


class JournalFailed(GatewayError):
    """The task could not be written to the journal, so it was not accepted."""

    code = "journal-failed"
    status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True
    title = "Tasks cannot be stored right now"


class BrokerDown(GatewayError):
    """The broker (Redis) cannot be used right now."""

    code = "broker-down"
    status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True
    title = "The broker cannot be reached"


class InternalError(GatewayError):
    """A defect in Carpool. The log has the details."""

    code = "internal"
    status = 500
    title = "Internal error"


class HttpVersionNotSupported(ClientError):
    """Neither HTTP/1.0 nor HTTP/1.1."""

    code = "http-version"
    status = 505
    title = "HTTP version not supported"


def all_errors(root: type[CarpoolError] = CarpoolError) -> list[type[CarpoolError]]:
    """Every class of the tree that a client can meet, depth first (those with a code of their own)."""
    found = [root] if "code" in vars(root) and root is not CarpoolError else []
    for child in root.__subclasses__():
        found.extend(all_errors(child))
    return found
