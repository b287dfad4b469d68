"""Tracking, as it is configured: which store, and the recorder that subscribes to the events of a process."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET

from carpool.composition.runtime import Runtime
from carpool.core.errors import CarpoolError
from carpool.core.snapshot import TrackingNumbers
from carpool.core.timeline import RequestState
from carpool.settings import ConfigError, Settings
from carpool.tracking.flights import FlightRecorder
from carpool.tracking.recorder import Recorder
from carpool.tracking.records import Store, StoreUnusableError, state_of_record

logger = logging.getLogger("carpool.tracking")

FILE_NAME = "tracking.db"
# Rows that wait to be written, of each kind; while the store is slow or away, those beyond are dropped.
BUFFER_MAX = 100_000
# So long an operator who asks for one request waits for the store.
LOOK_S_MAX = 2.0


def make_store(settings: Settings) -> Store | None:
    """The store that the configuration names; None: tracking is off."""
    tracking = settings.tracking
    if tracking.store == "off":
        return None
    if tracking.store == "sqlite":
        from carpool.tracking.sqlite import SqliteStore  # here: other stores do not wait for it

        path = Path(settings.tasks.data_dir) / FILE_NAME
        return SqliteStore(path, retention_days=tracking.retention_days, bytes_max=tracking.bytes_max)
    from carpool.tracking.postgres import PostgresStore

    return PostgresStore(tracking.url, retention_days=tracking.retention_days)


async def start_tracking(runtime: Runtime) -> Recorder | None:
    """Take down what happens from now on; None: tracking is off. Raises ConfigError if the store cannot be used."""
    store = make_store(runtime.settings)
    if store is None:
        return None
    recorder = make_recorder(runtime, store)
    try:
        await recorder.start()
    except StoreUnusableError as fault:
        await recorder.close()
        raise ConfigError(f"tracking: {fault}") from None
    # Before anything else is opened, so that it is closed after all of it: then nothing more can happen.
    runtime.opened.push_async_callback(recorder.close)
    runtime.events.subscribe(recorder)
    return recorder


def make_recorder(runtime: Runtime, store: Store) -> Recorder:
    """Who writes rows: of what ended, or also of what is in flight. The first does nothing when a request comes."""
    settings, clock = runtime.settings, runtime.clock
    tiers = [tier.name for tier in settings.tiers]
    if not settings.tracking.in_flight:
        return Recorder(store, tiers, buffer_max=BUFFER_MAX, clock=clock)
    return FlightRecorder(
        store,
        tiers,
        buffer_max=BUFFER_MAX,
        clock=clock,
        are_tasks_kept=settings.tasks.journal or bool(settings.broker.url),
        are_tasks_seen=settings.tracking.store == "postgres" or not settings.broker.url,
    )


def describe_tracking(recorder: Recorder | None) -> tuple[TrackingNumbers, ...]:
    """What `/metrics` shows of it, if there is any."""
    if recorder is None:
        return ()
    return (
        TrackingNumbers(
            tracking_written=recorder.written,
            tracking_dropped=recorder.dropped,
            tracking_waiting=recorder.waiting,
            tracking_failures=recorder.failures,
        ),
    )


async def look_up_ended(
    store: Store,
    request_id: str,
    found: RequestState | CarpoolError | None,
    answer: Callable[[RequestState | CarpoolError | None], None],
) -> None:
    """Answer with what was found; where that says nothing of a batch, with what was kept of the request, if it was."""
    if not is_told(found):
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                record = await store.find(request_id)
        except Exception as failure:  # whatever it is, the operator waits for the answer
            logger.warning("a request could not be looked up: %s", str(failure) or type(failure).__name__)
            record = None
        if record is not None and (found is None or record.completed_at is not None):
            found = state_of_record(record, found if isinstance(found, RequestState) else None)
    answer(found)


def is_told(found: RequestState | CarpoolError | None) -> bool:
    """Whether the store cannot add anything to what was found."""
    if not isinstance(found, RequestState):
        return isinstance(found, CarpoolError)
    return found.status in ("queued", "processing") or found.batch is not UNSET or found.cached is True
