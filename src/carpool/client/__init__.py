"""A client of the gateway for Python programs: `pip install carpool[client]`, then see docs/client.md."""

from carpool.client.asynchronous import AsyncClient
from carpool.client.synchronous import Client
from carpool.client.wire import Answer, CallOptions, Prediction, SubmitOptions, TaskOutput, Unreachable
from carpool.core.errors import CarpoolError

__all__ = [
    "Answer",
    "AsyncClient",
    "CallOptions",
    "CarpoolError",
    "Client",
    "Prediction",
    "SubmitOptions",
    "TaskOutput",
    "Unreachable",
]
