"""Clients that mean harm, or act as if: rows S1, S2, S3, S5 and S9 of the list of faults.

Each function does its worst to a running gateway, asserts what must hold, and returns the line to print. The
integration tests run short forms; `make chaos` runs the sizes of the list, and there `in_figures` too: memory and
processor time, which say as much of the machine.
"""

import asyncio
import json
import os
import socket
import time
from pathlib import Path

from support.checker import PROMISES
from support.client import Connection, Response, ask_once, inference_body
from support.gateway import Peer, ask, eventually, metric, request_bytes
from support.processes import PATIENCE_S, GatewayProcess

MIB = 1024 * 1024
BAD_JSON = {
    "depth": b"[" * 100_000 + b"]" * 100_000,
    "depth 65": b"[" * 65 + b"]" * 65,
    "long number": b"[1" + b"0" * 300 + b"]",
    "beyond a double": b"[1e309]",
    "beyond a double, below": b'{"a":-2E308}',
    "lone surrogate": rb'"\ud800"',
    "lone surrogate in a key": rb'{"\udfff":1}',
    "invalid UTF-8": b'"\xff"',
    "overlong UTF-8": b'"\xc0\xaf"',
    "surrogate in UTF-8": b'"\xed\xa0\x80"',
    "NaN": b"NaN",
    "infinity": b"[-Infinity]",
    "breaking out": b'1],"parameters":{"x":1},"y":[2',
    "control character": b'"a\x00b"',
    "trailing comma": b"[1,]",
}


def is_promised(status: int, *promised: int) -> bool:
    """Whether this is what the client was to be told; counted with all other requests of a run."""
    PROMISES.requests += 1
    PROMISES.kept += status in promised
    return status in promised


async def slow_clients(
    gateway: GatewayProcess, *, trickling: int, not_reading: int, timeout_s: float, slack_s: float
) -> str:
    """S1: slow headers, slow bodies, slow readers; a good client meanwhile.

    `slack_s` is what may be late: clients and gateway share the cores.
    """
    idle_connections = await gateway.metric("carpool_connections")
    half = trickling // 2
    head = b"POST /v1/inference HTTP/1.1\r\nHost: x\r\n"
    slow = [trickle(gateway.port, head + b"X: ") for _ in range(half)]
    slow += [trickle(gateway.port, head + b'Content-Length: 100000\r\n\r\n{"input":"') for _ in range(half)]
    all_gone = asyncio.Event()
    attacks = asyncio.gather(*slow, *(never_read(gateway.port, all_gone) for _ in range(not_reading)))
    latencies: list[float] = []
    all_gone_at = 0.0
    give_up_at = time.monotonic() + timeout_s + PATIENCE_S
    while not attacks.done():
        asked = time.monotonic()
        response = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("abc"))
        assert is_promised(response.status, 200) and response.json["output"] == "cba"
        latencies.append(time.monotonic() - asked)
        if len(latencies) > 5 and not all_gone_at and await gateway.metric("carpool_connections") <= idle_connections:
            all_gone_at = time.monotonic()
            all_gone.set()
        assert time.monotonic() < give_up_at, "some are still connected"
        await asyncio.sleep(0.05)
    results = await attacks
    took = [seconds for seconds, _ in results[: 2 * half]]
    assert all(is_promised(status, 408) for _, status in results[: 2 * half])
    assert max(took) < timeout_s + slack_s, f"a slow request was closed after {max(took):.1f} s"
    gone_after = all_gone_at - max(began for began, _ in results[2 * half :])
    # Their time runs once the kernel's buffers are full, which takes a second or two for many of them.
    assert 0.5 * timeout_s < gone_after < timeout_s + 2.0 + slack_s, (
        f"the slow readers were closed after {gone_after:.1f} s"
    )
    worst = max(latencies)
    assert worst < 1.0 + slack_s, f"a good client waited {worst:.2f} s"
    return (
        f"S1: {2 * half} trickling clients got their 408 after {min(took):.1f} to {max(took):.1f} s, {not_reading} "
        f"that do not read were gone after {gone_after:.1f} s, a good client waited {worst * 1000:.0f} ms at most: pass"
    )


async def trickle(port: int, start: bytes) -> tuple[float, int]:
    """Send a byte at a time until the server has had enough; how long that took and what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    writer.write(start)
    answer = asyncio.ensure_future(reader.read())
    try:
        while not answer.done():
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.25)
        text = await answer
    finally:
        writer.close()
    return time.monotonic() - started, int(text.split(b" ", 2)[1])


async def never_read(port: int, over: asyncio.Event) -> tuple[float, int]:
    """Ask for more than the kernel buffers, and read nothing of it; when that began."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request_bytes("GET", "/openapi.json") * 1000)
        began = time.monotonic()
        await over.wait()
    return began, 0


def big_bodies(gateway: GatewayProcess, rounds: int, *, in_figures: bool = False) -> str:
    """S2: 10 MB bodies, chunked, lying lengths."""
    before = gateway.resident_bytes()
    body = b"x" * (10 * MIB)
    chunk = b"%x\r\n%b\r\n" % (64 * 1024, b"x" * 64 * 1024)
    head = b"POST /v1/inference HTTP/1.1\r\nHost: x\r\n"
    most_sent = slowest = 0.0
    for _ in range(rounds):
        for data in (
            head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 160,
        ):
            with Peer(gateway.port) as peer:
                started = time.monotonic()
                sent = peer.send_until_refused(data)
                response = peer.read()  # it comes through although we were still sending
                slowest = max(slowest, time.monotonic() - started)
                assert is_promised(response.status, 413) and response.is_last
                most_sent = max(most_sent, sent)
        with Peer(gateway.port) as peer:  # it says more than it sends, and leaves
            peer.send(head + b"Content-Length: 1000000\r\n\r\n" + b"x" * 500_000)
        with Peer(gateway.port) as peer:  # it says less than it sends
            peer.send(head + b'Content-Length: 13\r\n\r\n{"input":"a"}{"input":"b"}')
            assert [peer.read().status, peer.read().status] == [200, 400]
            assert peer.ended()
        with Peer(gateway.port) as peer:  # a chunk that says less than it has
            peer.send(head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n")
            assert peer.read().status == 400
            assert peer.ended()
    assert eventually(lambda: metric(gateway, "carpool_held_bytes") == 0)
    grown = gateway.resident_bytes() - before
    assert not in_figures or grown < 32 * MIB, f"memory grew by {grown / MIB:.0f} MiB"
    return (
        f"S2: {2 * rounds} bodies of 10 MB refused with 413, the slowest in {slowest * 1000:.0f} ms after "
        f"{most_sent / MIB:.1f} MiB at most; {3 * rounds} lying lengths; memory {grown / MIB:+.1f} MiB: pass"
    )


def big_heads(gateway: GatewayProcess, pipelined: int, *, in_figures: bool = False) -> str:
    """S3: 10,000 headers, 1 MB lines, many pipelined requests; and nothing left burning."""
    start = b"POST /v1/inference HTTP/1.1\r\nHost: x\r\n"
    endless = [
        start + b"".join(b"H%d: x\r\n" % number for number in range(10_000)) + b"\r\n",
        start + b"X: " + b"x" * MIB + b"\r\n\r\n",
        start + b"x" * MIB + b": x\r\n\r\n",
        b"GET /" + b"x" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        start + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * MIB + b"\r\n\r\n",
    ]
    for data in endless:
        with Peer(gateway.port) as peer:
            peer.send_until_refused(data)
            response = peer.read()
            assert is_promised(response.status, 431) and response.is_last, data[:60]
            assert peer.ended()
    most_held = 0.0
    with Peer(gateway.port) as peer:
        bodies = [inference_body(f"{number:05}") for number in range(pipelined)]
        peer.send(b"".join(request_bytes("POST", "/v1/inference", body) for body in bodies))
        for number in range(pipelined):
            response = peer.read()
            assert is_promised(response.status, 200) and response.json["output"] == f"{number:05}"[::-1]
            if number % 200 == 50:
                most_held = max(most_held, metric(gateway, "carpool_held_requests"))
    assert most_held <= 32
    burning = f", idle at {idle_cpu(gateway):.0%} CPU afterwards" if in_figures else ""
    return (
        f"S3: {len(endless)} endless heads got 431, {pipelined} pipelined requests answered in order with at most "
        f"{most_held:.0f} in flight{burning}: pass"
    )


def idle_cpu(gateway: GatewayProcess) -> float:
    """The share of a core that a gateway needs for nothing."""
    before = cpu_seconds(gateway)
    time.sleep(1.0)
    busy_s = cpu_seconds(gateway) - before
    assert busy_s < 0.2, f"{busy_s:.2f} s of CPU in a second with nothing to do"
    return busy_s


async def bad_json(gateway: GatewayProcess, rounds: int) -> str:
    """S5: JSON that a strict parser would refuse, beside good neighbours that could share its batch."""

    async def bad(value: bytes) -> Response:
        return await ask_once(gateway.port, "POST", "/v1/inference", b'{"input":' + value + b"}")

    async def good(connection: Connection, number: int) -> Response:
        return await connection.ask("POST", "/v1/inference", b'{"input":{"a":%d, "a":%d}}' % (number, number))

    neighbours = [await Connection.open(gateway.port) for _ in range(20)]
    largest = 0
    for _ in range(rounds):
        answers = await asyncio.gather(
            *(bad(value) for value in BAD_JSON.values()), *(good(each, n) for n, each in enumerate(neighbours))
        )
        for name, response in zip(BAD_JSON, answers, strict=False):
            assert is_promised(response.status, 400), name
            assert response.json["type"] == "urn:carpool:error:malformed", name
        for number, response in enumerate(answers[len(BAD_JSON) :]):
            assert is_promised(response.status, 200)
            assert b'{"a":%d, "a":%d}' % (number, number) in response.body  # duplicate keys pass untouched
            largest = max(largest, response.json["metadata"]["batch_size"])
    for each in neighbours:
        await each.close()
    assert largest > 1, "no neighbours ever shared a batch: nothing was proved"
    return (
        f"S5: {rounds * len(BAD_JSON)} inputs that are not strict JSON got 400, {rounds * 20} neighbours in batches "
        f"of up to {largest} unharmed: pass"
    )


def many_names(gateway: GatewayProcess, count: int, *, in_figures: bool = False) -> str:
    """S9: names that a client invents do not become metric series."""

    def series() -> int:
        text = ask(gateway.admin_port, "GET", "/metrics").body.decode()
        return sum(1 for line in text.splitlines() if line.startswith("carpool_"))

    def requests(number: int) -> bytes:
        model = json.dumps({"input": 1, "model": f"model-{number}"}).encode()
        predict = json.dumps({"input_data": 1, "model_id": f"model-{number}"}).encode()
        return (
            request_bytes("POST", "/v1/inference", model, f"X-Request-Id: id-{number}")
            + request_bytes("POST", "/v1/predict", predict)
            + request_bytes("GET", f"/path-{number}/{number}")
            + request_bytes("GET", f"/v1/result/{number:032x}")
        )

    assert ask(gateway.port, "POST", "/v1/inference", {"input": 1}).status == 200
    before, memory = series(), gateway.resident_bytes()
    with Peer(gateway.port) as peer:
        for first in range(0, count, 50):
            numbers = range(first, min(first + 50, count))
            peer.send(b"".join(map(requests, numbers)))
            assert all(is_promised(peer.read().status, 404) for _ in range(4 * len(numbers)))
    # Parameters make lanes; those are bounded too, and are no label.
    with Peer(gateway.port) as peer:
        for number in range(min(count, 500)):
            body = json.dumps({"input": 1, "parameters": {"n": number}}).encode()
            peer.send(request_bytes("POST", "/v1/inference", body))
        assert all(is_promised(peer.read().status, 200) for _ in range(min(count, 500)))
    assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
    after, grown = series(), gateway.resident_bytes() - memory
    assert after <= before + 5, f"{after - before} new series"
    assert not in_figures or grown < 32 * MIB
    return (
        f"S9: {count} invented models, paths, ids and tasks: {before} metric series before, {after} after, "
        f"memory {grown / MIB:+.1f} MiB: pass"
    )


def cpu_seconds(gateway: GatewayProcess) -> float:
    """Processor time that the process has used so far."""
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
