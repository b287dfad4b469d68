"""The scripts that run inside Redis, each one atomic step in one shard."""

from hashlib import sha1
from importlib.resources import files

import msgspec


class Script(msgspec.Struct, frozen=True):
    """One script: its text, and the name Redis knows it by once it has seen the text."""

    name: str
    source: bytes
    sha: bytes


def _load(name: str, *parts: str) -> Script:
    folder = files("carpool.broker.redis") / "scripts"
    source = b"".join((folder / f"{part}.lua").read_bytes() for part in ("common", *parts, name))
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


SUBMIT = _load("submit", "bytes", "burial")
TAKE = _load("take")
PEEK = _load("peek")
RENEW = _load("renew")
RELEASE = _load("release")
CANCEL = _load("cancel")
DONE = _load("done")
REPLY = _load("reply")
LEVEL = _load("level")
ARRIVED = _load("arrived")
SWEEP = _load("sweep", "burial")
HEARTBEAT = _load("heartbeat")
AUDIT = _load("audit")
LOOK = _load("look")
STATE = _load("state")
FORGET = _load("forget", "bytes")
FINISH = _load("finish", "bytes", "burial")
BURY = _load("bury", "burial")
LETTERS = _load("letters")
DROP = _load("drop", "burial")
