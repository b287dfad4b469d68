"""Webhooks in the journal's file: outcomes that wait to be sent. One thread uses it, inside a transaction of the Store.

1. A webhook comes into the file in the transaction that gives its task its outcome. It has a copy of that: results are
   forgotten, or read and deleted, long before it may be given up.
2. `due` and `since` are on the journal's uptime clock, so time in which no process ran does not count.
3. A claimed webhook is due again when its lease is over; after a restart at once, for no deliverer has it.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Literal

from carpool.broker.journal_records import Counts
from carpool.core.task import StoredTask
from carpool.core.webhook import WEBHOOK_BYTES, DueWebhook, WebhookState, host_of, shown_url

# Each host costs some microseconds; those beyond wait for the next claim.
HOSTS_A_CLAIM_MAX = 512
SCHEMA = (
    """CREATE TABLE webhooks (
        id TEXT PRIMARY KEY, url TEXT NOT NULL, host TEXT NOT NULL, owner TEXT NOT NULL,
        status INTEGER NOT NULL, finished REAL NOT NULL, since REAL NOT NULL, due REAL NOT NULL,
        is_claimed INTEGER NOT NULL, attempts INTEGER NOT NULL, failure TEXT NOT NULL, bytes INTEGER NOT NULL,
        output BLOB, error BLOB)""",
    "CREATE INDEX webhooks_by_host ON webhooks (host, due)",
    "CREATE INDEX webhooks_by_due ON webhooks (due)",
)
# The host, the uptime clock's reading twice, the size, and the id of a task that has just got its outcome.
ADD = """INSERT INTO webhooks
    (id, url, host, owner, status, finished, since, due, is_claimed, attempts, failure, bytes, output, error)
    SELECT id, callback_url, ?, owner, status, finished, ?, ?, 0, 0, '', ?, output, error FROM tasks WHERE id = ?"""
NEXT_HOST = "SELECT min(host) FROM webhooks WHERE host > ?"
DUE = """SELECT id, url, attempts, since, bytes FROM webhooks
    WHERE host = ? AND due <= ? ORDER BY due LIMIT ?"""
CLAIM = "UPDATE webhooks SET due = ?, is_claimed = 1 WHERE id = ?"
UNCLAIM_ALL = "UPDATE webhooks SET due = 0, is_claimed = 0 WHERE is_claimed"
READ = "SELECT id, owner, status, output, error, finished FROM webhooks WHERE id = ?"
REMOVE = "DELETE FROM webhooks WHERE id = ? RETURNING bytes"
PUT_BACK = """UPDATE webhooks SET due = ?, is_claimed = 0, attempts = attempts + ?, failure = coalesce(?, failure)
    WHERE id = ?"""
PAGE = "SELECT id, url, attempts, failure, since, due, bytes FROM webhooks ORDER BY due LIMIT ?"
RETRY = "UPDATE webhooks SET due = 0 WHERE NOT is_claimed AND (? IS NULL OR id = ?)"
COUNT = f"SELECT count(*), coalesce(sum(bytes), 0) + count(*) * {WEBHOOK_BYTES} FROM webhooks"
STATUS_NAMES: tuple[Literal["PENDING", "SUCCESS", "FAILED"], ...] = ("PENDING", "SUCCESS", "FAILED")


class WebhookRows:
    """The webhooks of one file. Methods that change their number change `counts`, too."""

    def __init__(self, connection: sqlite3.Connection, counts: Counts) -> None:
        self._execute = connection.execute
        # Hosts are looked at in turn.
        self._last_host = ""
        # The counts of the transaction under way.
        self.counts = counts

    def open(self) -> None:
        """Count what an earlier process left, and let it be due."""
        self._execute(UNCLAIM_ALL)
        self.counts.webhooks, self.counts.webhook_bytes = self._execute(COUNT).fetchone()

    def add(self, task_id: str, url: str, size: int, now: float) -> None:
        """Let the outcome of a task be sent."""
        self._execute(ADD, (host_of(url), now, now, size, task_id))
        self.counts.webhooks += 1
        self.counts.webhook_bytes += size + WEBHOOK_BYTES

    def claim(self, limit: int, lease_s: float, host_max: int, busy: Mapping[str, int], now: float) -> list[DueWebhook]:
        """Some that are due, host by host, the oldest of each first. The next claim goes on with the next host."""
        found: list[DueWebhook] = []
        for host in self._next_hosts():
            room = min(host_max - busy.get(host, 0), limit - len(found))
            rows = self._execute(DUE, (host, now, room)).fetchall() if room > 0 else ()
            for task_id, url, attempts, since, size in rows:
                self._execute(CLAIM, (now + lease_s, task_id))
                found.append(DueWebhook(task_id, url, attempts, max(0.0, now - since), size))
            if len(found) >= limit:
                break
        return found

    def _next_hosts(self) -> Iterator[str]:
        """All hosts, or as many as may be looked at, from the one behind the last on; each once."""
        begin, is_second_round = self._last_host, not self._last_host
        for _ in range(HOSTS_A_CLAIM_MAX):
            (host,) = self._execute(NEXT_HOST, (self._last_host,)).fetchone()
            if host is not None and (not begin or not is_second_round or host <= begin):
                self._last_host = host
                yield host
            elif host is None and not is_second_round:
                self._last_host, is_second_round = "", True
            else:
                self._last_host = self._last_host if host is not None else ""
                return

    def read(self, task_id: str) -> StoredTask | None:
        """The outcome that is to be sent."""
        row = self._execute(READ, (task_id,)).fetchone()
        return None if row is None else StoredTask(row[0], row[1], STATUS_NAMES[row[2]], *row[3:])

    def remove(self, task_id: str) -> None:
        """Forget one."""
        for (size,) in self._execute(REMOVE, (task_id,)).fetchall():
            self.counts.webhooks -= 1
            self.counts.webhook_bytes -= size + WEBHOOK_BYTES

    def put_back(self, task_id: str, due: float, failure: str | None) -> None:
        """Let one be due at this time."""
        self._execute(PUT_BACK, (due, failure is not None, failure, task_id))

    def page(self, limit: int, now: float) -> list[WebhookState]:
        """The next ones."""
        return [
            WebhookState(task_id, shown_url(url), attempts, failure, round(now - since, 3), round(due - now, 3), size)
            for task_id, url, attempts, failure, since, due, size in self._execute(PAGE, (limit,))
        ]

    def retry(self, task_id: str | None) -> int:
        """Let one, or all, be due now; how many."""
        return self._execute(RETRY, (task_id, task_id)).rowcount
