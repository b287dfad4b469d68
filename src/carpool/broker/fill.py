"""Will there be room for tasks? Says so in the log before they are refused. Pure but for that line."""

import logging

logger = logging.getLogger("carpool.broker")

LOOK_S = 5.0
# From this share on a warning is logged if the store is full within SOON_S; then not again for QUIET_S.
WORTH_A_LINE = 0.8
SOON_S = 3600.0
QUIET_S = 600.0


class FillWatch:
    """Looks from time to time at what tasks and unread results have of `tasks.stored_bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        # When `look` was last called, and what was used then.
        self._last: tuple[float, int] | None = None
        self._quiet_until = 0.0

    def look(self, used: int, now: float) -> None:
        """So much is used now."""
        last, self._last = self._last, (now, used)
        if used < WORTH_A_LINE * self._bytes_max:
            self._quiet_until = 0.0  # the next time is another story
            return
        if last is None or now <= last[0] or now < self._quiet_until:
            return
        bytes_a_second = (used - last[1]) / (now - last[0])
        left = max(0, self._bytes_max - used)
        if left <= bytes_a_second * SOON_S:
            self._quiet_until = now + QUIET_S
            logger.warning(
                "tasks and results that nobody has read have %.0f %% of tasks.stored_bytes_max (%d bytes): at the "
                "present pace it is full in %.0f s, and new tasks get a 503; fetch or delete results, lower "
                "tasks.result_ttl_s, or raise it",
                100 * used / self._bytes_max,
                self._bytes_max,
                left / bytes_a_second if bytes_a_second > 0 else 0,
            )
