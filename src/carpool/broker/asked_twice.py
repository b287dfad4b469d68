"""Whether anybody asks twice. Pure.

Where nobody does, shared seats and results that are kept are pure cost: a fifth of a small request. So:

1. After TRIAL results in a row that were kept and nobody asked for, within TRIAL_S, there is a rest of REST_S: requests
   pass by. Then there is another trial. Where less comes than that, the cost does not matter, and there is no rest.
2. Meanwhile the keys that come are remembered. The first one that comes again ends the rest, and so does any result
   that is found, or seat that is shared. So in a rest the second of three identical requests is computed like the
   first, and the third need not be.
3. A part of the keys that many processes have in common never passes by: it may be that each process sees an input
   once, and all together many times.
"""

from array import array

from carpool.core.ports import SameKey

TRIAL = 10_000
TRIAL_S = 60.0
REST_S = 60.0
# Rule 2: how many are remembered, about. Each has one place, and the later takes it.
PLACES = 2**16
# Rule 3: so many of 256, by the first byte of a digest. Inside a process keys are no digests.
ALWAYS = 16


class AskedTwice:
    """What is known of it in one process."""

    __slots__ = ("_numbers", "_rests_until", "_since", "_unasked")

    def __init__(self) -> None:
        # Results that were kept since somebody asked twice, or a rest was over; and when the first of them was.
        self._unasked = 0
        self._since = 0.0
        self._rests_until = 0.0
        # The hashes of keys that came in a rest; made for the first one.
        self._numbers = array("q")

    def __repr__(self) -> str:
        return f"<AskedTwice unasked={self._unasked} rests_until={self._rests_until}>"

    def again(self) -> None:
        """Somebody has asked for what was there already."""
        self._unasked = 0
        self._rests_until = 0.0

    def kept(self, now: float) -> None:
        """A result was kept."""
        if not self._unasked:
            self._since = now
        self._unasked += 1
        if self._unasked == TRIAL:
            self._unasked = 0
            if now - self._since < TRIAL_S:
                self._rests_until = now + REST_S
                self._numbers = self._numbers or array("q", bytes(8 * PLACES))

    def passes(self, key: SameKey, number: int, now: float) -> bool:
        """Whether a request passes by, whose key has this hash. It is remembered then."""
        if now >= self._rests_until or (isinstance(key, bytes) and key[0] < ALWAYS):
            return False
        place = number % PLACES
        if self._numbers[place] == number:
            self.again()
            return False
        self._numbers[place] = number
        return True

    def would_pass(self, key: SameKey, now: float) -> bool:
        """Whether `passes` would say so; nothing is remembered."""
        if now >= self._rests_until or (isinstance(key, bytes) and key[0] < ALWAYS):
            return False
        number = hash(key)
        return self._numbers[number % PLACES] != number

    def forget(self, number: int) -> None:
        """One that would have passed was refused: it will come again by itself."""
        self._numbers[number % PLACES] = 0
