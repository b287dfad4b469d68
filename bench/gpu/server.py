"""A plain model server: a text encoder in PyTorch behind the batch API that Carpool is for.

    python3 bench/gpu/server.py --shape bert --port 9000 [--processes 2] [--echo] [--weights FOLDER]

`POST /infer` with `{"inputs": [text, …]}`, at most 64, is answered with `{"outputs": […]}`. It pads as most servers do,
to the longest text of the batch. Weights are random: what a call costs does not depend on them. `--weights` takes a
folder in Hugging Face's format in their place (config.json, the weights, tokenizer.json).

Without a tokenizer a text has one token for each 4 bytes, 512 at most. An output is the first numbers of the text's
vector; with `--echo` it is the text reversed, after the same work on the GPU: `carpool bench` knows that answer in
advance, and so can verify that every client got its own.

`POST /v1/inference` with `{"input": text}` is the same for one text, for clients who call the server without Carpool.
`GET /stats` counts; `GET /batches` has the batches since it was asked last, as sizes in bytes, for whoever sends the
same ones again.
"""

import argparse
import asyncio
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import httptools
import msgspec
import uvloop

from encoder import SHAPES, Shape, random_encoder
from tokens import TOKEN_BYTES, TOKENS_MAX, Tokens, tokenizer_of

BATCH_MAX = 64
BODY_BYTES_MAX = 16 * 2**20
BATCHES_KEPT = 2048
VALUES = 4
# Rows and tokens of the calls before it listens: libraries choose their kernels and memory in the first ones.
WARM_UP = ((1, 8), (1, 64), (8, 64), (64, 16), (64, 64), (64, 128), (64, 256), (64, TOKENS_MAX))


class Stats(msgspec.Struct):
    """What the model did so far, on the device of this name."""

    name: str
    # From the launch of a call until its result is back, summed: there is one call at a time.
    busy_s: float = 0.0
    calls: int = 0
    inputs: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0


class Model:
    """The encoder on its device. `encode` is called by one thread at a time."""

    def __init__(self, shape: Shape, weights: Path | None, device: str) -> None:
        import torch

        # Of the kernels for attention it plans for each new shape, and here nearly every batch has one.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = torch.cuda.get_device_name() if self._device.startswith("cuda") else self._device
        if weights is None:
            self._forward = encoder = random_encoder(shape)
        else:
            from transformers import AutoModel

            encoder = AutoModel.from_pretrained(weights)
            self._forward = lambda ids, mask: encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        encoder.to(self._device, torch.float32 if self._device == "cpu" else torch.float16).eval()
        self.stats = Stats(name)

    def encode(self, tokens: Tokens) -> list[list[float]]:
        """The first numbers of each text's vector, which is the mean over its own tokens."""
        torch = self._torch
        began = perf_counter()
        with torch.inference_mode():
            ids = torch.frombuffer(bytearray(tokens.ids), dtype=torch.int32).view(len(tokens.lengths), -1)
            ids = ids.to(self._device)
            lengths = torch.tensor(tokens.lengths, device=self._device)[:, None]
            mask = torch.arange(ids.shape[1], device=self._device) < lengths
            states = self._forward(ids, mask if tokens.real < tokens.padded else None)
            vectors = (states * mask[:, :, None]).sum(1) / lengths
            values = cast("list[list[float]]", vectors[:, :VALUES].float().cpu().tolist())
        stats = self.stats
        stats.busy_s += perf_counter() - began
        stats.calls += 1
        stats.inputs += len(tokens.lengths)
        stats.padded_tokens += tokens.padded
        stats.real_tokens += tokens.real
        return values

    def warm_up(self) -> None:
        """Call it as it will be called; none of that counts."""
        for rows, tokens in WARM_UP * 2:
            for shortest in (tokens, max(1, tokens // 2)):
                self.encode(Tokens(bytes(rows * tokens * TOKEN_BYTES), [shortest] * (rows - 1) + [tokens]))
        self.stats = Stats(self.stats.name)


class Call(msgspec.Struct):
    """A batch; or one text, by itself."""

    inputs: list[str] = []
    input: str | None = None


class Site:
    """What the connections of one process share: the model has a thread, so that the event loop goes on."""

    def __init__(self, model: Model, tokenize: Callable[[Sequence[str]], Tokens], echo: bool) -> None:
        self._model, self._tokenize, self._echo = model, tokenize, echo
        self._gpu, self._cpu = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._batches: deque[list[int]] = deque(maxlen=BATCHES_KEPT)

    async def answer(self, path: bytes, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        if path == b"/stats":
            return 200, self._model.stats
        if path == b"/batches":
            batches = list(self._batches)
            self._batches.clear()
            return 200, batches
        try:
            call = msgspec.json.decode(body, type=Call)
        except msgspec.DecodeError as fault:
            return 400, {"error": str(fault)}
        texts = call.inputs if call.input is None else [call.input]
        if not 1 <= len(texts) <= BATCH_MAX:
            return 400, {"error": f"{len(texts)} inputs, a batch has 1 to {BATCH_MAX}"}
        outputs = await self._outputs(texts)
        return 200, {"outputs": outputs} if call.input is None else {"output": outputs[0]}

    async def _outputs(self, texts: list[str]) -> list[Any]:
        self._batches.append([len(text.encode()) for text in texts])
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(self._cpu, self._tokenize, texts)
        values = await loop.run_in_executor(self._gpu, self._model.encode, tokens)
        return [text[::-1] for text in texts] if self._echo else values


class Connection(asyncio.Protocol):
    """HTTP/1.1, one request at a time."""

    def __init__(self, site: Site) -> None:
        self._site, self._parser = site, httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            self._transport.abort()

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        self._answering = asyncio.get_running_loop().create_task(self._answer(self._path, body))

    async def _answer(self, path: bytes, body: bytes) -> None:
        status, value = await self._site.answer(path, body)
        content = msgspec.json.encode(value)
        head = b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(content))
        self._transport.write(head + content)


def serve(port: int, options: argparse.Namespace) -> None:
    """One process with a model of its own."""

    async def until_terminated() -> None:
        model = Model(SHAPES[options.shape], options.weights, options.device)
        model.warm_up()
        site = Site(model, tokenizer_of(options.weights), options.echo)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        async with await loop.create_server(lambda: Connection(site), "127.0.0.1", port, backlog=4096):
            print(f"{options.shape} on {model.stats.name}: http://127.0.0.1:{port}/infer", flush=True)
            await ended.wait()

    uvloop.run(until_terminated())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bert")
    parser.add_argument("--weights", type=Path, help="a folder with weights and a tokenizer, in place of random ones")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--processes", type=int, default=1, help="on consecutive ports, each with the model")
    parser.add_argument("--device", default="", help="by default cuda, or cpu where there is none")
    parser.add_argument("--echo", action="store_true", help="answer the text reversed, after the same work")
    options = parser.parse_args()
    # Not forks: CUDA wants processes of its own. They end with this one.
    spawned = multiprocessing.get_context("spawn")
    for number in range(1, options.processes):
        spawned.Process(target=serve, args=(options.port + number, options), daemon=True).start()
    serve(options.port, options)


if __name__ == "__main__":
    main()
