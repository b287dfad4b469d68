"""Load of clients with API keys, of several tiers, from this process: the generator of `carpool bench`, which verifies
every answer.

What it saw becomes a verdict of the checker. An open loop that sends late is another load, and a machine without a
free core tells of other programs: such a run is disturbed, and its timings are not the gateway's.
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from carpool.tools.bench.run import Answered, BenchOptions, TierLoad, drive, raise_file_limit, resolve, segments_from
from carpool.tools.bench.tally import REFUSALS, Report
from support.checker import PROMISES, Verdict
from support.processes import CpuShare

# Per cent of the requests.
MIX = {"enterprise": 5.0, "paid": 25.0, "free": 70.0}
# Well over the total timeout of a synchronous request, 4 s: who has no answer by then was forgotten.
TIMEOUT_S = 8.0
# How long a request stays at most where all is well: an open loop needs a connection for each.
STAY_S, CONNECTIONS_MIN, CONNECTIONS_MAX = 1.5, 100, 6000
BEHIND_MS_MAX, IDLE_MIN, TRIES = 25.0, 0.03, 2
# The load had no connection left to send it on: nothing that the gateway did.
UNSENT = "timeout-unsent"


class Key(NamedTuple):
    """One client."""

    tier: str
    # 0: no limit.
    per_minute: int = 0
    burst: int = 100


TIER_KEYS = {tier: Key(tier) for tier in MIX}


class Keys:
    """Clients with a key each; `config` is a gateway's configuration that knows them, with further `settings`."""

    def __init__(self, directory: Path, settings: str = "", clients: Mapping[str, Key] = TIER_KEYS) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._keys = {name: f"cp_{secrets.token_hex(20)}" for name in clients}
        lines = [settings, '[auth]\nmode = "keys"']
        for name, (tier, per_minute, burst) in clients.items():
            digest = hashlib.sha256(self._keys[name].encode()).hexdigest()
            lines.append(f'[keys.{name}]\nsha256 = "{digest}"\ntier = "{tier}"')
            lines.append(f"per_minute = {per_minute}\nburst = {burst}")
        self.config = directory / "keys.toml"
        self.config.write_text("\n".join(lines) + "\n")

    def load(self, shares: Mapping[str, float]) -> list[TierLoad]:
        """Requests of these clients, in these shares."""
        return [TierLoad(name, share, self._keys[name]) for name, share in shares.items()]


class Loaded(NamedTuple):
    """What became of a load. Its parts are called tiers in the report, whoever they are."""

    report: Report
    answers: list[Answered]
    # What of the machine's cores nobody needed.
    idle: float

    @property
    def verdict(self) -> Verdict:
        """As the checker would say it: a refusal is an outcome, and so is 504."""
        status = self.report.status
        broken = sum(count for kind, count in status.items() if not kind.isdigit() and kind not in ("timeout", UNSENT))
        unasked = status.get("unasked", 0)
        lost = broken - unasked + self.report.unanswered
        return Verdict(lost, self.report.wrong, unasked, 0, status.get("timeout", 0))

    @property
    def is_disturbed(self) -> bool:
        """Whether load or gateway did not get the machine."""
        late = self.report.behind_ms.p99 or 0.0
        return late > BEHIND_MS_MAX or self.idle < IDLE_MIN or UNSENT in self.report.status

    @property
    def timed_out(self) -> int:
        """Admitted, and not answered in time."""
        return self.report.status.get("504", 0) + self.report.status.get("timeout", 0)

    @property
    def about(self) -> str:
        """The run itself, for the reader of a row."""
        parts = []
        for name, tier in self.report.tiers.items():
            latency = tier.latency_ms
            refused = "".join(
                f", {count:,} {what}"
                for what, count in (("shed", tier.shed), ("limited", tier.limited), ("timed out", tier.timed_out))
                if count
            )
            parts.append(
                f"{name} {tier.goodput:.0f}/s p50/p95/p99 {latency.p50 or 0:.0f}/{latency.p95 or 0:.0f}/"
                f"{latency.p99 or 0:.0f} ms{refused}"
            )
        late = self.report.behind_ms.p99 or 0.0
        odd = {kind: count for kind, count in self.report.status.items() if kind not in ("200", *REFUSALS)}
        machine = f"{f'{odd}, ' if odd else ''}load late by {late:.0f} ms (p99), cores {self.idle:.0%} idle"
        excuse = "; timings not judged, other programs were in the way" * self.is_disturbed
        return f"{'; '.join(parts)}; {machine}{excuse}"

    def between(self, from_s: float, to_s: float = inf) -> list[Answered]:
        """Those that were due in this time."""
        return [answer for answer in self.answers if from_s <= answer.due_s < to_s]


def p99_ms(answers: Iterable[Answered], *names: str) -> float:
    """Of those with an output, of these clients (none: of all); 0 if there are none."""
    times = sorted(
        answer.latency_ms for answer in answers if answer.outcome == "200" and (not names or answer.tier in names)
    )
    return times[ceil(0.99 * len(times)) - 1] if times else 0.0


async def send_load(port: int, schedule: str, clients: list[TierLoad], *, retries: int = 0) -> Loaded:
    """Send this load, and count what was answered as promised: with the output, or refused in time."""
    url = f"http://127.0.0.1:{port}"
    segments = segments_from(0.0, "", schedule)
    peak = max(segment.rate for segment in segments)
    options = BenchOptions(
        url=url,
        segments=segments,
        connections=min(max(int(peak * STAY_S), CONNECTIONS_MIN), CONNECTIONS_MAX),
        payload_bytes=200,
        timeout_s=TIMEOUT_S,
        tiers=clients,
        retries=retries,
    )
    raise_file_limit(options.connections)
    answers: list[Answered] = []
    cores = CpuShare()
    report, _ = await drive(options, resolve(url), answers=answers)
    PROMISES.requests += report.sent
    PROMISES.kept += report.ok + sum(report.status.get(status, 0) for status in REFUSALS)
    return Loaded(report, answers, cores.idle())


class Run(Protocol):
    """What a scenario saw."""

    @property
    def is_disturbed(self) -> bool:
        """Whether load or gateway did not get the machine."""
        ...


Seen = TypeVar("Seen", bound=Run)


async def undisturbed(make: Callable[[int], Awaitable[Seen]]) -> Seen:
    """A run for which the machine had time, or the last of a few; `make` gets the number of the try."""
    for number in range(TRIES):
        seen = await make(number)
        if not seen.is_disturbed:
            break
    return seen
