"""Whether anybody asks twice. Pure.

Where nobody does, coalescing and results that are kept are pure cost: a fifth of a small request. So:

1. After TRIAL results in a row that were kept and nobody asked for, within TRIAL_S, there is a rest of REST_S: requests
   pass by. Then there is another trial. Where less comes than that, the cost does not matter, and there is no rest.
2. Meanwhile those who pass are remembered. The first one that comes again ends the rest. So in a rest the second of
   three identical requests is sent like any other, and the third need not. Who is refused is not remembered: it
   will come again by itself.
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
# Rule 3: one in so many, by the whole of its input: many are alike but for some bytes, wherever these are. A prime: the
# lowest bits of a CRC are too much alike where inputs are.
COMMON = 61


class AskedTwice:
    """What is known of it in one process."""

    __slots__ = ("_is_one_of_many", "_numbers", "_since", "_unasked", "rests_until")

    def __init__(self, *, is_one_of_many: bool) -> None:
        # Others keep results, too.
        self._is_one_of_many = is_one_of_many
        # Results that were kept since somebody asked twice, or a rest was over; and when the first of them was.
        self._unasked = 0
        self._since = 0.0
        self.rests_until = 0.0
        # The hashes of keys that came in a rest; made for the first one.
        self._numbers = array("q")

    def __repr__(self) -> str:
        return f"<AskedTwice unasked={self._unasked} rests_until={self.rests_until}>"

    def again(self) -> None:
        """Somebody has asked for what was there already."""
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
        # Of which owner they are does not count: others will hardly be taken for the same.
        number = hash((request.input, request.model, request.parameters, request.lane))
        if self._numbers[number % PLACES] == number:
            self.again()
            return 0
        # By what is the same in all processes, as Python's own hashes are not.
        if self._is_one_of_many and crc32(request.input) % COMMON == 0:
            return 0
        return number

    def remember(self, number: int) -> None:
        """One that passes was let in."""
        self._numbers[number % PLACES] = number
