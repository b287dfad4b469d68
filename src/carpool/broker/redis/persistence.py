"""Whether Redis writes to a disk although `broker.persistence` forbids it: somebody may turn that on at any time."""

import asyncio
import logging
from collections.abc import Sequence

from carpool.broker.redis.doctor import Doctor
from carpool.broker.redis.doctor_checks import Finding

logger = logging.getLogger("carpool.broker")

INTERVAL_S = 5.0
TOLD_MAX = 3


class PersistenceWatch:
    """Looks from time to time, and says so in the log; health and metrics show `found`."""

    def __init__(self, doctor: Doctor, interval_s: float = INTERVAL_S) -> None:
        self._doctor = doctor
        self._interval_s = interval_s
        # What writes to a disk; empty if nothing does.
        self.found = ""
        self._task: asyncio.Task[None] | None = None

    async def faults(self) -> str:
        """What is to be said against using this Redis; empty if nothing is."""
        return sentence(await self._doctor.find_disks())

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                findings = await self._doctor.find_disks()
            except Exception:  # to stop looking would be worse
                logger.exception("Redis could not be asked whether it writes to a disk")
                continue
            disks = [finding for finding in findings if finding.check == "persistence"]
            if not disks and findings:
                continue  # it does not answer: what was known stays
            if (found := sentence(disks)) != self.found:
                self.found = found
                if found:
                    logger.error("payloads may reach a disk: %s", found)
                else:
                    logger.warning("Redis writes to no disk any more")


def sentence(findings: Sequence[Finding]) -> str:
    """Findings in one line."""
    told = [f"{', '.join(each.where) or 'Redis'}: {each.says}; {each.do}" for each in findings[:TOLD_MAX]]
    return " | ".join(told)
