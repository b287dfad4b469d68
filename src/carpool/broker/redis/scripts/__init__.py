"""The scripts that run inside Redis, each one atomic step in one shard."""

from hashlib import sha1
from importlib.resources import files

from carpool.broker.redis.client.nodes import Script

# Scripts that do without common.lua, but use keys of their shard that they are not given.
OF_A_SHARD = frozenset(("keep",))


def _load(name: str, *parts: str) -> Script:
    folder = files("carpool.broker.redis.scripts")
    source = b"".join((folder / f"{part}.lua").read_bytes() for part in ("clock", *parts, name))
    sha = sha1(source, usedforsecurity=False).hexdigest().encode()
    # Which keys of its shard a script needs is often known only inside of it.
    return Script(name, source, sha, names_all_keys=name not in OF_A_SHARD and "common" not in parts)


SUBMIT = _load("submit", "common", "bytes", "burial")
ARRIVED = _load("arrived", "common")
CANCEL = _load("cancel", "common")
LEVEL = _load("level", "common")
CLAIM = _load("claim", "common")
RENEW = _load("renew", "common")
RELEASE = _load("release", "common")
DONE = _load("done", "common")
SWEEP = _load("sweep", "common", "bytes", "burial")
AUDIT = _load("audit", "common")
LOOK = _load("look", "common", "bytes")
FORGET = _load("forget", "common", "bytes")
WAS_READ = _load("was_read", "common", "bytes")
FINISH = _load("finish", "common", "bytes", "burial")
BURY = _load("bury", "common", "burial")
LETTERS = _load("letters", "common")
DROP = _load("drop", "common", "burial")
RATES = _load("rates")
ANSWERED = _load("answered", "common", "bytes")
HOOK_CLAIM = _load("hook_claim", "common", "bytes")
HOOK_END = _load("hook_end", "common", "bytes")
HOOK_LIST = _load("hook_list", "common", "bytes")
HOOK_RETRY = _load("hook_retry", "common", "bytes")
KEEP = _load("keep")
REPLY = _load("reply")
HEARTBEAT = _load("heartbeat")
SCALE = _load("scale")
API_KEYS = _load("api_keys")
