"""Everything in one process: faces, the engine on a broker in memory, tasks in a journal. Its parts are listed here."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import UNSET

from carpool.broker.dead_letters import DeadLetterBox, DeadLetterDesk
from carpool.broker.journal import Journal, JournalOutbox
from carpool.broker.result_cache import SameKey
from carpool.broker.tasks import Tasks
from carpool.broker.webhooks.deliverer import Deliverer
from carpool.composition.credentials import watch_key_file
from carpool.composition.engine import Engine
from carpool.composition.faces import Faces
from carpool.composition.process import Part, Process
from carpool.composition.scaling import FILE_NAME, Demands, KeptInFile, Scaling, own_loads
from carpool.composition.serving import Serving
from carpool.composition.tracking import describe_tracking
from carpool.composition.webhooks import describe_webhooks, start_webhooks
from carpool.core.defaults import do_nothing
from carpool.core.outcome import Output
from carpool.core.snapshot import FleetState, Health, JournalNumbers, OutcomeNumbers, Snapshot, problem_of
from carpool.core.webhook import WEBHOOK_BYTES_MAX
from carpool.face.http.admin import FoundRequest

logger = logging.getLogger("carpool")

# Of the places that there are for requests, tasks have this share: they leave room for those who wait on the line.
TASKS_SHARE = 0.5


class EmbeddedProcess(Process):
    """Both halves over one broker in memory, and tasks in a journal."""

    # None: no host is allowed.
    webhooks: Deliverer | None = None

    async def plug(self) -> Sequence[Part]:
        """The engine, its journal, and the faces."""
        runtime = self.runtime
        tasks = runtime.settings.tasks
        self.journal = Journal(
            Path(tasks.data_dir) / "journal.db" if tasks.journal else None,
            asyncio.get_running_loop(),
            result_ttl_s=tasks.result_ttl_s,
            dead_letter_ttl_s=tasks.dead_letter_ttl_s,
            stored_bytes_max=tasks.stored_bytes_max,
            webhook_bytes_max=WEBHOOK_BYTES_MAX,
            clock=runtime.clock,
        )
        runtime.opened.push_async_callback(self.journal.close)
        outbox = JournalOutbox(self.journal)
        self.webhooks = start_webhooks(runtime, outbox)
        dead_letters = DeadLetterBox(self.journal, runtime.settings.dead_letters.synchronous, runtime.clock)
        self.engine = Engine(runtime, self._make_tasks, dead_letters)
        self.serving, self.admission, self.broker = self.engine.serving, self.engine.admission, self.engine.broker
        self.faces = Faces(runtime, self.admission)
        self.scaling = self._make_scaling()
        desk = DeadLetterDesk(
            self.journal,
            self.tasks,
            frozenset(runtime.models),
            tier_target_s=runtime.tier_target_s,
            task_timeout_s=tasks.timeout_s,
            clock=runtime.clock,
        )
        return (
            Part(self.engine.start, self.engine.drain),
            Part(self._restore_tasks),
            Part(self._watch),
            Part(self._open_faces, self._close_faces),
            Part(partial(self.listen_for_operators, desk, outbox)),
            Part(self.tasks.send_restored),
            Part(self._say_where),
        )

    def _restore_tasks(self) -> None:
        targets = self.runtime.tier_target_s

        def place_of(tier: int, now: float) -> float:
            return now + targets[min(tier, len(targets) - 1)]

        self._restored = self.tasks.restore(frozenset(self.runtime.models), place_of)

    def _watch(self) -> None:
        if self.admission.credentials is not None:
            watch_key_file(self.runtime, self.admission.credentials)
        self.scaling.start()

    def _make_scaling(self) -> Scaling:
        runtime, broker, arrivals, tasks = self.runtime, self.broker, self.tasks.arrivals, self.runtime.settings.tasks
        demands = Demands(
            runtime,
            self.admission.shedders,
            self.admission.gate.turned_away,
            sync_arrivals=lambda model: broker.arrivals(model) - arrivals[model],
            task_arrivals=arrivals.__getitem__,
        )
        keeper = KeptInFile(runtime, Path(tasks.data_dir) / FILE_NAME if tasks.journal else None)
        services, settings = self.serving.services, runtime.settings
        return Scaling(runtime, lambda _: own_loads(services, demands, broker.depth_of, settings), keeper)

    async def _open_faces(self) -> None:
        await self.faces.start(self.listening, self.check_ready)
        self.port = self.faces.port

    async def _close_faces(self) -> None:
        await self.faces.stop_accepting()  # waiting tasks stay in the journal
        self.serving.hurry()
        await self.faces.drain()

    def _say_where(self) -> None:
        if not self.runtime.settings.tasks.journal:
            logger.warning("the journal is off: tasks are kept in memory only and do not survive this process")
        slots = self.serving.slots_total()
        facts = {"models": list(self.runtime.models), "slots": slots, "restored_tasks": self._restored}
        gateway = self.runtime.settings.gateway
        where = (gateway.host, self.port, gateway.admin_host, self.admin_port)
        logger.info("serving on %s:%d, admin on %s:%d", *where, extra={"fields": facts})

    def _make_tasks(self, serving: Serving) -> Tasks:
        self.tasks = Tasks(
            serving.broker,
            self.journal,
            prepare=serving.prepare,
            waiting_max=max(1, int(TASKS_SHARE * self.runtime.settings.broker.waiting_max)),
            capacity_rps=serving.capacity_rps,
            keep_result=self._keep_result,
            webhook_is_due=do_nothing if self.webhooks is None else self.webhooks.notify,
            clock=self.runtime.clock,
        )
        return self.tasks

    def _keep_result(self, key: SameKey, output: Output) -> None:
        self.admission.results.keep(key, output, self.runtime.clock())

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when an endpoint accepts a connection and this process does not drain; else the reason why not."""
        if self.runtime.draining:
            answer("draining")
        else:
            self.serving.try_endpoints(answer)

    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a live or recent request is, or a task that is kept."""
        recent = (
            self.admission.find_recent(request_id)
            or self.watch.find_slow(request_id)
            or self.serving.find_waiting(request_id)
        )
        if recent is None:
            self.tasks.state(request_id, answer)
        else:
            answer(self.serving.tell_of(recent))

    def snapshot(self) -> Snapshot:
        """What operators see."""
        runtime, serving, broker, journal = self.runtime, self.serving, self.broker, self.journal
        states = serving.states()
        problem = problem_of(
            (each.endpoint, each.problem)
            for state in states.values()
            for each in state.endpoints
            if isinstance(each.problem, str)
        )
        return Snapshot(
            health=Health(
                status=runtime.status_with(problem),
                problem=problem or UNSET,
                gpu_utilization=round(serving.utilization(), 4),
                queue_depth=broker.depth,
                requests_per_second=round(sum(service.rate for service in serving.services), 2),
            ),
            fleet=FleetState(models=states),
            scale=self.scaling.state(),
            numbers=(
                OutcomeNumbers(
                    requests=broker.outcomes,
                    queue_wait_seconds=broker.waited,
                    request_seconds=runtime.by_tier_name(runtime.seconds.by_tier.__getitem__),
                    stage_seconds=runtime.seconds.stages(),
                    waiting=runtime.by_tier_name(broker.depth_of_tier),
                    dead_letters=journal.buried,
                    dead_letters_lost=journal.letters_lost,
                    dead_letters_kept=journal.counts.dead_letters,
                    dead_letter_bytes=journal.counts.dead_letter_bytes,
                ),
                self.faces.describe(broker.held, broker.held_bytes),
                self.admission.describe_cache(),
                self.scaling.numbers(),
                JournalNumbers(
                    tasks_pending=journal.counts.tasks_pending,
                    results_stored=journal.counts.results,
                    journal_bytes=journal.stored_bytes,
                    journal_commit_seconds=journal.writer.commit_seconds,
                    journal_commit_failures=journal.writer.commit_failures,
                    journal_disk_free_share=journal.writer.disk_free_share,
                    journal_fill=journal.stored_bytes / runtime.settings.tasks.stored_bytes_max,
                ),
                *describe_webhooks(self.webhooks),
                *describe_tracking(self.tracking),
                *self.runtime.describe(),
            ),
            models=serving.describe(),
        )
