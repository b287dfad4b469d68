"""Whether clients send the same request twice. Pure.

Where none does, coalescing and kept results are pure cost: a fifth of a small request. So:

1. After TRIAL kept results in a row that no request asked for, within TRIAL_S, the coalescer rests for REST_S: requests
   pass by it. Then there is another trial. With fewer results than that, the cost does not matter: there is no rest.
2. In a rest, requests that pass are remembered. The first that comes again ends the rest. So of three identical
   requests the second is still sent, and the third need not be. A refused request is not remembered: its client's
   retry says nothing about repeated inputs.
3. Where many processes keep results, some requests never pass by: it may be that each process sees an input once, and
   all together many times.
"""

from array import array
from zlib import crc32

from carpool.core.request import Request

TRIAL = 10_000
TRIAL_S = 60.0
REST_S = 60.0
# Rule 2: how many are remembered, about. Each has one place, and the later takes it.
PLACES = 2**16
# Rule 3: one in so many, chosen by a CRC of the whole input: inputs may differ in a few bytes anywhere. A prime: the
# lowest bits of the CRCs of similar inputs are too similar.
COMMON = 61


class AskedTwice:
    """What is known of it in one process."""

    __slots__ = ("_is_one_of_many", "_numbers", "_since", "_unasked", "rests_until")

    def __init__(self, *, is_one_of_many: bool) -> None:
        # Other processes keep results, too.
        self._is_one_of_many = is_one_of_many
        # Results kept since a request last came twice, or the last trial ended; and when the first of them was kept.
        self._unasked = 0
        self._since = 0.0
        self.rests_until = 0.0
        # The hashes of keys that came in a rest; made for the first one.
        self._numbers = array("q")

    def again(self) -> None:
        """A request came a second time."""
        self._unasked = 0
        self.rests_until = 0.0

    def kept(self, now: float) -> None:
        """A result was kept."""
        if not self._unasked:
            self._since = now
        self._unasked += 1
        if self._unasked == TRIAL:
            self._unasked = 0
            if now - self._since < TRIAL_S:
                self.rests_until = now + REST_S
                self._numbers = self._numbers or array("q", bytes(8 * PLACES))

    def passes(self, request: Request) -> int:
        """If a request that comes in a rest passes by, its number, to be remembered if it is let in; else 0."""
        # Without the owner: requests of different owners are rarely identical.
        number = hash((request.input, request.model, request.parameters, request.lane))
        if self._numbers[number % PLACES] == number:
            self.again()
            return 0
        # By what is the same in all processes, as Python's own hashes are not.
        if self._is_one_of_many and crc32(request.input) % COMMON == 0:
            return 0
        return number

    def remember(self, number: int) -> None:
        """A request that passed by was admitted."""
        self._numbers[number % PLACES] = number
