"""The names of everything Carpool keeps in Redis, and on which shard it is. Pure.

All keys of a shard share one hash tag, so they lie in one slot of a Cluster and a script may use them together. The
tags are chosen so that shard n of 16 lies in the n-th sixteenth of the slots: however many primaries share the slots
evenly, they share the shards evenly.

What each key holds is in docs/redis.md.
"""

from hashlib import blake2b
from zlib import crc32

import msgspec
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

# Parts of the queue, spread over a Cluster: more than it has primaries in use, few enough to look at each. Task ids end
# with the number of theirs in hex, and all processes of a fleet must agree.
SHARDS_MAX = 16
GROUP = b"batchers"
# Of the keys of a shard that have a fixed name, as the fields of `Shard` below.
NAMES = (b"lanes", b"counts", b"letters", b"letter", b"hooks", b"wakeup", b"unsure", b"kept", b"kept-before")


class Shard(msgspec.Struct, frozen=True):
    """One part of the queue: its keys lie in one slot."""

    number: int
    slot: int
    # What every key of the shard begins with.
    prefix: bytes
    lanes: bytes
    counts: bytes
    letters: bytes
    letter_bodies: bytes
    hooks: bytes
    wakeup: bytes
    # Tasks whose submitters have no answer yet.
    unsure: bytes
    # Results that are kept for requests that are the same, the later and the earlier ones.
    kept: bytes
    kept_before: bytes

    def stream(self, field: bytes) -> bytes:
        """The stream of a field of `lanes`."""
        return self.prefix + b"q:" + field

    def task(self, task_id: str) -> bytes:
        """The hash of a task."""
        return self.prefix + b"task:" + task_id.encode()

    def hook(self, task_id: str) -> bytes:
        """The hash of a task's webhook."""
        return self.prefix + b"hook:" + task_id.encode()

    def ends(self, name: bytes) -> bytes:
        """The hash of receipts of one process (ended_tasks.py)."""
        return self.prefix + b"ends:" + name

    def rate(self, owner: str) -> bytes:
        """The hash of an owner's rate limit."""
        return self.prefix + b"bucket:" + owner.encode()


class Keys:
    """The names in one namespace."""

    def __init__(self, namespace: str = "carpool", shards: int = SHARDS_MAX) -> None:
        if not 1 <= shards <= SHARDS_MAX:
            raise ValueError(f"shards must be 1 to {SHARDS_MAX}")
        self.namespace = namespace.encode()
        self.shards = tuple(self._shard(number) for number in range(shards))
        fleet = self.namespace + b":{fleet}:"
        self.fleet_slot = key_slot(fleet)
        self.gateways = fleet + b"gateways"
        self.batchers = fleet + b"batchers"
        self.live = fleet + b"live"
        self.scale = fleet + b"scale"
        self.api_keys = fleet + b"keys"
        self.api_keys_version = fleet + b"keys-version"

    def shard_of_task(self, task_id: str) -> Shard:
        """Where a task is kept: its id says it."""
        return self.shards[int(task_id[-1], 16) % len(self.shards)]

    def shard_of_owner(self, owner: str) -> Shard:
        """Where an owner's rate limit is kept."""
        return self.shards[crc32(owner.encode()) % len(self.shards)]

    def slot_of(self, key: bytes) -> int:
        """The Cluster slot of a key."""
        return key_slot(key)

    def replies(self, gateway: bytes) -> bytes:
        """The stream of outcomes for one gateway."""
        return b"%b:replies:{%b}" % (self.namespace, gateway)

    def _shard(self, number: int) -> Shard:
        prefix = b"%b:{%b}:" % (self.namespace, shard_tag(number))
        return Shard(number, key_slot(prefix), prefix, *(prefix + name for name in NAMES))


def shard_tag(number: int) -> bytes:
    """The first tag whose slot is in the shard's sixteenth of all slots."""
    attempt = 0
    while key_slot(tag := b"%d.%d" % (number, attempt)) * SHARDS_MAX // SLOTS != number:
        attempt += 1
    return tag


def lane_name(model: str, lane_key: bytes) -> bytes:
    """A short name for requests that may share a batch. 128 bits: two lanes never meet by chance or by intent."""
    return blake2b(model.encode() + b"\0" + lane_key, digest_size=16).hexdigest().encode()


def line_name(tier: int, is_task: bool, is_over: bool = False, is_late: bool = False) -> bytes:
    """Tiers wait apart, and so do tasks and what came in late, which have later places in the order, and what exceeds
    its owner's share.
    """
    return b"%b%d" % (b"t" if is_task else b"l" if is_late else b"o" if is_over else b"s", tier)


def tier_of(line: bytes) -> int:
    """The tier of a line; -1 for a line that another program made."""
    number = line[1:]
    return int(number) if number.isdigit() else -1
