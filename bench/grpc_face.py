"""gRPC: `Predict` beside a bare echo of grpcio, and `PredictStream` beside `Predict`, in CPU of the server per answer.

    .venv/bin/python bench/grpc_face.py echo PORT
    .venv/bin/python bench/grpc_face.py load PORT PATH KIND SECONDS     (KIND: unary or stream; prints the answers)

The first is the bare server, the second the load: 512 calls in flight, or 2,048 requests on one stream. So few slots
that batches are full, however fast the machine is: what a batch costs is not the face's. An answer has the size of its
request, 2 KB, and every one of them is looked at.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc

from carpool.core.messages import carpool_v1
from carpool.core.protobuf import field
from measuring import CARPOOL, ROOT, beside_kept, console, cpu_seconds, free_port, process, show, verdict

SIMULATED = "sim:?latency_ms=50&slots=8"
ECHO, PREDICT, STREAM = "/bench.Echo/Call", "/carpool.v1.Inference/Predict", "/carpool.v1.Inference/PredictStream"
TEXT = b'"' + b"x" * 2046 + b'"'
REQUEST = field(3, TEXT)
IN_FLIGHT, STREAMED, ASKED_AT_ONCE = 512, 2048, 64


def grpc_face(quick: bool) -> None:
    seconds, rounds = (3, 1) if quick else (8, 5)
    cost: dict[str, list[float]] = {"echo": [], "predict": [], "stream": []}
    rate: dict[str, list[float]] = {"echo": [], "predict": [], "stream": []}
    echo_port, port, grpc_port = free_port(), free_port(), free_port()
    echo_command = [sys.executable, str(Path(__file__)), "echo", str(echo_port)]
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", SIMULATED, "--port", str(port), "--grpc-port", str(grpc_port)]
        command += ["--data-dir", data]
        with process(echo_command, echo_port) as echo, process(command, grpc_port) as gateway:
            runs = [
                ("echo", echo.pid, echo_port, ECHO, "unary"),
                ("predict", gateway.pid, grpc_port, PREDICT, "unary"),
                ("stream", gateway.pid, grpc_port, STREAM, "stream"),
            ]
            for number in range(rounds):
                console.print(f"gRPC, round {number + 1} of {rounds} ...")
                for name, pid, where, path, kind in runs:
                    before, started = cpu_seconds(pid), time.monotonic()
                    load = [sys.executable, str(Path(__file__)), "load", str(where), path, kind, str(seconds)]
                    done = subprocess.run(load, cwd=ROOT, check=True, capture_output=True, timeout=seconds + 60)
                    answers = int(done.stdout)
                    cost[name].append((cpu_seconds(pid) - before) / max(answers, 1) * 1e6)
                    rate[name].append(answers / (time.monotonic() - started))
    share = median(bare / own for bare, own in zip(cost["echo"], cost["predict"], strict=True))
    times = median(one / many for one, many in zip(cost["predict"], cost["stream"], strict=True))
    figures = {name: f"{median(each):.1f} us" for name, each in cost.items()}
    rows = [
        verdict(
            "Predict, share of a bare echo",
            f"{share:.2f} ({figures['predict']} of {figures['echo']} CPU an answer)",
            ">= 0.80",
            share >= 0.8,
        ),
        verdict("PredictStream, times Predict", f"{times:.1f} ({figures['stream']})", ">= 1.5", times >= 1.5),
        ("rates", ", ".join(f"{name} {median(each):,.0f}/s" for name, each in rate.items()), "", ""),
        beside_kept("gRPC: Predict, share of a bare echo", share, more_is_better=True),
        beside_kept("gRPC: PredictStream, times Predict", times, more_is_better=True),
    ]
    show(f"gRPC, 2 KB, {SIMULATED}, {IN_FLIGHT} in flight or {STREAMED} on a stream; medians of {rounds}", rows)


async def echo(port: int) -> None:
    async def answer(request: bytes, _: Any) -> bytes:
        return request

    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("bench.Echo", handlers)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def load_unary(channel: Any, path: str, until: float) -> int:
    method, answers = channel.unary_unary(path), 0
    wanted = REQUEST if path == ECHO else TEXT

    async def ask() -> None:
        nonlocal answers
        while time.monotonic() < until:
            assert wanted in await method(REQUEST)
            answers += 1

    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return answers


async def load_stream(channel: Any, path: str, until: float) -> int:
    """As many are asked as were answered: the stream is kept full."""
    call = channel.stream_stream(path)()
    numbers = iter(range(10**9))

    def some(count: int) -> bytes:
        return b"".join(field(1, field(1, b"%d" % next(numbers)) + field(2, REQUEST)) for _ in range(count))

    for _ in range(STREAMED // ASKED_AT_ONCE):
        await call.write(some(ASKED_AT_ONCE))
    answers = owed = 0
    in_flight = STREAMED
    while in_flight:
        for answer in carpool_v1.PredictStreamResponse.FromString(await call.read()).responses:
            assert TEXT in answer.response.output
            answers, owed, in_flight = answers + 1, owed + 1, in_flight - 1
        if owed >= ASKED_AT_ONCE and time.monotonic() < until:
            await call.write(some(owed))
            in_flight, owed = in_flight + owed, 0
    await call.done_writing()
    return answers


async def load(port: int, path: str, kind: str, seconds: float) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return await (load_unary if kind == "unary" else load_stream)(channel, path, time.monotonic() + seconds)


if __name__ == "__main__":
    import uvloop

    if sys.argv[1] == "echo":
        uvloop.run(echo(int(sys.argv[2])))
    else:
        _, _, given_port, given_path, given_kind, given_seconds = sys.argv
        print(uvloop.run(load(int(given_port), given_path, given_kind, float(given_seconds))))
