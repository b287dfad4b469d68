"""A server of models that embed and complete, in every protocol that has a list, in a thread of its own.

The vector of an input begins with `first_of_vector` of its JSON bytes, and has two numbers more. A completion is the
prompt reversed. What came is kept, body by body.
"""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from carpool.upstream.simulated import first_of_vector
from support.processes import PATIENCE_S


def vector_of(value: Any) -> list[float]:
    """What a model here makes of an input."""
    return [first_of_vector(json.dumps(value).encode()), 0.5, -0.25]


class Embedder:
    """The server; calls wait while `gate` is closed."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        inputs = next(body[field] for field in ("input", "inputs", "instances", "prompt") if field in body)
        vectors = list(map(vector_of, inputs))
        if path.endswith("/embeddings"):
            data = [{"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(vectors)]
            tokens = 3 * len(inputs)
            return {"data": data[::-1], "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        if path == "/v1/completions":
            choices = [
                {"text": str(text)[::-1], "index": n, "finish_reason": "length", "logprobs": None}
                for n, text in enumerate(inputs)
            ]
            return {
                "choices": choices,
                "usage": {"prompt_tokens": 2 * len(inputs), "completion_tokens": 5 * len(inputs)},
            }
        if path.endswith(":predict"):
            return {"predictions": vectors}
        return vectors if path == "/embed" else {"outputs": vectors}

    @contextmanager
    def running(self, port: int = 0) -> Iterator["Embedder"]:
        """Until the block ends; on a free port, or this one."""
        embedder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                embedder.bodies.append(body)
                embedder.gate.wait(PATIENCE_S)
                self.reply(json.dumps(embedder.answer(self.path, body)).encode())

            def reply(self, data: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing is said."""

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            server.shutdown()
            thread.join()
            server.server_close()


if __name__ == "__main__":
    with ExitStack() as all_of_them:
        for given in sys.argv[1:]:
            embedder = all_of_them.enter_context(Embedder().running(int(given)))
            print(f"serving on {embedder.url}", flush=True)  # noqa: T201
        signal.pause()
