"""Real processes: they get times that a busy machine does not reach."""

from collections.abc import Iterator

import pytest

from support import processes
from support.certificates import Certificates

PATIENT = {"broker.queue_timeout_s": 60, "broker.total_timeout_s": 90}


@pytest.fixture(autouse=True, scope="session")
def patient_processes() -> Iterator[None]:
    """For all of this folder, in every worker."""
    processes.PATIENT.update(PATIENT)
    yield
    processes.PATIENT.clear()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Once for each worker: they take a second to make. A test that needs another one makes it under its own name."""
    return Certificates(tmp_path_factory.mktemp("certificates"))
