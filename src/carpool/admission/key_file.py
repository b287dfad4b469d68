"""API keys in a SQLite file beside the journal: `carpool keys` writes it, the running gateway looks at it.

1. The gateway never writes and holds no lock while it does not read: it looks at the file's own count of changes, a few
   bytes, and reads the rest when that is another one. What cannot be read now is tried again at the next look, and
   what was read last stays. Another tool, as for backups, may have given the file a write-ahead log: then that count
   stands still, and another one is beside the file.
2. Only its owner may read the file. A key itself is never in it.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from carpool.core.api_key import ApiKey, KeyStoreError, decode_keys, encode_key

FILE_NAME = "keys.db"
APPLICATION_ID = 0x43504C4B  # "CPLK" in the file's header
BUSY_S = 5.0
# The gateway does not wait for a process that writes: it looks again soon.
LOOK_BUSY_S = 0.05
# Where SQLite counts the changes of a file that has no write-ahead log; and of one that has, in the file beside it.
_CHANGES_AT, _CHANGES_END = 24, 28
_LOG_INDEX_BYTES = 48
_SCHEMA = "CREATE TABLE keys (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID"


class KeyFile:
    """The keys in one file. Errors leave this class as KeyStoreError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, key: ApiKey) -> bool:
        """Keep a key; false if there is one of that name."""
        self._make()
        with self._opened(BUSY_S, "BEGIN IMMEDIATE") as database:
            if not self._is_ours(database):
                database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                database.execute(_SCHEMA)
            added = database.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (key.name, encode_key(key)))
            return added.rowcount == 1

    def revoke(self, name: str) -> bool:
        """Forget a key; false if there is none of that name."""
        if not self._path.exists():
            return False
        with self._opened(BUSY_S, "BEGIN IMMEDIATE") as database:
            if not self._is_ours(database):
                return False
            return database.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount == 1

    def all(self, busy_s: float = BUSY_S) -> list[ApiKey]:
        """Every key, by name."""
        if not self._path.exists():
            return []
        with self._opened(busy_s, "BEGIN") as database:
            if not self._is_ours(database):
                return []
            return decode_keys(body for (body,) in database.execute("SELECT body FROM keys ORDER BY name"))

    def version(self) -> bytes:
        """A text that differs after each change; b"" while there is no file."""
        try:
            with self._path.open("rb") as file:
                start, about = file.read(_CHANGES_END), os.fstat(file.fileno())
        except FileNotFoundError:
            return b""
        except OSError as failure:
            raise KeyStoreError(f"{self._path}: {failure.strerror}") from None
        # The file's time shows changes that are not counted: a log that was written back, a copy put in its place.
        return b"%d %d " % (about.st_ino, about.st_mtime_ns) + start[_CHANGES_AT:] + self._log_index()

    def _log_index(self) -> bytes:
        """What counts the changes in the write-ahead log; b"" if there is none, or no process has it open."""
        try:
            with self._path.with_name(f"{self._path.name}-shm").open("rb") as file:
                return file.read(_LOG_INDEX_BYTES)
        except OSError:
            return b""

    def _make(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Before SQLite opens it, so that no other user ever can; and its permissions may have been loosened since.
            file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                os.fchmod(file, 0o600)
            finally:
                os.close(file)
        except OSError as failure:
            raise KeyStoreError(f"{self._path}: {failure.strerror}") from None

    @contextmanager
    def _opened(self, busy_s: float, begin: str) -> Iterator[sqlite3.Connection]:
        # Never made by opening it: `_make` sees to who may read it.
        address = f"{self._path.absolute().as_uri()}?mode=rw"
        try:
            with closing(sqlite3.connect(address, timeout=busy_s, isolation_level=None, uri=True)) as database:
                database.execute(begin)
                yield database
                database.execute("COMMIT")
        except sqlite3.Error as failure:
            raise KeyStoreError(f"{self._path}: {failure}") from None

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        """Whether it has keys; false if it is empty."""
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (objects,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION_ID and (application or objects):
            raise KeyStoreError(f"{self._path}: not a file with API keys of Carpool")
        return bool(objects)
