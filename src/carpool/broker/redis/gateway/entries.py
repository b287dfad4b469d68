"""How a request, or a task, becomes an entry of the queue. Pure."""

from collections.abc import Iterable, Mapping

from carpool.broker.redis.formats import ENTRY_FORMAT, Header, encode_header, encode_more, encode_record
from carpool.broker.redis.keys import lane_name, line_name
from carpool.broker.redis.types import QueueStream
from carpool.core.request import Request
from carpool.core.trace import text_of

# A script holds up Redis's other clients: no call carries more than this.
ENTRIES_A_CALL_MAX = 256
CALL_BYTES_MAX = 4 * 1024 * 1024
# The gateway of a task: its outcome is kept in Redis.
NOBODY = b""


def stream_of(request: Request, offsets_ms: Mapping[bytes, int]) -> QueueStream:
    """The stream of a request in any shard, and its place in the order.

    A request without parameters is never refused because other clients send many different ones.
    """
    name = line_name(request.tier, request.is_task, request.is_over, request.is_late)
    field = lane_name(request.model, request.lane_key) + b":" + name
    return QueueStream(field, request.model, offsets_ms.get(name, 0), is_bound=bool(request.lane_key))


def values_of(requests: Iterable[Request], now: float, now_ms: int) -> list[tuple[bytes, bytes]]:
    """The values of their entries, if they are sent now: a record, and the client's bytes. `now_ms`: what the clock of
    the shard's server shows; 0 if that is not known.
    """
    return [(record_of(request, int((request.deadline - now) * 1000), now_ms), request.input) for request in requests]


def record_of(request: Request, remaining_ms: int, now_ms: int) -> bytes:
    """What the value of its entry begins with."""
    more = b""
    if request.trace is not None:
        result_key = request.result_key if request.is_task else None
        more = encode_more(request.client_id, result_key or b"", text_of(request.trace))
    elif request.is_task and (request.client_id or request.result_key):
        more = encode_more(request.client_id, request.result_key or b"")
    return encode_record(request.number, request.id, request.owner, remaining_ms, more, now_ms)


def header_of(request: Request, gateway: bytes) -> bytes:
    """The header of an entry; `gateway` is the one that waits for its outcome."""
    return encode_header(
        Header(
            version=ENTRY_FORMAT,
            gateway=gateway,
            model=request.model,
            parameters=request.parameters,
            lane=request.lane,
            tier=request.tier,
            is_task=gateway == NOBODY,
            # A task waits as long as it must.
            queue_ms=0 if request.is_task else max(1, round(request.queue_timeout_s * 1000)),
        )
    )


def parts_of(requests: list[Request], values: list[bytes]) -> Iterable[tuple[list[Request], list[bytes]]]:
    """Cut what is to be queued into calls of a bounded size."""
    size = sum(map(len, values))
    if len(values) <= ENTRIES_A_CALL_MAX and size <= CALL_BYTES_MAX:
        return [(requests, values)]
    parts: list[tuple[list[Request], list[bytes]]] = []
    start = size = 0
    for index, value in enumerate(values):
        if index > start and (index - start >= ENTRIES_A_CALL_MAX or size + len(value) > CALL_BYTES_MAX):
            parts.append((requests[start:index], values[start:index]))
            start, size = index, 0
        size += len(value)
    parts.append((requests[start:], values[start:]))
    return parts
