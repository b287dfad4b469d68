"""`uvicorn MODULE:NAME --port N` for the `fastapi` beside this, for where uvicorn is not installed."""

import argparse
import importlib
import sys

from aiohttp import web

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="uvicorn")
    parser.add_argument("app")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    sys.path.insert(0, "")
    module, _, name = options.app.partition(":")
    said = f"Uvicorn running on http://127.0.0.1:{options.port}"
    application = getattr(importlib.import_module(module), name).application
    web.run_app(application, host="127.0.0.1", port=options.port, print=lambda *_: print(said, flush=True))  # noqa: T201
