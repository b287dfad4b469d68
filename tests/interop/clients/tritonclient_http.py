"""A program that knows nothing of Carpool: tritonclient, sync and aio, against the URL that it is given.

It checks every answer by value, and prints one line of JSON with what it found. With a number behind the URL it asks
for so many rows one by one, all of them in flight at once; without one, for all that there is.
"""

import asyncio
import json
import sys

import numpy as np
import tritonclient.http as sync_http
import tritonclient.http.aio as aio_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

URL = sys.argv[1]


def inputs_of(kind, number, rows, binary):
    """A vector and a text for each row that nobody else has."""
    vector = kind.InferInput("VECTOR", [rows, 4], "FP32")
    values = (np.arange(rows * 4, dtype=np.float32) + number * 1000).reshape(rows, 4)
    vector.set_data_from_numpy(values, binary_data=binary)
    text = kind.InferInput("TEXT", [rows, 1], "BYTES")
    texts = np.array([[f"№{number}.{row} naïve"] for row in range(rows)], dtype=np.object_)
    text.set_data_from_numpy(texts, binary_data=binary)
    return [vector, text], values, texts


def check(result, values, texts):
    assert (result.as_numpy("VECTOR") == values).all(), result.get_response()
    back = result.as_numpy("TEXT")
    said = [[cell.decode() if isinstance(cell, bytes) else cell for cell in row] for row in back]
    assert said == [[cell[::-1] for cell in row] for row in texts], said


def by_name(kind, binary):
    names = ("TEXT", "VECTOR")
    return [kind.InferRequestedOutput(name, binary_data=binary) for name in names]


def synchronous(found):
    with sync_http.InferenceServerClient(URL, concurrency=4) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mirror")
        assert client.get_server_metadata()["name"] == "carpool"
        assert client.get_model_metadata("vector")["inputs"][0]["name"] == "VECTOR"
        assert client.is_model_ready("vector", model_version="3")
        for number, (binary_in, binary_out) in enumerate((a, b) for a in (True, False) for b in (True, False, None)):
            for rows in (1, 3, 100):
                inputs, values, texts = inputs_of(sync_http, number, rows, binary_in)
                outputs = None if binary_out is None else by_name(sync_http, binary_out)
                result = client.infer("mirror", inputs, outputs=outputs, request_id=f"call-{number}")
                check(result, values, texts)
                assert result.get_response()["id"] == f"call-{number}"
                found["sync"] += 1
        inputs, values, texts = inputs_of(sync_http, 7, 2, True)
        check(client.async_infer("mirror", inputs).get_result(), values, texts)
        for dtype in (np.int64, np.uint8, np.bool_, np.float16, np.float64):
            data = np.array([[0, 1, 1], [1, 0, 1]], dtype=dtype)
            one = sync_http.InferInput("X", [2, 3], np_to_triton_dtype(data.dtype))
            one.set_data_from_numpy(data, binary_data=True)
            assert (client.infer("mirror", [one]).as_numpy("X") == data).all()
            found["sync"] += 1
        wrong = sync_http.InferInput("VECTOR", [1, 4], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, 4), dtype=np.float32))
        wrong.set_shape([1, 5])
        for model, sent, status, text in (
            ("missing", inputs, "404", "serves"),
            ("words", inputs, "404", "/v1/inference"),
            ("mirror", [wrong], "400", "bytes"),
        ):
            try:
                client.infer(model, sent)
            except InferenceServerException as failure:
                found["errors"] += failure.status() == status and text in failure.message()


async def asynchronous(found, singles):
    async with aio_http.InferenceServerClient(URL, conn_limit=singles or 30) as client:

        async def one(number, rows, binary):
            inputs, values, texts = inputs_of(aio_http, number, rows, binary)
            check(await client.infer("mirror", inputs, outputs=by_name(aio_http, binary)), values, texts)
            found["aio"] += 1

        if singles:
            await asyncio.gather(*(one(number, 1, True) for number in range(singles)))
            return
        assert await client.is_server_ready() and await client.is_model_ready("mirror")
        await asyncio.gather(*(one(number, number % 3 + 1, number % 2 == 0) for number in range(30)))
        # An image of 5 MB, there and back.
        image = np.array([[b"\xff" + bytes(5_000_000)]], dtype=np.object_)
        sent = aio_http.InferInput("IMAGE", [1, 1], "BYTES")
        sent.set_data_from_numpy(image, binary_data=True)
        assert (await client.infer("image", [sent])).as_numpy("IMAGE")[0][0] == image[0][0]
        found["aio"] += 1


found = {"sync": 0, "aio": 0, "errors": 0}
singles = int(sys.argv[2]) if len(sys.argv) > 2 else 0
if not singles:
    synchronous(found)
asyncio.run(asynchronous(found, singles))
print(json.dumps(found))  # noqa: T201
