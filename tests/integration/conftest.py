"""Real processes: they get times that a busy machine does not reach."""

from collections.abc import Iterator

import pytest

from support import processes

PATIENT = {"broker.queue_timeout_s": 60, "broker.total_timeout_s": 90}


@pytest.fixture(autouse=True, scope="session")
def patient_processes() -> Iterator[None]:
    """For all of this folder, in every worker."""
    processes.PATIENT.update(PATIENT)
    yield
    processes.PATIENT.clear()
