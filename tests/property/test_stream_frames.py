"""Frames as no client should send them: no defect, nobody else harmed, nothing left.

1,000 of them; with `HYPOTHESIS_PROFILE=long` 16,000.
"""

import asyncio
import json
import random
import struct

import pytest
from hypothesis import settings

from support.streams import StreamClient, StreamStand

FRAMES = settings().max_examples * 40
GOOD = [
    json.dumps({"id": "a", "input": "x"}).encode(),
    json.dumps([{"id": n, "input": [n] * n} for n in range(20)]).encode(),
    b"{}",
    b"[" * 200,
]


def frame(rng: random.Random, payload: bytes, opcode: int = 1) -> bytes:
    """A good one."""
    mask = rng.randbytes(4)
    length = bytes((0x80 | len(payload),)) if len(payload) < 126 else b"\xfe" + struct.pack("!H", len(payload))
    masked = bytes(byte ^ mask[n % 4] for n, byte in enumerate(payload))
    return bytes((0x80 | opcode,)) + length + mask + masked


def malformed(rng: random.Random) -> bytes:
    """Something that begins like a frame, more or less."""
    data = bytearray(frame(rng, rng.choice([*GOOD, rng.randbytes(rng.randrange(80))]), rng.choice((0, 1, 2, 8, 9, 10))))
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 60))
    if kind == 1:  # flags, opcode
        data[0] = rng.randrange(256)
    elif kind == 2:  # mask bit, length
        data[1] = rng.randrange(256)
    elif kind == 3:  # cut off
        del data[rng.randrange(1, len(data)) :]
    elif kind == 4:  # anywhere
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    else:  # a length that is not there
        return bytes((0x81, 0xFF)) + rng.randbytes(8) + bytes(data[6:])
    return bytes(data)


async def test_malformed_frames(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    stand = StreamStand()
    neighbour, ended = stand.connect(), 0
    clients: list[StreamClient] = []
    for number in range(FRAMES):
        if len(clients) < 8:
            clients.append(stand.connect())
        client = rng.choice(clients)
        data = malformed(rng)
        for part in (data,) if rng.random() < 0.7 else (data[:3], data[3:]):
            client.feed(part)
        if number % 50 == 0:
            neighbour.send({"id": number, "input": number})
        if number % 10 == 0:
            await asyncio.sleep(0)
            stand.work()
        if client.transport.is_over:
            ended += 1
            clients.remove(client)
            client.leave()
    # On a busy machine some of what was fed still waits for its turn.
    answers = await neighbour.answers()
    stand.work()
    answers |= await neighbour.answers()
    assert set(answers) == set(range(0, FRAMES, 50))
    assert neighbour.why_closed() is None
    for client in (*clients, neighbour):
        client.leave()
    assert ended > FRAMES / 20
    assert stand.is_clean
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    await stand.journal.close()
