"""API keys in a file (`admission/key_file.py`)."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from carpool.admission.key_file import LOOK_BUSY_S, KeyFile
from carpool.composition.credentials import FileWatch
from carpool.core.api_key import ApiKey, KeyStoreError

ALICE = ApiKey(name="alice", sha256="a" * 64, tier="paid", models=("m",), per_minute=7, created=1.5)
BOB = ApiKey(name="bob", sha256="b" * 64)


def watching(path: Path, told: list[list[ApiKey]]) -> FileWatch:
    file = KeyFile(path)
    return FileWatch(str(path), file.version, lambda _: told.append(file.all(LOOK_BUSY_S)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "keys.db"


def test_create_list_revoke(path: Path) -> None:
    file = KeyFile(path)
    assert file.all() == [] and not file.revoke("alice") and not path.exists()
    assert file.create(BOB) and file.create(ALICE)
    assert not file.create(ApiKey(name="alice", sha256="c" * 64))
    assert KeyFile(path).all() == [ALICE, BOB]
    assert file.revoke("alice") and not file.revoke("alice")
    assert file.all() == [BOB]


def test_a_watch_tells_of_each_change_once(path: Path) -> None:
    file = KeyFile(path)
    told: list[list[ApiKey]] = []
    watch = watching(path, told)
    watch.look()
    watch.look()
    assert told == [[]]
    file.create(ALICE)
    watch.look()
    watch.look()
    assert told == [[], [ALICE]]
    # Two changes that leave a file of the same size, within one tick of the file system's clock.
    file.revoke("alice")
    file.create(ALICE)
    watch.look()
    file.revoke("alice")
    watch.look()
    assert told == [[], [ALICE], [ALICE], []]
    path.unlink()
    file.create(BOB)
    watch.look()
    assert told[-1] == [BOB]


@pytest.mark.parametrize("stays_open", [True, False])
def test_also_where_a_tool_gave_the_file_a_write_ahead_log(path: Path, stays_open: bool) -> None:
    file = KeyFile(path)
    file.create(ALICE)
    told: list[list[ApiKey]] = []
    watch = watching(path, told)
    with closing(sqlite3.connect(path)) as tool:
        assert tool.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        if not stays_open:
            tool.close()
        watch.look()
        assert told[-1] == [ALICE]
        file.create(BOB)
        watch.look()
        assert told[-1] == [ALICE, BOB]
        file.revoke("alice")
        watch.look()
        assert told[-1] == [BOB]
        told.clear()
        watch.look()
        assert told == []
    file.revoke("bob")
    watch.look()
    assert told == [[]]


def test_an_empty_file_has_no_keys_yet(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    told: list[list[ApiKey]] = []
    watching(path, told).look()
    assert told == [[]] and not KeyFile(path).revoke("alice")
    assert KeyFile(path).create(BOB)


def test_while_somebody_writes_what_is_known_stays(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path)
    file.create(ALICE)
    told: list[list[ApiKey]] = []
    watch = watching(path, told)
    watch.look()
    file.create(BOB)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        watch.look()
        watch.look()
        other.execute("ROLLBACK")
    assert told == [[ALICE]]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
    watch.look()
    assert told == [[ALICE], [ALICE, BOB]]


def test_another_program_s_file_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE keys (mine TEXT)")
    for work in (lambda: KeyFile(path).create(BOB), KeyFile(path).all, lambda: KeyFile(path).revoke("bob")):
        with pytest.raises(KeyStoreError, match="not a file with API keys"):
            work()
    path.write_bytes(b"no database at all, but long enough to be looked at" * 20)
    with pytest.raises(KeyStoreError):
        KeyFile(path).all()
