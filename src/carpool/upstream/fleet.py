"""The endpoints of one model as a whole: what operators see of them, and how they change while running."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from carpool.core.clock import Clock, monotonic
from carpool.core.snapshot import EndpointHealth
from carpool.upstream.endpoint import Endpoint
from carpool.upstream.health import HealthWatch, endpoint_state, fails, healthy_slots, works
from carpool.upstream.pool import AskHealth, EndpointState, Pool


class Address(NamedTuple):
    """Where an endpoint is, and how much it takes at once. A change of either makes it another endpoint."""

    url: str
    # None: that is found out.
    slots: int | None


MakeEndpoint = Callable[[Address], Endpoint]
Endpoints = Mapping[Address, Endpoint]


class Fleet:
    """The endpoints of one model, their pool, and the watch over them."""

    def __init__(
        self,
        addresses: Sequence[Address],
        make_endpoint: MakeEndpoint,
        make_pool: Callable[[Sequence[Endpoint], AskHealth], Pool],
        make_watch: Callable[[Pool], HealthWatch],
        clock: Clock = monotonic,
    ) -> None:
        self._endpoints = {address: make_endpoint(address) for address in addresses}
        self._clock = clock
        self.pool = make_pool(list(self._endpoints.values()), self._ask_health)
        self._watch = make_watch(self.pool)
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Fleet {len(self._endpoints)} endpoints, {len(self._closing)} closing>"

    def start(self) -> None:
        """Begin to watch."""
        self._watch.start()

    async def close(self) -> None:
        """Stop watching, and give up every endpoint."""
        await self._watch.close()
        await asyncio.gather(*self._closing, *(endpoint.close() for endpoint in self._endpoints.values()))

    def prepare(self, addresses: Iterable[Address], make_endpoint: MakeEndpoint) -> Endpoints:
        """What `change_to` takes: the endpoints that stay, and new ones. Whatever may fail fails here."""
        prepared: dict[Address, Endpoint] = {}
        try:
            for address in addresses:
                prepared[address] = self._endpoints.get(address) or make_endpoint(address)
        except Exception:
            self.give_up(prepared)
            raise
        return prepared

    def give_up(self, prepared: Endpoints) -> None:
        """Close what was prepared for a change that is not made."""
        for address, endpoint in prepared.items():
            if address not in self._endpoints:
                self._close(endpoint)

    def change_to(self, prepared: Endpoints) -> tuple[int, int]:
        """Have these endpoints from now on; returns how many came and how many go.

        Endpoints that go get no new call; what they have under way is finished.
        """
        came = [endpoint for address, endpoint in prepared.items() if address not in self._endpoints]
        gone = [endpoint for address, endpoint in self._endpoints.items() if address not in prepared]
        self._endpoints = dict(prepared)
        for endpoint in came:
            self.pool.add(endpoint)
        for endpoint in gone:
            self.pool.remove(endpoint, partial(self._close, endpoint))
        return len(came), len(gone)

    def healthy_slots(self) -> float:
        """Calls that the endpoints that work may have at once."""
        return healthy_slots(self.pool.members, self._clock())

    def slots(self) -> int:
        """Calls that all endpoints may have at once."""
        return sum(member.controller.slots for member in self.pool.members)

    def working(self) -> int:
        """Endpoints that get calls."""
        return sum(works(member, self._clock()) for member in self.pool.members)

    def failing(self) -> int:
        """Endpoints that answer their probes, but not their calls."""
        return sum(fails(member, self._clock()) for member in self.pool.members)

    def endpoint_states(self) -> list[EndpointHealth]:
        """What the fleet's page shows of every endpoint."""
        now, wall = self._clock(), time.time()
        return [endpoint_state(member, now, wall) for member in self.pool.members]

    def _ask_health(self, member: EndpointState, tell: Callable[[bool], None]) -> None:
        self._watch.ask(member, tell)

    def _close(self, endpoint: Endpoint) -> None:
        task = asyncio.get_running_loop().create_task(endpoint.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
