"""How many calls an endpoint gets: one controller for each endpoint decides it. Pure: `now` is an argument.

1. Additive increase, multiplicative decrease. `step` is called once a second: an endpoint that was overloaded since the
   last step gets DECREASE of what it had; any other gets INCREASE of its slots more, at most all.
2. Overloaded is: it reported a load over LOAD_MAX on average (by a header or a metric); or it answered 429; or,
   where it reports nothing, most of its calls took LATENCY_RATIO times as long as calls of about their size did lately.
3. Time and a 429 are hints and no report: inputs may just have become longer, and one client's inputs may be all that
   is refused. They never take the last slot, and time takes half of the slots at most. After WINDOW_S to twice that,
   what was slow is normal. A 503 says nothing here: what answers it may be broken, which is for the breaker to see.
4. Less than one call at once is one call with pauses: with 0.7 the endpoint is busy for 70 % of the time. Reports
   lower it to REPORTED_MIN, and no pause is longer than PAUSE_S_MAX.
5. Slots that are not set are found. While each call that ends leaves a whole batch waiting, inputs answered a second
   are counted; then one slot more is tried, and they are counted again, over CALLS calls and SECONDS at least. A step
   that brought less than GAIN is taken back, and the next one goes the other way: a slot without which less than GAIN
   is lost stays away. Each step that is taken back doubles the time to the next, up to TRY_AFTER_S_MAX. A call
   that fails, for whatever but its inputs, or a high load takes a slot back that is tried: it may have been one too
   many for the GPU's memory. How long calls take says nothing here: that grows with each slot.
"""

from math import inf

LOAD_MAX = 0.9
DECREASE = 0.7
INCREASE = 0.05
# Rule 3: how long the shortest call counts.
WINDOW_S = 60.0
# Rule 2. Inputs that are twice as long, or a neighbour on the same GPU, make calls that much slower now and then.
LATENCY_RATIO = 2.0
# Calls needed to say that they are slow, and the least excess: less may be the gateway's own delay.
CALLS_MIN = 8
EXCESS_S_MIN = 0.05
# Rule 4.
REPORTED_MIN = 0.1
PAUSE_S_MAX = 1.0
# Rule 5.
FOUND_MAX = 8
CALLS, SECONDS = 40, 2.0
GAIN = 1.05
TRY_AFTER_S, TRY_AFTER_S_MAX = 15.0, 600.0


class ServiceTimes:
    """Whether calls take much longer than they did lately. A batch is compared with those of about as many inputs, and
    of about as many bytes if it is padded to its largest input.
    """

    __slots__ = ("_before", "_calls", "_least", "_slow", "_window_end")

    def __init__(self) -> None:
        # The shortest call by sizes (in powers of two), in this window and in the one before.
        self._least: dict[tuple[int, int], float] = {}
        self._before: dict[tuple[int, int], float] = {}
        self._window_end = -inf
        # Calls since the last verdict, and those of them that were slow.
        self._calls = 0
        self._slow = 0

    def add(self, size: int, largest: int, seconds: float, now: float) -> None:
        """A batch of so many inputs, the largest of so many bytes, took so long."""
        if now >= self._window_end:
            # After a long silence both windows are old.
            self._before = self._least if now < self._window_end + WINDOW_S else {}
            self._least = {}
            self._window_end = now + WINDOW_S
        group = size.bit_length(), (size * largest).bit_length()
        this_window = self._least.get(group, inf)
        least = min(this_window, self._before.get(group, inf))
        self._calls += 1
        self._slow += seconds > least * LATENCY_RATIO and seconds > least + EXCESS_S_MIN
        self._least[group] = min(seconds, this_window)

    def verdict(self) -> bool | None:
        """Whether most calls since the last verdict were slow; None while they are too few to say."""
        if 0 < self._calls < CALLS_MIN:
            return None
        slow = 2 * self._slow > self._calls
        self._calls = self._slow = 0
        return slow


class Throughput:
    """Inputs answered a second, by calls that began since then."""

    __slots__ = ("_calls", "_crowded", "_first", "_inputs", "_last", "_since")

    def __init__(self, since: float) -> None:
        self._since = since
        # The calls, those of them that left a whole batch waiting, the inputs of all but the first, and when the first
        # and the last ended.
        self._calls = 0
        self._crowded = 0
        self._inputs = 0
        self._first = self._last = since

    def add(self, size: int, began: float, ended: float, is_crowded: bool) -> None:
        """A call was answered."""
        if began < self._since:
            return
        if self._calls:
            self._inputs += size
            self._first += max(0.0, began - self._last)  # without the time in which nothing waited
        else:
            self._first = ended
        self._calls += 1
        self._crowded += is_crowded
        self._last = ended

    @property
    def is_known(self) -> bool:
        """Whether the calls are enough to say."""
        return self._calls > CALLS and self._last - self._first >= SECONDS

    @property
    def is_crowded(self) -> bool:
        """Whether it was the endpoint that set the pace: most calls left a whole batch waiting."""
        return 2 * self._crowded > self._calls

    @property
    def rate(self) -> float:
        """Inputs a second."""
        return self._inputs / (self._last - self._first)


class Controller:
    """How many calls one endpoint gets."""

    __slots__ = (
        "_allowed", "_before", "_call_s", "_is_refusing", "_reported_sum", "_reports", "_seen",
        "_step", "_times", "_try_after_s", "_try_at", "is_auto", "reported_load", "slots",
    )  # fmt: skip

    def __init__(self, slots: int | None) -> None:
        self.is_auto = slots is None
        # Calls that it takes at once: as set, or as found so far.
        self.slots = slots or 1
        self._allowed = float(self.slots)
        self._times = ServiceTimes()
        # How long the last call took. No mean: one call during which this process stood still would count for many.
        self._call_s = 0.0
        # Since the last step: reports, the sum of their loads, and whether a 429 came.
        self._reports = 0
        self._reported_sum = 0.0
        self._is_refusing = False
        # What it reported last, 0 to 1; None if it never did.
        self.reported_load: float | None = None
        # Rule 5: what is counted now; what was answered before the step that is tried, None while none is; its
        # direction, or that of the next one; when that may be, and how long after a step that is taken back.
        self._seen = Throughput(-inf)
        self._before: float | None = None
        self._step = 1
        self._try_at = -inf
        self._try_after_s = TRY_AFTER_S

    def __repr__(self) -> str:
        return f"<Controller {self.limit:g} of {self.slots}>"

    @property
    def limit(self) -> float:
        """Calls that it may have at once: a whole number, or a share of the time of one."""
        return int(self._allowed) if self._allowed >= 1.0 else self._allowed

    @property
    def interval_s(self) -> float:
        """Rule 4: how long after the beginning of a call the next one may begin; 0 without pauses."""
        if self._allowed >= 1.0:
            return 0.0
        return self._call_s + min(PAUSE_S_MAX, self._call_s * (1.0 / self._allowed - 1.0))

    def report(self, load: float) -> None:
        """The endpoint says how loaded it is; 1 is full."""
        self._reports += 1
        self._reported_sum += load
        self.reported_load = load

    def failed(self, status: int, now: float) -> None:
        """A call failed with this status, or 0 without an answer, and not for its inputs as far as is known."""
        if self._is_one_more_tried:
            self._take_back(now)
        elif status == 429:
            self._is_refusing = True

    def answered(self, size: int, seconds: float, began: float, *, largest: int = 0, is_crowded: bool = False) -> None:
        """A batch of so many inputs, the largest of so many bytes, was answered after so long; `is_crowded`: a whole
        batch waits for the slot.
        """
        self._call_s = seconds
        if not self.is_auto:
            self._times.add(size, largest, seconds, began)
        elif is_crowded or self._before is not None:
            self._seen.add(size, began, began + seconds, is_crowded)
        else:
            self._seen = Throughput(began + seconds)

    def step(self, now: float) -> float:
        """Judge what came since the last step, and return the new limit."""
        slow = self._times.verdict() if self.reported_load is None else False
        least = self._least(slow is True)
        if self._allowed < self.slots:
            self._seen = Throughput(now)  # what fewer slots answered is no measure for a step
        if least is not None and self._is_one_more_tried:
            self._take_back(now)
        elif least is not None:
            if self._before is not None:
                self._end_try(now)  # of a slot fewer, which stays away
            self._allowed = min(self._allowed, max(least, self._allowed * DECREASE))
        elif slow is not None:  # else: too few calls to say; wait for more
            self._allowed = min(float(self.slots), self._allowed + INCREASE * self.slots)
            if self.is_auto and self._allowed == self.slots and self._seen.is_known:
                self._find(now)
        self._reports, self._reported_sum, self._is_refusing = 0, 0.0, False
        return self.limit

    @property
    def _is_one_more_tried(self) -> bool:
        return self._before is not None and self._step > 0

    def _least(self, is_slow: bool) -> float | None:
        """The least that is left to it, if it is overloaded; None if it is not."""
        if self._reported_sum > LOAD_MAX * self._reports:
            return REPORTED_MIN
        if self._is_refusing:
            return 1.0
        return max(1.0, self.slots / 2) if is_slow else None

    def _find(self, now: float) -> None:
        """Rule 5: enough was counted to judge the last step, or to begin the next."""
        seen, self._seen = self._seen, Throughput(now)
        if self._before is None:
            if now >= self._try_at:
                self._before = seen.rate
                self._step = 1 if self.slots == 1 else -1 if self.slots == FOUND_MAX else self._step
                self._move(self._step)
            return
        gained = seen.rate / self._before
        if gained > GAIN if self._step > 0 else gained * GAIN > 1.0:
            self._try_after_s = TRY_AFTER_S
            self._end_try(now)
        else:
            self._take_back(now, is_known=seen.is_crowded)

    def _take_back(self, now: float, *, is_known: bool = True) -> None:
        """The step did not help; not `is_known`: nothing showed whether it would, for too few requests waited."""
        self._move(-self._step)
        self._end_try(now)
        if is_known:
            self._step = -self._step
            self._try_after_s = min(TRY_AFTER_S_MAX, 2 * self._try_after_s)

    def _end_try(self, now: float) -> None:
        self._before, self._seen = None, Throughput(now)
        self._try_at = now + self._try_after_s

    def _move(self, step: int) -> None:
        self.slots += step
        self._allowed = float(self.slots)
