"""The page of docs/stream.md in a real browser: another origin, a ticket, a stream."""

import re
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from support.gateway import SIM, serving
from support.processes import PATIENCE_S

DOCS = Path(__file__).parents[2] / "docs" / "stream.md"


def test_a_page_asks_over_a_stream(tmp_path: Path) -> None:
    is_answered = threading.Event()

    class Pages(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            if self.path == "/answered":
                is_answered.set()
            if self.path in ("/until-answered", "/answered"):  # a page is looked at when its pictures are there
                is_answered.wait(PATIENCE_S)
                self.send_error(404)
            else:
                super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = f"http://127.0.0.1:{server.server_port}"
    with serving(tmp_path / "gateway", SIM, settings={"gateway.cors_origins": page}) as gateway:
        (text,) = re.findall(r"```html[^\n]*\n(.*?)```", DOCS.read_text(), re.DOTALL)
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{gateway.port}")
        told = 'stream.addEventListener("message", () => { if (said.textContent.includes("3:")) fetch("/answered"); });'
        text = text.replace("</script>", f"{told}</script>").replace("<pre", '<img src="/until-answered"><pre')
        (tmp_path / "index.html").write_text(text)
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [f"--timeout={PATIENCE_S * 1000:.0f}", "--dump-dom", page]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True)
    server.shutdown()
    server.server_close()
    shown = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown is not None
    assert sorted(shown[1].split("\n")[:-1]) == [f'{n}: "{n} txet"' for n in (1, 2, 3)]
