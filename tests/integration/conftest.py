"""Real processes: they get times that a busy machine does not reach, and begin as forks (`support/forks.py`)."""

from collections.abc import Iterator

import pytest

from support import forks, processes
from support.certificates import Certificates

PATIENT = {"broker.queue_timeout_s": 60, "broker.total_timeout_s": 90}


@pytest.fixture(autouse=True, scope="session")
def patient_processes() -> Iterator[None]:
    """For all of this folder, in every worker."""
    processes.PATIENT.update(PATIENT)
    forks.IS_ON = True
    yield
    forks.IS_ON = False
    processes.PATIENT.clear()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Once for each worker: they take a second to make. A test that needs another one makes it under its own name."""
    return Certificates(tmp_path_factory.mktemp("certificates"))
