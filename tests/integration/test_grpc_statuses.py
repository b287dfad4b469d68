"""How calls of the gRPC port end (face/grpc/server.py), as a real client hears it."""

from collections.abc import Mapping

import grpc
import pytest

from carpool.core.errors import InputRefused, RateLimited
from carpool.face.grpc.call import GrpcCall, GrpcResult, Method, Problems
from carpool.face.grpc.server import GrpcServer
from carpool.face.http.state import HttpLimits
from support.grpc_client import Refusal
from support.processes import PATIENCE_S


class Wrong:
    """Fails with a long text."""

    name = "x.Wrong"

    def __init__(self) -> None:
        self.methods: Mapping[str, Method] = {"Input": Method(self.input), "Rate": Method(self.rate)}
        self.ids: list[str] = []

    async def input(self, call: GrpcCall) -> GrpcResult:
        self.ids.append(call.request_id())
        raise InputRefused("é" * 4000)

    async def rate(self, call: GrpcCall) -> GrpcResult:
        return RateLimited("names, " * 3000, header_lines=b"RateLimit: x\r\n", retry_after_s=1)

    def drain(self) -> None:
        pass


@pytest.mark.parametrize(("method", "code"), [("Input", "INVALID_ARGUMENT"), ("Rate", "RESOURCE_EXHAUSTED")])
async def test_a_long_text_hides_no_status(method: str, code: str) -> None:
    wrong = Wrong()
    server = GrpcServer([wrong], HttpLimits(), Problems(lambda code: None))
    await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for _ in range(20):  # between its two limits a client takes what comes, or not, by chance
            with pytest.raises(grpc.RpcError) as raised:
                await channel.unary_unary(f"/x.Wrong/{method}")(b"", timeout=PATIENCE_S)
            refusal = Refusal(raised.value)
            assert refusal.code == code
            assert refusal.text.endswith("…") and len(refusal.text) > 500
            assert refusal.reason == ("INPUT_REFUSED" if method == "Input" else "RATE_LIMITED")
            if method == "Input":
                assert refusal.request_id == wrong.ids[-1]
    server.stop_listening()
    await server.finish(0.0)
