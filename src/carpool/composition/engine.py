"""The engine of one process: everything between intake and the upstream call, on a broker in memory.

Its two halves, admission and serving, are joined by the broker. It has no socket of clients: faces, the journal, the
live page attach to it. With a clock of virtual time, a seeded random and simulated endpoints it is the same engine:

    Engine(Runtime(settings, clock, random.random, endpoints))

There it takes no tasks, unless it is given what keeps them.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from carpool.admission.shedding import TICK_S
from carpool.broker.polls import WhenPolled, no_such_task
from carpool.composition.admission import Admission, DrainedTasks
from carpool.composition.runtime import Runtime
from carpool.composition.serving import Serving, make_broker
from carpool.composition.shedding import learn_own, make_shedders, sample, stats_of_tiers
from carpool.core.errors import CarpoolError, QueueFull
from carpool.core.ports import Caller, DeadLetters
from carpool.core.request import Request

# How often deadlines are looked at.
EXPIRY_TICK_S = 0.01

MakeTasks = Callable[[Serving], DrainedTasks]


class NoTasks:
    """Where nothing keeps tasks, none is accepted."""

    def __init__(self) -> None:
        self.arrivals: Counter[str] = Counter()

    def submit(self, request: Request, accepted: Callable[[CarpoolError | None], None]) -> None:
        """Refuse a task."""
        accepted(QueueFull("no tasks are kept here"))

    def look(self, caller: Caller, task_id: str, wait_s: float, forget: bool, answer: WhenPolled) -> object:
        """There is none."""
        return answer(no_such_task())

    def leave(self, ticket: object) -> None:
        """No client waits."""

    def delete(self, caller: Caller, task_id: str, done: Callable[[CarpoolError | None], None]) -> None:
        """There is none."""
        done(no_such_task())

    def drain(self) -> None:
        """No client waits."""


def no_tasks(serving: Serving) -> DrainedTasks:
    """For an engine without a journal."""
    return NoTasks()


class Engine:
    """Admission and serving over one broker."""

    def __init__(
        self, runtime: Runtime, make_tasks: MakeTasks = no_tasks, dead_letters: DeadLetters | None = None
    ) -> None:
        self.runtime = runtime
        self.broker = make_broker(runtime)
        shedders = make_shedders(runtime.settings, runtime.models, self.broker.queue_stats)
        sampled = partial(sample, shedders) if shedders else None
        self.serving = Serving(runtime, self.broker, dead_letters, runtime.models.values(), sampled=sampled)
        services = self.serving.services
        availability = {service.name: service.pool for service in services}
        self.admission = Admission(runtime, self.broker, make_tasks(self.serving), availability, services, shedders)

    def start(self) -> None:
        """Serve what comes from now on."""
        self.serving.start()
        self.runtime.do_every(TICK_S, self._update_shedders)
        self.runtime.do_every(EXPIRY_TICK_S, self.expire)

    def admit(self, request: Request) -> CarpoolError | None:
        """Let a synchronous request in that has passed a face, or say why not."""
        return self.admission.gate.admit(request)

    def expire(self) -> None:
        """Look at the deadlines."""
        self.admission.expire(self.runtime.clock())

    async def drain(self) -> None:
        """Let the batches under way come to their end; after that nothing is sent."""
        await self.serving.drain()

    async def run(self, load: Awaitable[object]) -> None:
        """Serve this load, and no other: for virtual time."""
        self.start()
        await load
        await self.drain()
        await self.runtime.close()

    def _update_shedders(self) -> None:
        """Tell the shedders what the endpoints of this process can serve."""
        tiers = len(self.runtime.settings.tiers)
        for service in self.serving.services:
            if (shedder := self.admission.shedders.get(service.name)) is not None:
                learn_own(shedder, service, stats_of_tiers(self.broker.queue_stats, service.name, tiers))
                shedder.tick(self.runtime.clock())
