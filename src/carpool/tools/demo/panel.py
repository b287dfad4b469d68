"""The demo's control panel: `POST /internal/demo` says what to change, and events of the live page say how it stands.

It is there with `carpool demo` only. The load comes from a process of its own, with keys that this one alone knows; so
does the comparison, which is computed. Everything takes the same way as calls of clients and operators.
"""

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.batching.loop import BatchLoop
from carpool.batching.policy import PolicyName, make_policy
from carpool.composition.process import Process
from carpool.core.errors import Malformed
from carpool.core.ports import Caller
from carpool.face.http.exchange import Exchange
from carpool.settings.schema import TierSettings
from carpool.tools.bench.run import BenchOptions, TierLoad, default_connections
from carpool.tools.bench.tally import Segment
from carpool.tools.demo import reachable

logger = logging.getLogger("carpool")

POLICIES: tuple[PolicyName, ...] = ("adaptive", "fixed", "pid")
# A flood is so many times what the GPUs can serve, but no more than this machine can send.
FLOOD_TIMES, FLOOD_RPS_MAX = 1.2, 5000.0
RATE_MAX = 20_000
# The load must be unchanged for so long before it is compared; and a comparison may take so long.
STILL_S, COMPARE_S_MAX = 0.4, 60.0
LOOK_S = 0.2
PAYLOAD_BYTES = 200
# A load goes on for so long.
FOREVER_S = 30 * 24 * 3600.0
# So many good inputs come with a poisonous one.
BESIDE_POISON = 15


def tier_shares(count: int) -> list[float]:
    """The share of the load that each of so many tiers has, the highest first: the lower, the more (0.1, 0.3, 0.6)."""
    weights = [number * (number + 1) for number in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


class PanelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change."""

    rate: Annotated[float, Meta(ge=0, le=RATE_MAX)] | UnsetType = UNSET
    policy: PolicyName | UnsetType = UNSET
    flood: bool | UnsetType = UNSET
    # The number of a GPU, from 0.
    kill: Annotated[int, Meta(ge=0, le=1023)] | UnsetType = UNSET
    revive: Annotated[int, Meta(ge=0, le=1023)] | UnsetType = UNSET
    poison: bool | UnsetType = UNSET


class Gpus(msgspec.Struct, frozen=True):
    """The simulated GPUs of the demo."""

    count: int
    slots: int
    latency_ms: float
    # Says a line to their process: `kill 3` or `revive 3`.
    tell: Callable[[str], None]
    # An input with this makes them fail its whole batch.
    poison: str

    @property
    def capacity_rps(self) -> float:
        """Requests a second that the GPUs serve with full batches."""
        return self.count * self.slots * 64 * 1000 / max(1.0, self.latency_ms)


class DemoPanel:
    """Does what the page asks for."""

    def __init__(self, gpus: Gpus, tiers: Sequence[TierSettings]) -> None:
        self._gpus = gpus
        self._rate = 0.0
        self._is_flooded = False
        self._dead: set[int] = set()
        self._comparison: Any = None
        self._comparing: asyncio.Task[None] | None = None
        self._load: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._process: Process
        # Empty before the process serves: the page may be looked at a moment earlier.
        self._loops: list[BatchLoop] = []
        self._keys = [f"demo_{secrets.token_urlsafe(16)}" for _ in tiers]
        # The callers of the load, by its `Authorization` header.
        self.callers: Mapping[bytes, Caller] = {
            b"Bearer " + key.encode(): Caller(f"demo-{tier.name}", number, is_anonymous=False)
            for number, (key, tier) in enumerate(zip(self._keys, tiers, strict=True))
        }

    def plug(self, process: Process) -> None:
        """Add the panel to a process, until that ends."""
        self._process = process
        self._loops = [service.loop for service in process.serving.services]
        process.admin.add(b"POST", b"/internal/demo", self.change)
        process.runtime.opened.push_async_callback(self._close)
        process.runtime.do_every(LOOK_S, self._end_load_in_a_drain)

    def state(self) -> dict[str, object]:
        """What the panel shows."""
        return {
            "rate": self._rate,
            "rate_max": round(min(RATE_MAX, max(100.0, 1.25 * self._gpus.capacity_rps)), -2),
            "flood": self._is_flooded,
            "flood_rate": self._flood_rps(),
            "policy": self._policy_name(),
            "policies": POLICIES,
            "gpus": self._gpus.count,
            "latency_ms": self._gpus.latency_ms,
            "dead": sorted(self._dead),
            "comparison": self._comparison,
        }

    def change(self, exchange: Exchange, _: str) -> None:
        """`POST /internal/demo`."""
        try:
            wish = msgspec.json.decode(exchange.body, type=PanelChange)
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise Malformed(f"this is no wish for the demo: {fault}") from None
        for gpu in (wish.kill, wish.revive):
            if gpu is not UNSET and gpu >= self._gpus.count:
                raise Malformed(f"there are {self._gpus.count} GPUs")
        self._grant(wish)
        exchange.respond(200, msgspec.json.encode(self.state()))

    def _grant(self, wish: PanelChange) -> None:
        if wish.policy is not UNSET:
            for loop in self._loops:
                loop.policy = make_policy(wish.policy)
        if wish.kill is not UNSET:
            self._dead.add(wish.kill)
            self._gpus.tell(f"kill {wish.kill}")
        if wish.revive is not UNSET:
            self._dead.discard(wish.revive)
            self._gpus.tell(f"revive {wish.revive}")
        if wish.poison is True:
            self._process.runtime.in_background(self._send_poison())
        if wish.rate is not UNSET or wish.flood is not UNSET:
            self._rate = self._rate if wish.rate is UNSET else wish.rate
            self._is_flooded = self._is_flooded if wish.flood is UNSET else wish.flood
            self._process.runtime.in_background(self._order())
        if wish.rate is not UNSET or wish.policy is not UNSET:
            self._compare_anew()

    def _policy_name(self) -> str:
        return type(self._loops[0].policy).__name__.lower() if self._loops else ""

    def _flood_rps(self) -> float:
        return round(min(FLOOD_RPS_MAX, FLOOD_TIMES * self._gpus.capacity_rps))

    # The load

    def _host(self) -> str:
        return reachable(self._process.runtime.settings.gateway.host)

    async def _order(self) -> None:
        tiers = self._process.runtime.settings.tiers
        rates = [self._rate * share for share in tier_shares(len(tiers))]
        rates[-1] += self._flood_rps() if self._is_flooded else 0.0
        segments = [Segment(sum(rates), FOREVER_S)] if any(rates) else []
        options = BenchOptions(
            url=f"http://{self._host()}:{self._process.port}",
            segments=segments,
            connections=default_connections(segments),
            payload_bytes=PAYLOAD_BYTES,
            tiers=[TierLoad(tier.name, rate, key) for tier, rate, key in zip(tiers, rates, self._keys, strict=True)],
        )
        async with self._starting:
            if self._load is None:
                self._load = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "carpool.tools.demo.load",
                    stdin=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
        if self._load.stdin is not None:
            self._load.stdin.write(msgspec.json.encode(options) + b"\n")

    def _end_load_in_a_drain(self) -> None:
        """End the load at a drain, which would wait for it."""
        if self._process.runtime.draining and self._load is not None and self._load.stdin is not None:
            self._load.stdin.close()

    async def _send_poison(self) -> None:
        """Send a poisonous input among good ones. Good ones before show that the GPUs are well, even without load."""
        good = [f"beside poison {number}" for number in range(BESIDE_POISON)]
        try:
            await asyncio.gather(*map(self._send_one, good))
            await asyncio.gather(*map(self._send_one, [*good, f"{self._gpus.poison} {secrets.token_hex(4)}"]))
        except OSError as failure:
            logger.warning("the demo could not send a poisonous input: %s", failure)

    async def _send_one(self, text: str) -> None:
        """Send one input as a client of the second tier."""
        body = msgspec.json.encode({"input": text})
        key = self._keys[min(1, len(self._keys) - 1)]
        reader, writer = await asyncio.open_connection(self._host().strip("[]"), self._process.port)
        writer.write(
            b"POST /v1/inference HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
        )
        await reader.read()
        writer.close()

    # The comparison

    def _compare_anew(self) -> None:
        if self._comparing is not None:
            self._comparing.cancel()
        self._comparison = self._comparing = None
        if self._rate:
            self._comparing = asyncio.get_running_loop().create_task(self._compare())

    async def _compare(self) -> None:
        await asyncio.sleep(STILL_S)
        told = self._rate, self._gpus.count * self._gpus.slots, self._gpus.latency_ms, self._policy_name()
        command = [sys.executable, "-m", "carpool.tools.demo.compare", *map(str, told)]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        try:
            async with asyncio.timeout(COMPARE_S_MAX):
                output, _ = await child.communicate()
            self._comparison = msgspec.json.decode(output)
        except (TimeoutError, msgspec.DecodeError):
            logger.warning("the demo's comparison failed")
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    async def _close(self) -> None:
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.wait([self._comparing])
        if self._load is not None and self._load.stdin is not None:
            self._load.stdin.close()
            await self._load.wait()
