"""Whether an answer is the one before it, again. Pure: time is an argument.

An answer that is repeated while the next call is under way on its connection looks like that call's: HTTP/1.1 has no
names for answers. But it is the same as the answer before it, and two calls seldom have the same answer.

1. An answer that its connection gave to the call before, which was another call, is in doubt: no call gets it.
2. On a connection of its own no answer can be a repeated one. If one there is the same as the one in doubt, then the
   endpoint does answer so (a stub, a model that says little): for a while nothing is doubted.
3. If the call that was in doubt has another answer there, the endpoint repeats its answers.
4. Short answers are not compared: "yes" is a common one.
"""

from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

from carpool.core.tensors import Data

ANSWER_BYTES_MIN = 64
BELIEVED_S = 600.0
# Of long texts the two ends are compared.
END_BYTES = 4096


class Fingerprint(NamedTuple):
    """What is kept of a text in order to know it again."""

    size: int
    start: int
    end: int


def fingerprint_of(text: bytes, tail: Sequence[Data] = ()) -> Fingerprint:
    """The print of a call: its body, and what follows it."""
    last = tail[-1] if tail else text
    return Fingerprint(len(text) + sum(map(len, tail)), hash(text[:END_BYTES]), hash(bytes(last[-END_BYTES:])))


def fingerprint_of_end(size: int, end: bytes) -> Fingerprint:
    """The print of an answer of `size`, of which only the last bytes are at hand."""
    return Fingerprint(size, 0, hash(end[-min(size, END_BYTES) :]))


class CallAndAnswer(NamedTuple):
    """A call and its answer."""

    call: Fingerprint
    answer: Fingerprint


Verdict = Literal["nothing", "answers so", "repeats"]


class Repeats:
    """What is known of one endpoint in this matter."""

    __slots__ = ("_before", "_believed_until", "_doubted")

    def __init__(self) -> None:
        self._doubted: CallAndAnswer | None = None
        # The call whose answer it may be.
        self._before: Fingerprint | None = None
        self._believed_until = -inf

    def is_doubtful(self, exchange: CallAndAnswer, before: CallAndAnswer, now: float) -> bool:
        """Whether this exchange, on a connection that had the one before it, is in doubt (rule 1)."""
        is_same = exchange.answer == before.answer and exchange.call != before.call
        if not is_same or exchange.answer.size < ANSWER_BYTES_MIN or now < self._believed_until:
            return False
        self._doubted, self._before = exchange, before.call
        return True

    def seen_alone(self, exchange: CallAndAnswer, now: float) -> Verdict:
        """What an exchange shows that was the first of its connection (rules 2 and 3)."""
        doubted = self._doubted
        if doubted is None:
            return "nothing"
        # The call before has this answer by right: that shows nothing.
        if exchange.answer == doubted.answer and exchange.call != self._before:
            self._doubted = None
            self._believed_until = now + BELIEVED_S
            return "answers so"
        if exchange.call == doubted.call:
            self._doubted = None
            return "repeats"
        return "nothing"
