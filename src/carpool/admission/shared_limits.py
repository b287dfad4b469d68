"""The rate limits of a gateway that is one of several (core.ports.RateLimits): mostly by leases.

A call that no lease covers waits for the answer of the budget that all gateways share. The questions of one turn of the
event loop are asked together. While the budget cannot be reached, this gateway has its part of each limit.
"""

from collections.abc import Callable

from carpool.admission.limits import Lease, LocalLimits
from carpool.core.clock import Clock, monotonic
from carpool.core.ports import Caller, LimitVerdict, RateBudget, RateLimit, RateTold
from carpool.core.timers import Every, OncePerTurn

# How often the gateway looks for leases that are about to end.
LOOK_S = 0.2
TIDY_FROM = 1024
# With more than so many, less is remembered of each.
OWNERS_MAX = 100_000

Known = Callable[[LimitVerdict], None]
# The caller that waits, what is called with the answer, and as how many the call counts.
Waiting = tuple[Caller, Known, int]


class Account:
    """One owner under one limit (core.ports.Caller.account): its lease, and its calls that wait."""

    __slots__ = ("asking", "lease", "waiting")

    def __init__(self, limit: RateLimit) -> None:
        self.lease = Lease(limit)
        # Calls that wait for the answer to the question that is out (None: there is none), and count the same; and
        # calls that wait for the next question.
        self.asking: list[Waiting] | None = None
        self.waiting: list[Waiting] = []

    def is_quiet(self) -> bool:
        """Whether no call waits."""
        return self.asking is None and not self.waiting


class SharedLimits:
    """Lets owners in within limits that hold for all gateways together."""

    def __init__(
        self,
        budget: RateBudget,
        *,
        # Whether the budget can be asked; and how many gateways there are, for the time when it cannot.
        is_reachable: Callable[[], bool],
        sharers: Callable[[], int],
        clock: Clock = monotonic,
    ) -> None:
        self._budget = budget
        self._is_reachable = is_reachable
        self._clock = clock
        self._alone = LocalLimits(clock, sharers)
        self._accounts: dict[str, Account] = {}
        self._tidy_above = TIDY_FROM
        # Owners with a lease, in the order in which these end; owners about whom the budget is asked in this turn.
        self._leased: dict[str, None] = {}
        self._due: dict[str, None] = {}
        self._flush = OncePerTurn(self._ask)
        self._looks = Every(LOOK_S, self._look)
        # For metrics: questions, an owner each; and answers that did not come.
        self.asks = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"<SharedLimits owners={len(self._accounts)} leased={len(self._leased)}>"

    def start(self) -> None:
        """Renew leases from now on."""
        self._looks.start()

    def close(self) -> None:
        """Renew no lease any more."""
        self._looks.stop()

    def enter(self, caller: Caller, cost: int = 1) -> LimitVerdict | None:
        """A call that counts as so many, all of them or none; None if the budget has to be asked."""
        now = self._clock()
        account = self._accounts.get(caller.account)
        if account is None:
            limit = caller.limit
            if limit is None or not limit.per_minute:
                return b""
            account = self._open(caller.account, limit, now)
        return account.lease.enter(now, cost) or self._without_lease(account, caller, now, cost)

    def _without_lease(self, account: Account, caller: Caller, now: float, cost: int) -> LimitVerdict | None:
        lease = account.lease
        if lease.is_over(now, cost):
            return lease.refusal(now, cost)
        if not self._is_reachable():
            return self._alone.enter(caller, cost)
        # More calls than this do not come in, whatever the answer is: so what waits is bounded.
        return None if len(account.waiting) < lease.capacity else lease.refusal(now, cost)

    def when_known(self, caller: Caller, known: Known, cost: int = 1) -> None:
        """Have `known` called with the budget's answer."""
        owner = caller.account
        account = self._accounts[owner]
        account.waiting.append((caller, known, cost))
        if account.asking is None:
            self._due[owner] = None
            self._flush.notify()

    def _open(self, owner: str, limit: RateLimit, now: float) -> Account:
        accounts = self._accounts
        if len(accounts) >= self._tidy_above:
            self._tidy(now)
        account = accounts[owner] = Account(limit)
        return account

    def _tidy(self, now: float) -> None:
        """Forget quiet accounts whose lease holds nothing to remember; where many are left, all quiet ones."""
        accounts, leased = self._accounts, self._leased
        quiet = [owner for owner, each in accounts.items() if each.is_quiet() and owner not in leased]
        for owner in quiet:
            if accounts[owner].lease.is_forgettable(now):
                del accounts[owner]
        if len(accounts) > OWNERS_MAX:
            for owner in quiet:
                accounts.pop(owner, None)
        self._tidy_above = max(TIDY_FROM, 2 * len(accounts))

    # Questions and answers.

    def _look(self) -> None:
        """Renew the leases that are about to end, if they were used."""
        now = self._clock()
        unused = []
        for owner in self._leased:
            lease = self._accounts[owner].lease
            if not lease.is_due(now):
                break
            if lease.is_used():
                self._due[owner] = None
            else:
                unused.append(owner)
        for owner in unused:
            del self._leased[owner]
        if self._due:
            self._flush.notify()

    def _ask(self) -> None:
        now, asks = self._clock(), []
        for owner in self._due:
            account = self._accounts[owner]
            if account.asking is None:
                cost = account.waiting[0][2] if account.waiting else 1
                account.asking = [each for each in account.waiting if each[2] == cost]
                account.waiting = [each for each in account.waiting if each[2] != cost]
                asks.append(account.lease.ask(owner, len(account.asking), now, cost))
        self._due.clear()
        if asks:
            self.asks += len(asks)
            self._budget.ask(asks, self._told)

    def _told(self, owner: str, told: RateTold | None) -> None:
        account, now = self._accounts[owner], self._clock()
        lease = account.lease
        asked, account.asking = account.asking or [], None
        self._leased.pop(owner, None)
        if told is None:
            self.failures += 1
            for caller, known, cost in asked:
                known(self._alone.enter(caller, cost))
        else:
            lease.told(told, now)
            if told.leased:
                self._leased[owner] = None
            for number, (_, known, cost) in enumerate(asked):
                known(lease.lines if number < told.granted else lease.refusal(now, cost))
        self._go_on(account)

    def _go_on(self, account: Account) -> None:
        """Let in, refuse or ask for the calls that came while the question was out."""
        waiting, account.waiting = account.waiting, []
        for caller, known, cost in waiting:
            # As if it came now: `known` runs its caller at once, and calls that come by that may forget this account.
            entry = self.enter(caller, cost)
            if entry is None:
                self.when_known(caller, known, cost)
            else:
                known(entry)
