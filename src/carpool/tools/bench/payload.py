"""What a request carries, and whether an answer is its own.

The input is a JSON string of a fixed length: a run id and the request's number (together a nonce that no
other request has), then filler that is the same for all. The upstream answers it reversed, so the answer's
bytes are known in advance. All but the number is built once: making a request is one join, checking an answer
three compares.
"""

from typing import Any, Literal

import msgspec

Expect = Literal["reversed", "echo"]

NUMBER_DIGITS = 8
RUN_ID_DIGITS = 12
# Quotes, run id and number: a shorter input could not be distinguished from another one.
PAYLOAD_BYTES_MIN = 2 + RUN_ID_DIGITS + NUMBER_DIGITS

# No character repeats within reach of its neighbours: a shifted or cut filler cannot pass for the right one.
FILLER_ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

OUTPUT_KEY, QUEUE_KEY, BATCH_KEY = b'"output":', b'"queue_ms":', b'"batch_size":'

# What an answer tells about its way: queue_ms (below 0: unknown) and batch_size (0: unknown).
Journey = tuple[float, int]
NOT_TOLD: Journey = (-1.0, 0)


class _Metadata(msgspec.Struct):
    queue_ms: float | None = None
    batch_size: int | None = None


class _Answer(msgspec.Struct):
    # Any JSON is an answer; only the expected string is a right one.
    output: Any
    metadata: _Metadata | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Payload:
    """Makes the requests of one run and verifies their answers."""

    __slots__ = (
        "_after",
        "_before",
        "_head",
        "_poison_every",
        "_poison_tail",
        "_reversed",
        "_same_every",
        "_tail",
        "credential",
    )

    def __init__(
        self,
        *,
        host: str,
        base_path: str,
        run_id: str,
        size: int,
        expect: Expect = "reversed",
        model: str | None = None,
        respond_async: bool = False,
        key: str = "",
        poison: str = "",
        poison_every: int = 0,
        same_every: int = 0,
    ) -> None:
        if size < PAYLOAD_BYTES_MIN:
            raise ValueError(f"payload of {size} bytes is too small, the least is {PAYLOAD_BYTES_MIN}")
        identity = run_id.encode().rjust(RUN_ID_DIGITS, b"0")
        filler_size = size - PAYLOAD_BYTES_MIN
        filler = (FILLER_ALPHABET * (filler_size // len(FILLER_ALPHABET) + 1))[:filler_size]
        # The header line of the credential; the bench also polls tasks with it.
        self.credential = f"Authorization: Bearer {key}\r\n" if key else ""
        options = "Prefer: respond-async\r\n" if respond_async else ""
        before, ending = self._around(size, host, base_path, model, options)
        self._head = before + b'"' + identity
        self._tail = filler + b'"' + ending
        # Every so many requests carry the text instead of as much filler; 0: none does.
        self._poison_every = poison_every if poison else 0
        self._poison_tail = (poison.encode() + filler)[:filler_size] + b'"' + ending
        # Every so many requests have one and the same number, and so the same input; 0: none has.
        self._same_every = same_every
        self._reversed = expect == "reversed"
        # The comma is part of what comes after: an output that goes on behind the expected one is not it.
        if self._reversed:
            self._before, self._after = b'"' + filler[::-1], identity[::-1] + b'",'
        else:
            self._before, self._after = b'"' + identity, filler + b'",'

    def _around(self, size: int, host: str, base_path: str, model: str | None, options: str) -> tuple[bytes, bytes]:
        """What stands in a request before and behind its input, a JSON value of `size` bytes."""
        path, opening, ending = self._body(model)
        head = (
            f"POST {base_path}{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"{options}{self.credential}Content-Length: {len(opening) + size + len(ending)}\r\n\r\n"
        )
        return head.encode() + opening, ending

    def _body(self, model: str | None) -> tuple[str, bytes, bytes]:
        """The path, and what the body has before and behind the input."""
        return "/v1/inference", b'{"input":', b"}" if model is None else b',"model":%b}' % msgspec.json.encode(model)

    def number(self, due: int) -> bytes:
        """The number that the `due`-th request carries: its own, or 0 for requests that share one input."""
        is_same = self._same_every and due % self._same_every == 0
        return b"%08x" % (0 if is_same else due)

    def request(self, number: bytes) -> bytes:
        """The whole HTTP request that carries `number` (8 hexadecimal digits)."""
        if self._poison_every and int(number, 16) % self._poison_every == 0:
            return b"".join((self._head, number, self._poison_tail))
        return b"".join((self._head, number, self._tail))

    def expected_output(self, number: bytes) -> str:
        """The string that the answer to `number` must have as its output."""
        middle = number[::-1] if self._reversed else number
        return (self._before[1:] + middle + self._after[:-2]).decode()

    def verify(self, data: bytes, start: int, number: bytes) -> Journey | None:
        """What the answer that begins at `start` tells about its way, or None if its output is wrong."""
        at = data.find(OUTPUT_KEY, start) + len(OUTPUT_KEY)
        before = self._before
        if not data.startswith(before, at):
            return self._verify_decoded(data[start:], number)
        at += len(before)
        if not data.startswith(number[::-1] if self._reversed else number, at):
            return self._verify_decoded(data[start:], number)
        at += NUMBER_DIGITS
        if not data.startswith(self._after, at) or not data.endswith(b"}}"):
            return self._verify_decoded(data[start:], number)
        queue_at = data.find(QUEUE_KEY, at)
        if queue_at < 0:
            return NOT_TOLD
        batch_at = data.find(BATCH_KEY, queue_at) + len(BATCH_KEY)
        queue_at += len(QUEUE_KEY)
        try:
            return (
                float(data[queue_at : data.index(b",", queue_at)]),
                int(data[batch_at : data.index(b",", batch_at)]),
            )
        except ValueError:
            return self._verify_decoded(data[start:], number)

    def _verify_decoded(self, body: bytes, number: bytes) -> Journey | None:
        # Same meaning in other bytes (spaces, order of keys) is right too; this way is slow and rarely taken.
        try:
            answer = _decode_answer(body)
        except msgspec.DecodeError:
            return None
        if not self.is_expected(answer.output, number):
            return None
        if answer.metadata is None:
            return NOT_TOLD
        queue_ms, batch_size = answer.metadata.queue_ms, answer.metadata.batch_size
        return (-1.0 if queue_ms is None else queue_ms, batch_size or 0)

    def is_expected(self, output: object, number: bytes) -> bool:
        """Whether a decoded output is the expected output of `number`."""
        return isinstance(output, str) and output == self.expected_output(number)
