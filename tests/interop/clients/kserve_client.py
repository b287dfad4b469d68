"""A program that knows nothing of Carpool: KServe's clients, for V1 and V2 over HTTP, and V2 over gRPC.

It is given the URL for HTTP and the address for gRPC, checks every answer by value, and prints one line of JSON with
what it found.
"""

import asyncio
import json
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

URL, GRPC_ADDRESS = sys.argv[1:3]
IN_FLIGHT = 50


def request_of(number, rows, binary, model="mirror", **more):
    """A vector and a text for each row that nobody else has."""
    values = (np.arange(rows * 4, dtype=np.float32) + number * 1000).reshape(rows, 4)
    texts = np.array([[f"№{number}.{row} naïve"] for row in range(rows)], dtype=np.object_)
    vector, text = InferInput("VECTOR", [rows, 4], "FP32"), InferInput("TEXT", [rows, 1], "BYTES")
    vector.set_data_from_numpy(values, binary_data=binary)
    text.set_data_from_numpy(texts, binary_data=binary)
    return InferRequest(model, [vector, text], request_id=f"call-{number}", **more), values, texts


def check(response, number, values, texts):
    vector, text = (response.get_output_by_name(name) for name in ("VECTOR", "TEXT"))
    assert (vector.as_numpy() == values).all(), response
    said = [[cell.decode() if isinstance(cell, bytes) else cell for cell in row] for row in text.as_numpy()]
    assert said == [[cell[::-1] for cell in row] for row in texts], said
    assert (response.id, response.model_name) == (f"call-{number}", "mirror"), response


async def v1(found):
    async with InferenceRESTClient(RESTConfig(protocol="v1", timeout=60)) as client:
        assert await client.is_server_live(URL) is True
        assert await client.is_model_ready(URL, "words") is True

        async def ask(number, rows):
            instances = [f"№{number}.{row} naïve" for row in range(rows)]
            answer = await client.infer(URL, {"instances": instances}, model_name="words")
            assert answer == {"predictions": [text[::-1] for text in instances]}, answer
            found["v1"] += 1

        await asyncio.gather(*(ask(number, 1 + number % 3) for number in range(IN_FLIGHT)))
        for model, data, status, text in (
            ("missing", {"instances": [1]}, 404, "this gateway serves"),
            ("mirror", {"instances": [1]}, 404, "/v2/models/"),
            ("words", {}, 400, "`instances` is missing"),
        ):
            found["errors"] += await refused(client, data, model, status, text)


async def v2(found):
    async with InferenceRESTClient(RESTConfig(protocol="v2", timeout=60)) as client:
        assert await client.is_server_live(URL) is True and await client.is_server_ready(URL) is True
        assert await client.is_model_ready(URL, "mirror") is True
        assert await client.is_model_ready(URL, "missing") is False

        async def ask(number):
            binary = bool(number % 2)
            more = [
                {},
                {"parameters": {"binary_data_output": True}},
                {"request_outputs": [RequestedOutput(name, {"binary_data": binary}) for name in ("VECTOR", "TEXT")]},
            ][number % 3]
            request, values, texts = request_of(number, 1 + number % 4, binary, **more)
            check(await client.infer(URL, request, model_name="mirror"), number, values, texts)
            found["v2"] += 1

        await asyncio.gather(*(ask(number) for number in range(IN_FLIGHT)))
        request = request_of(1, 1, True)[0]
        for model, status, text in (("missing", 404, "this gateway serves"), ("words", 404, "/v1/inference")):
            found["errors"] += await refused(client, request, model, status, text)


async def refused(client, data, model, status, text):
    """Whether it is so refused, with a text that the client shows."""
    try:
        await client.infer(URL, data, model_name=model)
    except httpx.HTTPStatusError as error:
        return error.response.status_code == status and text in str(error)
    return False


async def v2_grpc(found):
    async with InferenceGRPCClient(GRPC_ADDRESS) as client:
        assert await client.is_server_live() is True and await client.is_server_ready() is True
        assert await client.is_model_ready("mirror") is True

        async def ask(number):
            request, values, texts = request_of(number, 1 + number % 4, bool(number % 2))
            check(await client.infer(request), number, values, texts)
            found["grpc"] += 1

        await asyncio.gather(*(ask(number) for number in range(IN_FLIGHT)))
        try:
            await client.infer(request_of(1, 1, True, model="missing")[0])
        except grpc.RpcError as error:
            found["errors"] += error.code() is grpc.StatusCode.NOT_FOUND


async def main():
    found = {"v1": 0, "v2": 0, "grpc": 0, "errors": 0}
    await v1(found)
    await v2(found)
    await v2_grpc(found)
    print(json.dumps(found))  # noqa: T201


asyncio.run(main())
