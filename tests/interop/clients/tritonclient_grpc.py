"""A program that knows nothing of Carpool: tritonclient's gRPC client, sync and aio, against the URL that it is given.

It checks every answer by value, and prints one line of JSON with what it found. With a number behind the URL it asks
for so many rows one by one, all of them in flight at once; without one, for all that there is.
"""

import asyncio
import json
import sys
import threading

import numpy as np
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

URL = sys.argv[1]


def inputs_of(number, rows):
    """A vector and a text for each row that nobody else has."""
    vector = sync_grpc.InferInput("VECTOR", [rows, 4], "FP32")
    values = (np.arange(rows * 4, dtype=np.float32) + number * 1000).reshape(rows, 4)
    vector.set_data_from_numpy(values)
    text = sync_grpc.InferInput("TEXT", [rows, 1], "BYTES")
    texts = np.array([[f"№{number}.{row} naïve"] for row in range(rows)], dtype=np.object_)
    text.set_data_from_numpy(texts)
    return [vector, text], values, texts


def check(result, values, texts):
    assert (result.as_numpy("VECTOR") == values).all(), result.get_response()
    said = [[cell.decode() for cell in row] for row in result.as_numpy("TEXT")]
    assert said == [[cell[::-1] for cell in row] for row in texts], said


def synchronous(found):
    with sync_grpc.InferenceServerClient(URL) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mirror")
        assert not client.is_model_ready("missing")
        assert client.get_server_metadata().name == "carpool"
        assert client.get_model_metadata("vector", as_json=True)["inputs"][0]["name"] == "VECTOR"
        assert client.is_model_ready("vector", model_version="3")
        for number, rows in enumerate((1, 3, 100)):
            inputs, values, texts = inputs_of(number, rows)
            for outputs in (None, [sync_grpc.InferRequestedOutput(name) for name in ("TEXT", "VECTOR")]):
                result = client.infer("mirror", inputs, outputs=outputs, request_id=f"call-{number}", client_timeout=60)
                check(result, values, texts)
                assert result.get_response().id == f"call-{number}"
                found["sync"] += 1
        inputs, values, texts = inputs_of(7, 2)
        done, answers = threading.Event(), []

        def came(result, error):
            answers.append((result, error))
            done.set()

        client.async_infer("mirror", inputs, came)
        assert done.wait(60) and answers[0][1] is None
        check(answers[0][0], values, texts)
        for dtype in (np.int64, np.uint8, np.bool_, np.float16, np.float64):
            data = np.array([[0, 1, 1], [1, 0, 1]], dtype=dtype)
            one = sync_grpc.InferInput("X", [2, 3], np_to_triton_dtype(data.dtype))
            one.set_data_from_numpy(data)
            assert (client.infer("mirror", [one]).as_numpy("X") == data).all()
            found["sync"] += 1
        wrong = sync_grpc.InferInput("VECTOR", [1, 4], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, 4), dtype=np.float32))
        wrong.set_shape([1, 5])
        for model, sent, status, text in (
            ("missing", inputs, "StatusCode.NOT_FOUND", "serves"),
            ("words", inputs, "StatusCode.NOT_FOUND", "/v1/inference"),
            ("mirror", [wrong], "StatusCode.INVALID_ARGUMENT", "bytes"),
        ):
            try:
                client.infer(model, sent)
            except InferenceServerException as failure:
                found["errors"] += failure.status() == status and text in failure.message()


async def asynchronous(found, singles):
    async with aio_grpc.InferenceServerClient(URL) as client:
        assert await client.is_server_ready()

        async def ask(number, rows):
            inputs, values, texts = inputs_of(number, rows)
            check(await client.infer("mirror", inputs, client_timeout=120), values, texts)
            found["aio"] += 1

        await asyncio.gather(*(ask(number, 1) for number in range(singles or 30)))


FOUND = {"sync": 0, "aio": 0, "errors": 0}
if len(sys.argv) == 2:
    synchronous(FOUND)
asyncio.run(asynchronous(FOUND, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
print(json.dumps(FOUND))  # noqa: T201
