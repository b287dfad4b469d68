"""Clients of the gRPC port that are too slow: whose message does not come, and who do not read (face/grpc/slow.py)."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from carpool.face.grpc.call import GrpcCall, GrpcResult, Method, Problems
from carpool.face.grpc.server import GrpcServer
from carpool.face.grpc.slow import SWEEP_S
from carpool.face.http.connection import UNREAD_BYTES_MIN
from carpool.face.http.state import HttpLimits
from support.http2 import Http2Peer
from support.processes import PATIENCE_S, until

SOCKETS = Path("/proc/self/fd")


class Echo:
    """Answers with what it is asked, at once or on a stream for ever."""

    name = "x.Echo"

    def __init__(self) -> None:
        self.methods: Mapping[str, Method] = {
            "Once": Method(self.once),
            "Much": Method(self.much),
            "Later": Method(self.later),
            "Ever": Method(self.ever, is_stream=True),
        }
        self.is_later, self.given_up = asyncio.Event(), asyncio.Event()

    async def once(self, call: GrpcCall) -> GrpcResult:
        return await call.read()

    async def much(self, call: GrpcCall) -> GrpcResult:
        return await call.read() * UNREAD_BYTES_MIN

    async def later(self, call: GrpcCall) -> GrpcResult:
        await self.is_later.wait()
        return await call.read()

    async def ever(self, call: GrpcCall) -> None:
        message = await call.read()
        while True:
            await call.write(message, self.given_up.set)

    def drain(self) -> None:
        pass


@asynccontextmanager
async def serving(
    limits: HttpLimits, problems: list[str], echo: Echo | None = None, *, is_proxy: bool = False
) -> AsyncIterator[GrpcServer]:
    server = GrpcServer([echo or Echo()], limits, Problems(problems.append), is_proxy=lambda address: is_proxy)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        server.stop_listening()
        await server.finish(0.0)


async def test_a_message_that_never_comes() -> None:
    problems: list[str] = []
    async with serving(HttpLimits(receive_timeout_s=0.2), problems) as server:
        with Http2Peer(server.port) as peer:
            peer.call("/x.Echo/Once")
            peer.data(b"\x00\x00\x00\x00\x09only a", ends=False)
            assert await asyncio.to_thread(peer.status) == "4"  # DEADLINE_EXCEEDED
        with Http2Peer(server.port) as peer:
            peer.call("/x.Echo/Once")
            peer.data(b"", ends=True)
            assert await asyncio.to_thread(peer.status) == "3"  # INVALID_ARGUMENT
        await until(lambda: server.calls == 0)
    assert problems == ["receive-timeout", "malformed"]


async def test_who_does_not_read_is_cut_off_and_nobody_else() -> None:
    async with serving(HttpLimits(write_timeout_s=0.2), []) as server:
        with (
            Http2Peer(server.port, window=0) as once,
            Http2Peer(server.port, window=0) as ever,
            Http2Peer(server.port) as idle,
        ):
            once.call("/x.Echo/Once")
            once.message(b"x")
            ever.call("/x.Echo/Ever")
            ever.message(b"x" * 1000)
            assert await asyncio.to_thread(once.ended)
            assert await asyncio.to_thread(ever.ended)
            await until(lambda: server.calls == 0)
            idle.call("/x.Echo/Once")
            idle.message(b"x")
            assert await asyncio.to_thread(idle.status) == "0"
        await until(lambda: "receiving=0 writing=0 unread=0" in repr(server))


async def test_behind_a_proxy_who_does_not_read_ends_nobody_else_s_calls() -> None:
    echo = Echo()
    async with (
        serving(HttpLimits(write_timeout_s=0.2), [], echo, is_proxy=True) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as proxy,
    ):
        later = proxy.unary_unary("/x.Echo/Later")(b"x")
        once = proxy.stream_stream("/x.Echo/Ever")()
        await once.write(b"x" * 60_000)  # and nothing is ever read
        async with asyncio.timeout(PATIENCE_S):
            await echo.given_up.wait()
            await asyncio.sleep(SWEEP_S)  # whoever cuts it off does so by now
            echo.is_later.set()
            assert await later == b"x"
        once.cancel()
        await until(lambda: "calls=0 <SlowCalls receiving=0 writing=0" in repr(server))


async def test_too_much_that_is_unread_is_not_kept_for_long_and_harms_nobody_else() -> None:
    limits = HttpLimits(write_timeout_s=3600.0, unread_bytes_max=UNREAD_BYTES_MIN)
    async with serving(limits, []) as server:
        with Http2Peer(server.port, window=0) as much, Http2Peer(server.port, window=0) as little:
            little.call("/x.Echo/Once")
            little.message(b"x" * 1000)
            await until(lambda: "unread=1" in repr(server))
            much.call("/x.Echo/Much")
            much.message(b"x")
            assert await asyncio.to_thread(much.ended)
            await until(lambda: "unread=1" in repr(server))
            little.open_window(2000)
            assert await asyncio.to_thread(little.status) == "0"


async def test_looking_for_a_socket_leaves_no_file_behind() -> None:
    async with serving(HttpLimits(write_timeout_s=0.1), []) as server:
        most = len(os.listdir(SOCKETS)) + 5  # the connection, the thread that looks, and what the test has
        for _ in range(3):
            with Http2Peer(server.port, window=0) as peer:
                peer.call("/x.Echo/Once")
                peer.message(b"x")
                assert await asyncio.to_thread(peer.ended)
            await until(lambda: "unread=0" in repr(server))
        await until(lambda: len(os.listdir(SOCKETS)) <= most)
