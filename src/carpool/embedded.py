"""Everything in one process: face, admission, embedded broker, batching, upstream. Start and drain are read here."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.admission.gate import Gate
from carpool.broker.dead_letters import DeadLetterBox, DeadLetterDesk
from carpool.broker.journal import Journal
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.composition import Process, face_settings, http_limits, intake_settings
from carpool.core.request import Request, state_of
from carpool.face.http.admin import FoundRequest
from carpool.face.http.gateway import GatewayRoutes
from carpool.face.http.openapi import gateway_openapi
from carpool.face.http.server import HttpServer
from carpool.face.intake import Intake
from carpool.service import ModelService
from carpool.telemetry.metrics import Value

logger = logging.getLogger("carpool")


class Gateway(Process):
    """Everything in one process: face, admission, embedded broker, batching, upstream."""

    async def start(self) -> None:
        """Plug the stages together, from the back to the front, and listen."""
        settings = self.settings
        gateway = settings.gateway
        self.journal = Journal.open(
            Path(settings.tasks.data_dir) / "journal.db" if settings.tasks.journal else None,
            asyncio.get_running_loop(),
            result_ttl_s=settings.tasks.result_ttl_s,
            dead_letter_ttl_s=settings.tasks.dead_letter_ttl_s,
            stored_bytes_max=settings.tasks.stored_bytes_max,
            clock=self.clock,
        )
        self._opened.push_async_callback(self.journal.close)
        offenders = self.offenders
        self.broker = MemoryBroker(
            waiting_max=settings.broker.waiting_max,
            bytes_max=settings.broker.bytes_max,
            lanes_max=settings.broker.lanes_max,
            tiers=len(settings.tiers),
            strict_order=settings.broker.order == "strict",
            task_patience_s=settings.tasks.patience_ms / 1000,
            offenders=offenders,
            events=self.events,
            clock=self.clock,
        )
        dead_letters = DeadLetterBox(self.journal, settings.dead_letters.synchronous, self.clock)
        self.services = [
            ModelService(model, self.session, self.broker, dead_letters, offenders, clock=self.clock)
            for model in self.named.values()
        ]
        self.start_fleets()
        self.tasks = Tasks(
            self.broker,
            self.journal,
            prepare=self._prepare,
            waiting_max=settings.tasks.waiting_max,
            clock=self.clock,
        )
        self.gate = Gate(
            self.broker,
            self.tasks,
            {service.name: service.pool for service in self.services},
            lowest_tier=len(settings.tiers) - 1,
            trusted_proxies=gateway.trusted_proxies,
        )
        targets = tuple(tier.target_ms / 1000 for tier in settings.tiers)
        named = frozenset(self.named)
        restored = self.tasks.restore(named, lambda tier, now: now + targets[min(tier, len(targets) - 1)])
        self.intake = Intake(
            self.gate,
            self.broker,
            self.tasks,
            {service.name: service.served() for service in self.services},
            intake_settings(settings, targets),
            clock=self.clock,
        )
        routes = GatewayRoutes(
            self.intake,
            face_settings(settings),
            gateway_openapi(list(self.named), settings.model, settings.tasks.wait_ms_max),
        )
        self.start_timers()
        await self.listen_for_clients(HttpServer(routes.router, http_limits(settings, self.services), self.clock))
        await self.listen_for_operators(
            DeadLetterDesk(
                self.journal,
                self.tasks,
                named,
                tier_target_s=targets,
                task_timeout_s=settings.tasks.timeout_s,
                clock=self.clock,
            )
        )
        self.tasks.send_restored()
        for service in self.services:
            self.in_background(service.ask_limits())
        if not settings.tasks.journal:
            logger.warning("the journal is off: tasks are kept in memory only and do not survive this process")
        logger.info(
            "serving on %s:%d, admin on %s:%d",
            gateway.host,
            self.port,
            gateway.admin_host,
            self.admin_port,
            extra={"fields": {"models": list(self.named), "slots": self.slots_total(), "restored_tasks": restored}},
        )

    async def drain(self) -> None:
        """Stop taking new work, finish the old, leave. Every step may rely on those before it."""
        logger.info("draining")
        await self.stop_accepting()
        self.tasks.drain()  # waiting tasks stay in the journal
        for service in self.services:
            service.loop.drain()  # company will not come
        await self.answer_the_rest()
        self.gate.closed = True
        await self.finish_batches()  # of tasks
        await self.close()
        logger.info("drained")

    def expire(self) -> None:
        """Look at the deadlines."""
        self.broker.expire(self.clock())

    def _prepare(self, request: Request) -> None:
        for service in self.services:
            if service.name == request.model:
                service.prepare(request)

    # What operators see; also telemetry.metrics.View

    def health(self) -> dict[str, Any]:
        """The numbers of `/internal/health`."""
        return {
            "status": "draining" if self.draining else "healthy",
            "gpu_utilization": round(self.utilization(), 4),
            "queue_depth": self.broker.depth,
            "requests_per_second": round(sum(service.rate for service in self.services), 2),
        }

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when an endpoint accepts a connection and this process does not drain; else the reason why not."""
        if self.draining:
            answer("draining")
            return
        self.in_background(self.try_endpoints(answer))

    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a live or recent request is, or a task that is kept."""
        recent = self.intake.find_recent(request_id)
        if recent is None:
            recent = next((r for r in self.broker.waiting_requests() if r.id == request_id), None)
        if recent is None:
            self.tasks.state(request_id, answer)
        else:
            answer(state_of(recent, self.clock()))

    def numbers(self) -> dict[str, Value]:
        """What `/metrics` shows of this process as a whole."""
        broker, journal = self.broker, self.journal
        return super().numbers() | {
            "carpool_requests": broker.outcomes,
            "carpool_queue_wait_seconds": broker.waited,
            "carpool_held_requests": broker.held,
            "carpool_held_bytes": broker.held_bytes,
            "carpool_dead_letters": journal.buried,
            "carpool_dead_letters_lost": journal.letters_lost,
            "carpool_dead_letters_kept": journal.dead_letters,
            "carpool_dead_letter_bytes": journal.dead_letter_bytes,
            "carpool_tasks_pending": journal.tasks_pending,
            "carpool_results_stored": journal.results,
            "carpool_journal_bytes": journal.stored_bytes,
            "carpool_journal_commit_seconds": journal.commit_seconds,
            "carpool_journal_commit_failures": journal.commit_failures,
        }
