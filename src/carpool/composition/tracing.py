"""Tracing as configured: a tracer that listens to what happens, and an exporter that sends what it keeps."""

import os
import random
import secrets
import socket
from time import time
from typing import TYPE_CHECKING, NamedTuple

from carpool.core.clock import Clock
from carpool.core.events import Events
from carpool.core.histograms import RequestSeconds
from carpool.core.snapshot import TraceNumbers
from carpool.settings import Settings
from carpool.settings.schema import TracingSettings
from carpool.telemetry.spans import Envelope
from carpool.telemetry.tracer import Ratio, Tracer
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.telemetry.exporter import Exporter

PATH = "/v1/traces"
# Spans that wait for the receiver; more are dropped. And the longest time for one call to it.
BUFFER_BYTES_MAX = 32 * 1024 * 1024
TIMEOUT_S = 10.0


class Tracing(NamedTuple):
    """Where it is on."""

    tracer: Tracer
    exporter: "Exporter"

    async def close(self) -> None:
        """Send what was kept."""
        self.tracer.finish()
        await self.exporter.close()

    def describe(self) -> TraceNumbers:
        """What `/metrics` shows of it."""
        return TraceNumbers(
            traces_kept=self.tracer.kept,
            trace_spans={
                "sent": self.exporter.sent,
                "dropped": self.exporter.dropped,
                "rejected": self.exporter.rejected,
            },
            trace_export_failures=self.exporter.failures,
        )


def start_tracing(settings: Settings, events: Events, seconds: RequestSeconds, clock: Clock) -> Tracing | None:
    """Trace what happens from now on; None where that is off."""
    own = settings.tracing
    if not own.otlp_endpoint:
        return None
    from carpool.telemetry.exporter import Exporter  # it brings aiohttp, which is not needed where this is off

    exporter = Exporter(
        # By OTLP's rule for a base URL; a URL that names the path of traces already stays.
        own.otlp_endpoint.removesuffix(PATH).rstrip("/") + PATH,
        dict(pairs_of(own.headers)),
        Envelope(resource_of(own), "carpool", __version__),
        bytes_max=BUFFER_BYTES_MAX,
        timeout_s=TIMEOUT_S,
    )
    # Ids must differ, and need not be secret: a generator of its own, seeded by the system.
    drawn = random.Random(secrets.randbits(128))
    tracer = Tracer(
        Ratio(own.sample_ratio, drawn.getrandbits, drawn.random),
        [tier.name for tier in settings.tiers],
        exporter.add,
        follows_callers=own.follow_callers,
        seconds=seconds,
        clock=clock,
        wall=time,
        random_bits=drawn.getrandbits,
    )
    exporter.start()
    tracer.start()
    events.subscribe(tracer)
    return Tracing(tracer, exporter)


def resource_of(own: TracingSettings) -> list[tuple[str, str]]:
    """The process that writes the spans."""
    host = socket.gethostname()
    told = {
        "service.name": "carpool",
        "service.version": __version__,
        "service.instance.id": f"{host}-{os.getpid()}",
        "host.name": host,
    }
    return list((told | dict(pairs_of(own.resource_attributes))).items())


def pairs_of(texts: list[str]) -> list[tuple[str, str]]:
    """Names and values."""
    return [(name.strip(), value.strip()) for name, _, value in (text.partition("=") for text in texts)]
