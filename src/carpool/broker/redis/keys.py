"""The names of everything Carpool keeps in Redis, and on which shard it is. Pure.

All keys of a shard share one hash tag, so they lie in one slot of a Cluster and a script may use them together. The
tags are chosen so that shard n of 16 lies in the n-th sixteenth of the slots: however many primaries share the slots
evenly, they share the shards evenly.

| key | type | what |
|---|---|---|
| `<ns>:{tag}:lanes` | hash | the streams that may have entries: `<lane>:<line>` → what its line adds to a time, whether
  the lane counts against the bound, its model |
| `<ns>:{tag}:heads:<model>` | zset | the streams that have entries no batcher took, by the place of the first |
| `<ns>:{tag}:sizes` | hash | by stream: entries held (`h…`) and unread (`u…`); `looks`: the last number in `leased` |
| `<ns>:{tag}:leased`, `:idle` | zset | streams with leases, in the order of looking; streams without entries |
| `<ns>:{tag}:openers`, `:opened`, `:lines` | hash | lanes that count: who opened them, how many each, lines |
| `<ns>:{tag}:counts` | hash | `held`: entries without an outcome, `unread`: those no batcher took, `unread:<line>`: of
  one line; `letter`: the last letter's id, `letter_bytes`, `letters_counted` (ms); `input_bytes`, `result_bytes`,
  `read_bytes`, their parts (scripts/bytes.lua) |
| `<ns>:{tag}:q:<lane>:<line>` | stream | the entries of one lane and one line (a tier: synchronous requests, those of
  them that came in late or exceed their owner's share, or tasks) |
| `<ns>:{tag}:task:<id>` | hash | a task and its result |
| `<ns>:{tag}:read` | zset | tasks whose results were read, by when they are gone: those go first where room is short |
| `<ns>:{tag}:gone:<lane>:<line>` | zset | numbers of tasks that were removed before a batcher took them |
| `<ns>:{tag}:letters`, `:letter` | zset, hash | ids of dead letters in order; their contents by id |
| `<ns>:{tag}:hooks`, `:hooks:<host>` | zset | hosts that outcomes are to be sent to, by when the first is due; tasks
  of one host by when each is (`hooks`, `hook_bytes` in `counts`) |
| `<ns>:{tag}:hook:<id>` | hash | the outcome of a task with its URL |
| `<ns>:{tag}:bucket:<owner>:<limit>` | hash | a rate limit of an owner: `full`: when its bucket is full again, `at`:
  when that was written (scripts/rates.lua) |
| `<ns>:{tag}:kept`, `:kept-before` | hash | results for requests that are the same, by key; those that came before them
  (`cache_bytes` in `counts`: both, `cache_before`, `cache_entries`, `cache_least`: scripts/keep.lua) |
| `<ns>:{tag}:wakeup` | channel | published to when a stream without unread entries gets some: how many, place, name,
  model |
| `<ns>:replies:{<gateway>}` | stream | outcomes for one gateway's parked requests |
| `<ns>:{fleet}:gateways`, `:batchers` | hash | who lives: name → heartbeat |
| `<ns>:{fleet}:live` | hash | only while an operator looks at the live page: name → the last second of a process |
| `<ns>:{fleet}:keys`, `:keys-version` | hash | API keys: name → digest and terms; `now`: another text at each change |
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
        return Shard(
            number,
            key_slot(prefix),
            prefix,
            prefix + b"lanes",
            prefix + b"counts",
            prefix + b"letters",
            prefix + b"letter",
            prefix + b"hooks",
            prefix + b"wakeup",
            prefix + b"unsure",
            prefix + b"kept",
            prefix + b"kept-before",
        )


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
